package proxy

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
)

// clients is a dataplane.Looker that answers with the client that it was asked for.
type clients struct{}

func (clients) Look(_ context.Context, fronts []dataplane.Asked, client netip.Addr) ([]dataplane.Installed, error) {
	out := make([]dataplane.Installed, len(fronts))
	for i := range out {
		out[i] = dataplane.Installed{Front: fronts[i].Addr.String(), Kept: netip.AddrPortFrom(client, 1)}
	}
	return out, nil
}

// Frontends of each family are read with the client's address of that family, and keep their order.
func TestLookOfBothFamilies(t *testing.T) {
	of := map[svc.Family]netip.Addr{svc.IPv4: netip.MustParseAddr("192.0.2.1"), svc.IPv6: netip.MustParseAddr("2001:db8::1")}
	var asked []dataplane.Asked
	for i, f := range []svc.Family{svc.IPv6, svc.IPv4, svc.IPv6} {
		a := netip.MustParseAddr("10.96.0.10")
		if f == svc.IPv6 {
			a = netip.MustParseAddr("fd00::")
		}
		for range i {
			a = a.Next()
		}
		asked = append(asked, dataplane.Asked{FrontKey: dataplane.FrontKey{Addr: a}, Family: f})
	}
	for _, addrs := range [][]netip.Addr{nil, {of[svc.IPv4]}, {of[svc.IPv4], of[svc.IPv6]}, {of[svc.IPv6], of[svc.IPv4]}} {
		found, err := (&look{ctx: t.Context(), clients: addrs}).installed(clients{}, asked)
		if err != nil || len(found) != len(asked) {
			t.Fatal(found, err)
		}
		for i := range asked {
			var want netip.Addr
			if slices.Contains(addrs, of[asked[i].Family]) {
				want = of[asked[i].Family]
			}
			if found[i].Front != asked[i].Addr.String() || found[i].Kept.Addr() != want {
				t.Errorf("client %v, %s: %+v, want %s", addrs, asked[i].Addr, found[i], want)
			}
		}
	}
}
