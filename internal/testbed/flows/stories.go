package flows

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
)

// Stories are what one question cannot ask: what happens from one Table to the
// next. Every mode runs them beside Run.
func Stories(t *testing.T, create Factory, opts ...Option) {
	for _, s := range []struct {
		name   string
		run    func(*testing.T, *Env)
		before func(*testbed.Host) // of the node, before there is a data plane
	}{
		{"affinity outlasts changes of other endpoints", affinityOutlasts, nil},
		{"affinity ends with its endpoint", affinityEnds, nil},
		{"affinity ends with its time, counted from the last connection", affinityTimesOut, nil},
		{"endpoints are met equally often", spread, nil},
		{"an open connection survives every change but that of its endpoint", openConnection, nil},
		{"a UDP client leaves an endpoint that is gone", udpLeaves, nil},
		{"a UDP client finds an endpoint that came late", udpFinds, nil},
		{"a new Service answers as soon as Apply returns", newService, nil},
		{"a load balancer's own address is no client", ownAddressAsSource, nil},
		{"a node without IPv6 serves IPv4", withoutIPv6, disableIPv6},
		{"unallocated ClusterIPs do not leave the node", rangesChange, nil},
		{"127.0.0.1 stays closed to other machines", loopbackStaysClosed, nil},
	} {
		t.Run(s.name, func(t *testing.T) {
			e := NewEnv(t, func(t testing.TB, h *testbed.Host) dataplane.Applier {
				t.Helper()
				if s.before != nil {
					s.before(h)
				}
				return create(t, h)
			})
			for _, o := range opts {
				o(&e.options)
			}
			s.run(t, e)
		})
	}
}

// web is the Table of one Service port with one ClusterIP.
func (e *Env) web(f svc.Family, p svc.Protocol, affinity time.Duration, to string) *table.Table {
	return e.Table(f, p, &Row{Services: []Service{{Name: "web", Affinity: affinity, Fronts: []Front{{Kind: clusterIP, To: to}}}}})
}

func (e *Env) webKey(f svc.Family, p svc.Protocol) []table.Key {
	return []table.Key{e.servicePort(f, p, &Service{Name: "web"}).Key()}
}

func vipAddr(f svc.Family) netip.AddrPort { return netip.AddrPortFrom(vip(f, clusterIP), 80) }

func (e *Env) must(t testing.TB, from string, p svc.Protocol, to netip.AddrPort) string {
	t.Helper()
	got, err := e.Host(from).Ask(t.Context(), p, to)
	if err != nil {
		t.Fatalf("%s to %s: %v", from, to, err)
	}
	return got.Name
}

func families(t *testing.T, f func(*testing.T, svc.Family)) {
	for _, fam := range []svc.Family{svc.IPv4, svc.IPv6} {
		t.Run(fam.String(), func(t *testing.T) { f(t, fam) })
	}
}

// behaviour 61: across changes of the set of endpoints.
func affinityOutlasts(t *testing.T, e *Env) {
	families(t, func(t *testing.T, f svc.Family) {
		key := e.webKey(f, svc.TCP)
		e.Apply(t, e.web(f, svc.TCP, time.Hour, "a b d"), nil)
		for _, from := range []string{"c", "node"} {
			first := e.must(t, from, svc.TCP, vipAddr(f))
			others := slices.DeleteFunc([]string{"a", "b", "d"}, func(n string) bool { return n == first })
			// Whatever else goes and comes, in whatever order, the client stays.
			for i, to := range []string{
				first, first + " e", first + " e other", others[0] + " " + first, others[1] + " " + first + " e node", "a b d",
			} {
				changed := key
				if i%2 == 1 {
					changed = nil
				}
				e.Apply(t, e.web(f, svc.TCP, time.Hour, to), changed)
				for range 5 {
					if got := e.must(t, from, svc.TCP, vipAddr(f)); got != first {
						t.Fatalf("%s went to %s, then with %q to %s", from, first, to, got)
					}
				}
			}
		}
	})
}

// behaviour 61; kube-proxy keeps clients on endpoints that do not serve any more.
func affinityEnds(t *testing.T, e *Env) {
	families(t, func(t *testing.T, f svc.Family) {
		key := e.webKey(f, svc.TCP)
		left := []string{"a", "b", "d", "e"}
		e.Apply(t, e.web(f, svc.TCP, time.Hour, strings.Join(left, " ")), nil)
		for len(left) > 1 {
			at := e.must(t, "c", svc.TCP, vipAddr(f))
			left = slices.DeleteFunc(left, func(n string) bool { return n == at })
			e.Apply(t, e.web(f, svc.TCP, time.Hour, strings.Join(left, " ")), key)
			next := e.must(t, "c", svc.TCP, vipAddr(f))
			if !slices.Contains(left, next) {
				t.Fatalf("went to %s though only %q serve", next, left)
			}
			for range 10 {
				if got := e.must(t, "c", svc.TCP, vipAddr(f)); got != next {
					t.Fatalf("moved from %s to %s, then to %s: affinity to the new endpoint is missing", at, next, got)
				}
			}
		}
	})
}

// behaviour 62.
func affinityTimesOut(t *testing.T, e *Env) {
	const timeout = 2 * time.Second
	f, p := svc.IPv4, svc.TCP
	if e.options.balanced {
		p = svc.UDP
	}
	e.Apply(t, e.web(f, p, timeout, "a b d e"), nil)
	last := time.Now()
	first := e.must(t, "c", p, vipAddr(f))
	// Connections one after the other keep it well beyond the timeout. On a
	// machine that stalls for as long they prove nothing, and begin again.
	for start := last; time.Since(start) < 2*timeout; {
		before := last
		last = time.Now()
		got := e.must(t, "c", p, vipAddr(f))
		switch {
		case got == first:
		case time.Since(before) >= timeout:
			first, start = got, last
		default:
			t.Fatalf("went to %s after %v, though the last connection to %s is younger than %v", got, time.Since(start), first, timeout)
		}
		wait(t, 100*time.Millisecond)
	}
	// Left alone for the timeout, it ends: in at most 40 attempts another one
	// of four is met (but for a chance of 4^-40).
	for range 40 {
		wait(t, timeout+300*time.Millisecond)
		if got := e.must(t, "c", p, vipAddr(f)); got != first {
			return
		}
	}
	t.Errorf("always %s, though affinity had ended", first)
}

// wait lets real time pass: the kernel's clock is what is tested.
func wait(t testing.TB, d time.Duration) {
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// behaviour 46.
func spread(t *testing.T, e *Env) {
	const n = 3000
	f := svc.IPv4
	names := []string{"a", "b", "d", "e"}
	e.Apply(t, e.web(f, svc.TCP, 0, strings.Join(names, " ")), nil)
	var mu sync.Mutex
	seen := map[string]int{}
	var wg sync.WaitGroup
	var failed atomic.Int32
	for range 4 {
		wg.Go(func() {
			for range n / 4 {
				got, err := e.Host("c").Ask(t.Context(), svc.TCP, vipAddr(f))
				if err != nil {
					failed.Add(1)
					continue
				}
				mu.Lock()
				seen[got.Name]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if failed.Load() > 0 {
		t.Errorf("%d of %d connections failed", failed.Load(), n)
	}
	chi := 0.0
	for _, name := range names {
		d := float64(seen[name]) - n/4
		chi += d * d / (n / 4)
	}
	// Three degrees of freedom: more than 30 has a chance of about 1 in a
	// million.
	if chi > 30 {
		t.Errorf("connections went to %v, far from equal (chi square %.1f)", seen, chi)
	}
	t.Logf("%d connections: %v, chi square %.2f", n, seen, chi)
}

func openConnection(t *testing.T, e *Env) {
	families(t, func(t *testing.T, f svc.Family) {
		key := e.webKey(f, svc.TCP)
		e.Apply(t, e.web(f, svc.TCP, 0, "a"), nil)
		c, err := e.Host("c").Dial(t.Context(), svc.TCP, vipAddr(f))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		if _, err := testbed.AskOn(c); err != nil {
			t.Fatal(err)
		}
		for _, to := range []string{"a b", "b a d", "b d", "", "a"} {
			e.Apply(t, e.web(f, svc.TCP, 0, to), key)
			if err := echo(c, to); err != nil {
				t.Errorf("with endpoints %q: %v", to, err)
			}
		}
	})
}

func echo(c net.Conn, word string) error {
	word = "still there? " + word
	if err := c.SetDeadline(time.Now().Add(answerTime)); err != nil {
		return err
	}
	if _, err := c.Write([]byte(word)); err != nil {
		return err
	}
	b := make([]byte, len(word))
	for n := 0; n < len(b); {
		m, err := c.Read(b[n:])
		if err != nil {
			return err
		}
		n += m
	}
	if string(b) != word {
		return fmt.Errorf("sent %q, got %q back", word, b)
	}
	return nil
}

// udpLeaves and udpFinds show that what the node's loop asks of conntrack is
// what a mode needs (kubernetes/kubernetes#139628).
func udpLeaves(t *testing.T, e *Env) {
	families(t, func(t *testing.T, f svc.Family) {
		key := e.webKey(f, svc.UDP)
		e.Apply(t, e.web(f, svc.UDP, 0, "a"), nil)
		c, err := e.Host("c").Dial(t.Context(), svc.UDP, vipAddr(f))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		if got, err := testbed.AskOn(c); err != nil || got.Name != "a" {
			t.Fatalf("asked a: %+v, %v", got, err)
		}
		e.Apply(t, e.web(f, svc.UDP, 0, "b"), key)
		tracked := 1
		if e.options.relayed {
			tracked = 0
		}
		gone := netip.AddrPortFrom(e.Host("a").Addr(f), endpointPort)
		e.forgetFlows(t, tracked, conntrack.Flow{Protocol: svc.UDP, OrigDst: vipAddr(f), ReplySrc: gone})
		if got, err := testbed.AskOn(c); err != nil || got.Name != "b" {
			t.Errorf("asked b from the same socket: %+v, %v", got, err)
		}
		e.Apply(t, e.web(f, svc.UDP, 0, ""), key)
		e.forgetFlows(t, 1, conntrack.Flow{Protocol: svc.UDP, OrigDst: vipAddr(f)})
		if got, err := testbed.AskOn(c); !testbed.Refused(err) {
			t.Errorf("asked no endpoint from the same socket: %+v, %v, want refused", got, err)
		}
		e.Apply(t, e.web(f, svc.UDP, 0, "d"), key)
		if got, err := testbed.AskOn(c); err != nil || got.Name != "d" {
			t.Errorf("asked d from the same socket: %+v, %v; refused packets must leave no trace", got, err)
		}
	})
}

func udpFinds(t *testing.T, e *Env) {
	families(t, func(t *testing.T, f svc.Family) {
		e.Apply(t, table.New(), nil)
		out := netip.AddrPortFrom(vip(f, lbIP), 80)
		c, err := e.Host("c").Dial(t.Context(), svc.UDP, out)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		if _, err := c.Write([]byte("?")); err != nil { // into the black hole
			t.Fatal(err)
		}
		testbed.Until(t, "the datagram to be tracked", func() error { return e.Node.Tracks(svc.UDP, out) })
		r := &Row{Services: []Service{{Name: "web", Fronts: []Front{{Kind: lbIP, To: "a", Masquerade: true}}}}}
		e.Apply(t, e.Table(f, svc.UDP, r), nil)
		e.forgetFlows(t, 1, conntrack.Flow{Protocol: svc.UDP, OrigDst: out, ReplySrc: out})
		if got, err := testbed.AskOn(c); err != nil || got.Name != "a" {
			t.Errorf("the same socket: %+v, %v, want a", got, err)
		}
	})
}

func (e *Env) forgetFlows(t testing.TB, want int, flows ...conntrack.Flow) {
	t.Helper()
	var n int
	var err error
	e.Node.Do(func() { n, err = conntrack.Delete(t.Context(), flows) })
	// The kernel's IPVS may have forgotten those of an endpoint that is gone.
	sooner := e.options.balanced && n < want
	if err != nil || n != want && !sooner {
		t.Errorf("deleted %d tracked connections, %v, want %d", n, err, want)
	}
}

func newService(t *testing.T, e *Env) {
	e.Apply(t, table.New(), nil)
	for i := range 20 {
		var ports []*table.ServicePort
		for j := range i + 1 {
			ports = append(ports, e.servicePort(svc.IPv4, svc.TCP, &Service{
				Name: fmt.Sprintf("web%d", j), Port: uint16(80 + j), Fronts: []Front{{Kind: clusterIP, To: "a"}},
			}))
		}
		tab := table.New(ports...)
		e.Apply(t, tab, []table.Key{ports[i].Key()})
		if got := e.must(t, "c", svc.TCP, netip.AddrPortFrom(vip(svc.IPv4, clusterIP), uint16(80+i))); got != "a" {
			t.Errorf("reached %s, want a", got)
		}
	}
}

// UnderLoad asks the frontend of a stable Service over and over, from several
// clients at once, before, while and after during runs, and fails the test for
// every question without an answer.
func (e *Env) UnderLoad(t testing.TB, during func()) {
	t.Helper()
	e.underLoad(t, time.Minute, 0, during)
}

// underLoad is UnderLoad for at most a given time, with a pause between the
// questions of each client.
func (e *Env) underLoad(t testing.TB, limit, pause time.Duration, during func()) {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), limit)
	defer stop()
	var asked, failed atomic.Int64
	var wg sync.WaitGroup
	for _, from := range []string{"c", "node", "b"} {
		wg.Go(func() {
			for ctx.Err() == nil {
				// Its own deadline: the end of the load must not look like a failure.
				one, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTime)
				_, err := e.Host(from).Ask(one, svc.TCP, vipAddr(svc.IPv4))
				cancel()
				asked.Add(1)
				if err != nil {
					if failed.Add(1) < 5 {
						t.Errorf("from %s: %v", from, err)
					}
				}
				if pause > 0 {
					select {
					case <-time.After(pause):
					case <-ctx.Done():
					}
				}
			}
		})
	}
	// A slow machine asks slowly: what counts is that questions come on both sides
	// of what happens.
	await := func(n int64) {
		for asked.Load() < n && ctx.Err() == nil {
			<-time.After(time.Millisecond)
		}
	}
	await(50)
	during()
	await(asked.Load() + 50)
	stop()
	wg.Wait()
	t.Logf("%d connections, %d failed", asked.Load(), failed.Load())
	if c, ok := e.Dataplane.(dataplane.Counter); ok && failed.Load() > 0 {
		counts, err := c.Drops(context.WithoutCancel(ctx))
		t.Logf("rejected and dropped: %+v, %v", counts, err)
	}
	if asked.Load() < 100 {
		t.Errorf("only %d connections were made: this shows nothing", asked.Load())
	}
}

// Stable is a Table with the Service that UnderLoad asks for, and more.
func (e *Env) Stable(more ...*table.ServicePort) *table.Table {
	web := e.servicePort(svc.IPv4, svc.TCP, &Service{Name: "web", Fronts: []Front{{Kind: clusterIP, To: "a b d"}}})
	return table.New(append([]*table.ServicePort{web}, more...)...)
}
