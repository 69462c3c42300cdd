package dialect

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
)

func TestScheduler(t *testing.T) {
	has := []string{"rr", "lc", "mh"}
	for _, c := range []struct{ value, want, fails string }{
		{"lc", "lc", ""},
		{" mh ", "mh", ""},
		{"", "", ""},
		{"sed", "", `"sed" is not available on this node (available: rr, lc, mh)`},
		{"RR", "", `"RR" is not`},
		{"rr\n-> 1.2.3.4", "", `"rr\n-> 1.2.3.4" is not`},
		{strings.Repeat("x", 5000), "", `x..." is not`},
	} {
		got, err := Scheduler(map[string]string{svc.SchedulerAnnotation: c.value, "other": "lc"}, has)
		if got != c.want || (err == nil) != (c.fails == "") || err != nil && !strings.Contains(err.Error(), c.fails) {
			t.Errorf("%.20q: %q, %v, want %q, error %q", c.value, got, err, c.want, c.fails)
		}
		if err != nil && len(err.Error()) > 300 {
			t.Errorf("%.20q: an error of %d bytes", c.value, len(err.Error()))
		}
	}
	if got, err := Scheduler(map[string]string{"other": "nonsense"}, has); got != "" || err != nil {
		t.Errorf("without the annotation: %q, %v", got, err)
	}
}
