package nft

import (
	"context"
	"errors"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// Clients that another program has kept go where it has led them, at virtual IPs and node ports of both families; one that is kept
// here stays. What is kept can be read, until the reader has enough.
func TestKeep(t *testing.T) {
	e := flows.NewEnv(t, create)
	c, d := e.Host("c"), e.Host("d")
	web4, web6 := e.Affine(t)
	front4, front6 := web4.Frontends[0], web6.Frontends[0]
	first, err := d.Ask(t.Context(), svc.TCP, front4.Addr)
	if err != nil {
		t.Fatal(err)
	}
	want := map[netip.AddrPort]map[netip.Addr]uint64{ // c has been at a before
		front4.Endpoints[0].Addr: {c.Addr4(): 6}, front4.Endpoints[1].Addr: {c.Addr4(): 7, d.Addr4(): 1},
		front6.Endpoints[1].Addr: {c.Addr6(): 0},
	}
	var kept []dataplane.Kept
	e.Node.Do(func() {
		err = Keep(t.Context(), func(id svc.PortName, p svc.Protocol, at netip.AddrPort) (map[netip.Addr]uint64, error) {
			if id.Name != web4.ID.Name || id.Port != "http" || p != svc.TCP {
				t.Errorf("asked for %s, %s", id, p)
			}
			return want[at], nil
		})
		err = errors.Join(err, Clients(t.Context(), func(k dataplane.Kept) error {
			kept = append(kept, k)
			return nil
		}))
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 8 {
		for _, to := range []netip.AddrPort{front4.Addr, netip.AddrPortFrom(e.Node.Addr4(), 30080), front6.Addr} {
			if got, err := c.Ask(t.Context(), svc.TCP, to); err != nil || got.Name != "b" {
				t.Errorf("%s leads the client to %q, %v; want b", to, got.Name, err)
			}
		}
		if got, err := d.Ask(t.Context(), svc.TCP, front4.Addr); err != nil || got.Name != first.Name {
			t.Errorf("a client that was at %s is led to %q, %v", first.Name, got.Name, err)
		}
	}
	count := map[dataplane.Kept]int{}
	for _, k := range kept {
		count[k]++
	}
	at4, at6 := front4.Endpoints[1].Addr, front6.Endpoints[1].Addr
	if len(kept) != 5 || count[dataplane.Kept{Port: web4.ID, Protocol: svc.TCP, Client: c.Addr4(), Endpoint: at4}] != 2 ||
		count[dataplane.Kept{Port: web4.ID, Protocol: svc.TCP, Client: c.Addr6(), Endpoint: at6}] != 1 {
		t.Errorf("kept are %+v", kept)
	}
	stop := errors.New("enough")
	e.Node.Do(func() { err = Clients(context.Background(), func(dataplane.Kept) error { return stop }) })
	if !errors.Is(err, stop) {
		t.Errorf("the reader's error is lost: %v", err)
	}
}
