package proxy

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// A Service that asks for direct return has a problem where the mode or the kernel cannot do it. The kernel is asked once, and not for
// Services that do not ask.
func TestForwardingNeedsTheMode(t *testing.T) {
	asked := 0
	hops := func() map[string]table.NextHop { return nil }
	forwards := func(err error) func() error { return func() error { asked++; return err } }
	for _, c := range []struct {
		name  string
		o     Options
		value string
		want  bool
		fails string
		asked int
	}{
		{name: "another mode", o: Options{Mode: "ipvs"}, value: svc.ForwardingDirect, fails: "mode ipvs of the proxy translates"},
		{name: "not asked", o: Options{Mode: "nft", Forwards: forwards(nil), NextHops: hops}},
		{name: "asked", o: Options{Mode: "nft", Forwards: forwards(nil), NextHops: hops}, value: svc.ForwardingDirect, want: true, asked: 1},
		{name: "all", o: Options{Mode: "nft", Forwards: forwards(nil), NextHops: hops, AllDirect: true}, want: true, asked: 1},
		{name: "all in another mode", o: Options{Mode: "ipvs", AllDirect: true}},
		{name: "the kernel cannot", o: Options{Mode: "nft", Forwards: forwards(errors.New("no dup")), NextHops: hops},
			value: svc.ForwardingDirect, fails: "no dup", asked: 1},
	} {
		asked = 0
		f := c.o.tableConfig().Forwarding
		for range 2 {
			got, err := f(map[string]string{svc.ForwardingAnnotation: c.value})
			if got != c.want || (err == nil) != (c.fails == "") || err != nil && !strings.Contains(err.Error(), c.fails) {
				t.Errorf("%s: %v, %v; want %v, error %q", c.name, got, err, c.want, c.fails)
			}
		}
		if asked != c.asked {
			t.Errorf("%s: the kernel was asked %d times, want %d", c.name, asked, c.asked)
		}
	}
}

// The first Table has the ways to other nodes: without them it would translate what the process before passed on. It waits for them
// nextHopsWait at most.
func TestFirstTableHasNextHops(t *testing.T) {
	for name, known := range map[string]time.Duration{"soon": nextHopsWait / 4, "late": 5 * nextHopsWait} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			change := func(o *Options) {
				start = time.Now()
				external := service("a", 1)
				external.Spec.ExternalIPs = []string{"203.0.113.1"}
				endpoints := slice("a", 1)
				endpoints.Endpoints = append(endpoints.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.244.1.1"}, NodeName: new("there")})
				w := &world{t: t, client: o.Client.(*fake.Clientset)}
				w.setService(external)
				w.setSlice(endpoints)
				o.Mode, o.AllDirect, o.Forwards = "nft", true, func() error { return nil }
				o.NextHops = func() map[string]table.NextHop {
					if time.Since(start) < known {
						return nil
					}
					return map[string]table.NextHop{"there": {IPv4: netip.MustParseAddr("192.0.2.2")}}
				}
			}
			inBubble(t, change, func(w *world) {
				if len(w.plane.calls) > 0 {
					t.Error("the first Table does not wait for the ways to other nodes")
				}
				w.settle(known)
				w.proxy.PodsChanged()
				w.settle(time.Second)
				first, want := w.plane.calls[0].at.Sub(start), min(known, nextHopsWait)
				if first != want {
					t.Errorf("the first Table is applied after %v, want %v", first, want)
				}
				if d := w.dump(); !strings.Contains(d, "192.0.2.2") {
					t.Errorf("nothing is passed on:\n%s", d)
				}
			})
		})
	}
}
