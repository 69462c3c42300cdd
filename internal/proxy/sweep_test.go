package proxy

import (
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// A UDP client whose endpoint, or Service, went while no proxy ran is freed at
// the start of the next one; everybody else's flows stay.
func TestSweepOfTheKernel(t *testing.T) {
	e := flows.NewEnv(t, modes[0].create)
	vip := netip.MustParseAddrPort("10.96.0.10:80")
	web := func(to ...string) *table.Table {
		p := flows.Port("web", "", svc.IPv4, svc.UDP, table.Frontend{Addr: vip})
		for _, name := range to {
			p.Frontends[0].Endpoints = append(p.Frontends[0].Endpoints, table.Endpoint{Addr: netip.AddrPortFrom(e.Host(name).Addr4(), 9376),
				Local: true})
		}
		return table.New(p)
	}
	sweep := func(tab *table.Table) int {
		t.Helper()
		var n int
		var err error
		e.Node.Do(func() {
			var c *conntrack.Conn
			if c, err = conntrack.Dial(); err == nil {
				defer func() { _ = c.Close() }()
				n, err = c.Sweep(t.Context(), conntrack.Scope{}, newSweep(tab, serviceCIDRs, false).stale)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	e.Apply(t, web("a"), nil)
	c, err := e.Host("c").Dial(t.Context(), svc.UDP, vip)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	reaches := func(name string) {
		t.Helper()
		if got, err := testbed.AskOn(c); err != nil || got.Name != name {
			t.Errorf("the client reaches %q, %v, want %s", got.Name, err, name)
		}
	}
	reaches("a")
	if n := sweep(web("a")); n != 0 {
		t.Errorf("%d flows removed, though all lead where they should", n)
	}
	e.Apply(t, web("b"), nil)
	reaches("a") // the kernel was not told
	if n := sweep(web("b")); n != 1 {
		t.Errorf("%d flows removed, want the one to a", n)
	}
	reaches("b")
	e.Apply(t, table.New(), nil)
	if n := sweep(table.New()); n != 1 {
		t.Errorf("%d flows removed, want that of the Service which is gone", n)
	}
}
