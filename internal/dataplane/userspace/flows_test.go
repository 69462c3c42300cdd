package userspace

import (
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

func TestMain(m *testing.M) { testbed.Main(m) }

var serviceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}

func create(t testing.TB, _ *testbed.Host) dataplane.Applier {
	t.Helper()
	p, err := New(Config{ServiceCIDRs: serviceCIDRs})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestFlows(t *testing.T) { flows.Run(t, "userspace", create) }

func TestStories(t *testing.T) { flows.Stories(t, create, flows.Relayed) }

func TestLostPacketsAreCounted(t *testing.T) { flows.Counts(t, create) }
