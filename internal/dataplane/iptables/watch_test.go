package iptables

import (
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// What the mode itself writes is no change by another program: it would read
// everything after each change of a Service.
func TestOwnChangesAreNotReported(t *testing.T) {
	testbed.NewNetwork(t).Outside("host").Do(func() {
		m, err := New(Config{Variant: NFT})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = m.Close() }()
		token := func() bool {
			select {
			case <-m.Changed():
				return true
			default:
				return false
			}
		}
		port := func(endpoints ...string) *table.ServicePort {
			return flows.Port("web", "", svc.IPv4, svc.TCP,
				table.Frontend{Addr: flows.AP("10.96.0.10:80"), Endpoints: flows.Endpoints(endpoints...)})
		}
		flows.Apply(t, m, table.New(), nil)
		for i, p := range []*table.ServicePort{port("10.0.0.1:80"), port("10.0.0.1:80", "10.0.0.2:80"), port("10.0.0.2:80"), port()} {
			token() // an earlier one does not count
			flows.Apply(t, m, table.New(p), []table.Key{p.Key()})
			if token() {
				t.Errorf("change %d was reported", i)
			}
		}
		flows.Command(t, "", "nft", "flush", "chain", "ip", "nat", chainServices)
		<-m.Changed()
	})
}
