package ipvs

import (
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/plane"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

func TestFlows(t *testing.T) { flows.Run(t, mode, create("")) }

// UDP flows are forgotten soon, since affinity lasts as long as any of a client's.
func TestStories(t *testing.T) {
	flows.Stories(t, func(t testing.TB, _ *testbed.Host) plane.Plane {
		t.Helper()
		p, err := New(Config{Variant: legacy, ServiceCIDRs: serviceCIDRs, Timeouts: ipvs.Timeouts{UDP: time.Second}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}, flows.Lingering)
}
