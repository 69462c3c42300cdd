package uml

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/iptables"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// Mode iptables, whose own tests make SCTP packets by hand, with the real SCTP of
// the guest's kernel (behaviours 174 to 176, 105).
func TestIptablesCarriesSCTP(t *testing.T) {
	e := flows.NewEnv(t, func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		t.Helper()
		p, err := iptables.New(iptables.Config{Variant: iptables.Legacy, DropInvalid: true})
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
	asked := 0
	for i := range flows.Rows {
		r := &flows.Rows[i]
		if !slices.Contains(r.Protocols, svc.SCTP) {
			continue
		}
		for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
			asked++
			t.Run(fmt.Sprintf("%s/%s", r.Name, f), func(t *testing.T) {
				e.Apply(t, e.Table(f, svc.SCTP, r), nil)
				e.Forget(t)
				e.Check(t, f, svc.SCTP, r)
			})
		}
	}
	if asked < 10 {
		t.Errorf("only %d rows speak SCTP", asked)
	}
	forgets(t, e)
}

// forgets shows that connection tracking lets go of an association when it is
// told to.
func forgets(t *testing.T, e *flows.Env) {
	r := &flows.Row{Services: []flows.Service{{Name: "web", Fronts: []flows.Front{{To: "a"}}}}}
	e.Apply(t, e.Table(svc.IPv4, svc.SCTP, r), nil)
	e.Forget(t)
	vip := netip.MustParseAddrPort("10.96.0.10:80")
	c, err := e.Host("c").Dial(t.Context(), svc.SCTP, vip)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	for _, want := range []int{1, 0} {
		var n int
		e.Node.Do(func() {
			n, err = conntrack.Delete(t.Context(), []conntrack.Flow{{
				Protocol: svc.SCTP, OrigDst: vip, ReplySrc: netip.AddrPortFrom(e.Host("a").Addr4(), 9376),
			}})
		})
		if err != nil || n != want {
			t.Errorf("deleted %d tracked associations, %v, want %d", n, err, want)
		}
	}
}
