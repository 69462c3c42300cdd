package ipvs

import (
	"flag"
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

// legacy is the variant that the guest's kernel can do NAT with.
const legacy = iptables.Legacy

// create makes Planes with a scheduler.
func create(scheduler string) flows.Factory {
	return func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		t.Helper()
		p, err := New(Config{Variant: legacy, Scheduler: scheduler})
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
