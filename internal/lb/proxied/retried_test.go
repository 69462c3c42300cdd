package proxied

import (
	"fmt"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/testbed"
)

// A connection that goes on to another Pod is counted for the one that was not reached, in either way of carrying plain connections,
// and metrics name that one as not healthy. Where there is no other Pod nothing is counted.
func TestRetriedConnectionsAreCountedByPod(t *testing.T) {
	for what, annotations := range map[string]map[string]string{
		"plain": {"fairlead.dev/lb-idle-timeout": "60"}, "PROXY protocol": {"fairlead.dev/lb-proxy-protocol": "v1"},
	} {
		r := newRig(t, annotations)
		good, gone := r.Pod(lbtest.Named("good")), r.Free()
		r.set(good, gone)
		for range 2 { // one of them begins at the Pod that is gone
			if got, err := lbtest.Say(r.Dial(), "hello"); err != nil || !strings.HasPrefix(got, "good") {
				t.Fatalf("%s: %q, %v", what, got, err)
			}
		}
		const of = `namespace="default",service="web"} `
		testbed.Until(t, "metrics of "+what, func() error {
			text := lbtest.Metrics(t, r.server.Collector())
			for _, line := range []string{
				`fairlead_lb_endpoint_retries_total{endpoint="` + gone.String() + `",` + of + "1\n",
				`fairlead_lb_endpoint_retries_total{endpoint="` + good.String() + `",` + of + "0\n",
				`fairlead_lb_endpoint_healthy{endpoint="` + gone.String() + `",` + of + "0\n",
				`fairlead_lb_endpoint_healthy{endpoint="` + good.String() + `",` + of + "1\n",
			} {
				if !strings.Contains(text, line) {
					return fmt.Errorf("no %s in %s", line, text)
				}
			}
			return nil
		})
		last := r.Free()
		r.set(last)
		if got, err := lbtest.Say(r.Dial(), "hello"); err == nil {
			t.Errorf("%s: an answer of no Pod: %q", what, got)
		}
		text := lbtest.Metrics(t, r.server.Collector())
		for _, line := range []string{
			`fairlead_lb_endpoint_failures_total{endpoint="` + last.String() + `",` + of + "1\n",
			`fairlead_lb_endpoint_retries_total{endpoint="` + last.String() + `",` + of + "0\n", `fairlead_lb_retries_total{` + of + "1\n",
		} {
			if !strings.Contains(text, line) {
				t.Errorf("%s: no %s in %s", what, line, text)
			}
		}
	}
}
