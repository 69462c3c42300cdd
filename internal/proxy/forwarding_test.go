package proxy

import (
	"errors"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// A Service that asks for direct return has a problem where the mode or the kernel cannot do it. The kernel is asked once, and not for
// Services that do not ask.
func TestForwardingNeedsTheMode(t *testing.T) {
	asked := 0
	hops := func() map[string]table.NextHop { return nil }
	forwards := func(err error) func() error { return func() error { asked++; return err } }
	for _, c := range []struct {
		name  string
		o     Options
		value string
		want  bool
		fails string
		asked int
	}{
		{name: "another mode", o: Options{Mode: "ipvs"}, value: svc.ForwardingDirect, fails: "mode ipvs of the proxy translates"},
		{name: "not asked", o: Options{Mode: "nft", Forwards: forwards(nil), NextHops: hops}},
		{name: "asked", o: Options{Mode: "nft", Forwards: forwards(nil), NextHops: hops}, value: svc.ForwardingDirect, want: true, asked: 1},
		{name: "all", o: Options{Mode: "nft", Forwards: forwards(nil), NextHops: hops, AllDirect: true}, want: true, asked: 1},
		{name: "all in another mode", o: Options{Mode: "ipvs", AllDirect: true}},
		{name: "the kernel cannot", o: Options{Mode: "nft", Forwards: forwards(errors.New("no dup")), NextHops: hops},
			value: svc.ForwardingDirect, fails: "no dup", asked: 1},
	} {
		asked = 0
		f := c.o.tableConfig().Forwarding
		for range 2 {
			got, err := f(map[string]string{svc.ForwardingAnnotation: c.value})
			if got != c.want || (err == nil) != (c.fails == "") || err != nil && !strings.Contains(err.Error(), c.fails) {
				t.Errorf("%s: %v, %v; want %v, error %q", c.name, got, err, c.want, c.fails)
			}
		}
		if asked != c.asked {
			t.Errorf("%s: the kernel was asked %d times, want %d", c.name, asked, c.asked)
		}
	}
}
