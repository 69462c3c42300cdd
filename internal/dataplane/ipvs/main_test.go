package ipvs

import (
	"flag"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
	"github.com/fairlead/fairlead/internal/testbed/uml"
)

var update = flag.Bool("update", false, "write the golden files")

// All tests run inside User Mode Linux, on a real kernel with IPVS.
func TestMain(m *testing.M) { uml.Main(m) }

var serviceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}

// legacy is the variant that the guest's kernel can do NAT with.
const legacy = iptables.Legacy

// create makes Planes with a scheduler.
func create(scheduler string) flows.Factory {
	return func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		t.Helper()
		p, err := New(Config{Variant: legacy, Scheduler: scheduler, ServiceCIDRs: serviceCIDRs})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
}

// inside makes an empty network namespace and runs f there, with an Applier.
func inside(t testing.TB, f func(p dataplane.Applier)) {
	t.Helper()
	testbed.NewNetwork(t).Outside("host").Do(func() {
		p := create("")(t, nil)
		defer func() {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}()
		f(p)
	})
}
