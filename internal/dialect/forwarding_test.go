package dialect

import (
	"errors"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
)

func TestForwarding(t *testing.T) {
	for _, c := range []struct {
		value, unable string
		all, want     bool
		fails         string
	}{
		{value: ""},
		{value: "", all: true, want: true},
		{value: "", all: true, unable: "mode ipvs"},
		{value: " direct ", want: true},
		{value: "nat", all: true},
		{value: "nat", unable: "mode ipvs"},
		{value: "direct", unable: "mode ipvs", fails: "no effect on this node: mode ipvs"},
		{value: "Direct", fails: `"Direct" has no effect; want direct or nat`},
		{value: "Direct", all: true, want: true, fails: "want direct or nat"},
		{value: "true\n-> 1.2.3.4", fails: `"true\n-> 1.2.3.4" has no effect`},
		{value: strings.Repeat("x", 5000), fails: `x..." has`},
	} {
		unable := func() error {
			if c.unable == "" {
				return nil
			}
			return errors.New(c.unable)
		}
		got, err := Forwarding(map[string]string{svc.ForwardingAnnotation: c.value, "other": "direct"}, c.all, unable)
		if got != c.want || (err == nil) != (c.fails == "") || err != nil && !strings.Contains(err.Error(), c.fails) {
			t.Errorf("%.20q, all %v, %q: %v, %v, want %v, error %q", c.value, c.all, c.unable, got, err, c.want, c.fails)
		}
		if err != nil && len(err.Error()) > 300 {
			t.Errorf("%.20q: an error of %d bytes", c.value, len(err.Error()))
		}
	}
}
