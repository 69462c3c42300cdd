package proxy

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
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
		found, err := installed(t.Context(), clients{}, asked, addrs)
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

// slowLooker is a Dataplane whose reads take a minute, and call during in the middle.
type slowLooker struct {
	*fakeDataplane
	during func()
	reads  int
}

func (s *slowLooker) Look(ctx context.Context, fronts []dataplane.Asked, _ netip.Addr) ([]dataplane.Installed, error) {
	s.reads++
	time.Sleep(30 * time.Second) // in the bubble
	s.during()
	time.Sleep(30 * time.Second)
	return make([]dataplane.Installed, len(fronts)), ctx.Err()
}

func (s *slowLooker) Drops(context.Context) ([]dataplane.DropCount, error) { return nil, nil }

// A read that takes long does not keep changes from being programmed. If what was asked for changes meanwhile, it is read again, and
// not for ever.
func TestSlowLookDelaysNothing(t *testing.T) {
	slow := &slowLooker{}
	inBubble(t, func(o *Options) {
		slow.fakeDataplane = o.Dataplane.(*fakeDataplane)
		o.Dataplane = slow
	}, func(w *world) {
		w.setService(service("asked", 1))
		w.setSlice(slice("asked", 1))
		w.settle(time.Second)
		n := 1
		change := func(name string) func() {
			return func() {
				n++
				calls := len(w.plane.calls)
				w.setService(service(name, n))
				w.setSlice(slice(name, n))
				w.settle(time.Second)
				if len(w.plane.calls) == calls {
					t.Errorf("the change of %s was not programmed during the read", name)
				}
			}
		}
		look := func() (*View, error) {
			return w.proxy.Look(w.t.Context(), func(tab *table.Table) []*table.ServicePort {
				for p := range tab.All() {
					if p.ID.Name.Name == "asked" {
						return []*table.ServicePort{p}
					}
				}
				return nil
			}, nil)
		}
		slow.during = change("other")
		if v, err := look(); err != nil || slow.reads != 1 || len(v.Ports) != 1 || len(v.Ports[0].Installed) != 1 {
			t.Errorf("another Service changed: %+v, %v, %d reads", v, err, slow.reads)
		}
		slow.reads = 0
		once := change("asked")
		slow.during = func() {
			if slow.reads == 1 {
				once()
			}
		}
		if v, err := look(); err != nil || slow.reads != 2 || v.Ports[0].Port.Frontends[0].Endpoints[0].Addr.Addr().String() != "10.244.0.3" {
			t.Errorf("the Service changed: %+v, %v, %d reads", v, err, slow.reads)
		}
		slow.reads, slow.during = 0, change("asked")
		if _, err := look(); !errors.Is(err, errChanges) || slow.reads != maxLooks {
			t.Errorf("the Service changes all the time: %v, %d reads", err, slow.reads)
		}
	})
}
