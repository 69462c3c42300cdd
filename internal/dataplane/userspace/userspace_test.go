package userspace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/conntrack"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

var vip = ap("10.96.0.10:80")

func servicePort(name string, p svc.Protocol, fronts ...table.Frontend) *table.ServicePort {
	return &table.ServicePort{
		ID: svc.PortName{Name: svc.Name{Namespace: "default", Name: name}}, Family: svc.IPv4, Protocol: p, Frontends: fronts,
	}
}

// web is a Table of one ClusterIP with endpoints on the given addresses.
func web(p svc.Protocol, addrs ...netip.AddrPort) *table.Table {
	f := table.Frontend{Kind: table.ClusterIP, Addr: vip}
	for _, a := range addrs {
		f.Endpoints = append(f.Endpoints, table.Endpoint{Addr: a})
	}
	return table.New(servicePort("web", p, f))
}

func at(h *testbed.Host, port uint16) netip.AddrPort { return netip.AddrPortFrom(h.Addr4(), port) }

// run runs a program on a host.
func run(t testing.TB, h *testbed.Host, name string, args ...string) {
	t.Helper()
	if out, err := h.Command(t.Context(), name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}

// behaviour 40: one of three endpoints drops what it is sent, another one
// refuses, and no client notices.
func TestNoConnectionIsLostToDeadEndpoints(t *testing.T) {
	const connections = 1000
	e := flows.NewEnv(t, create)
	run(t, e.Host("b"), "nft", "add table ip deaf; add chain ip deaf in { type filter hook input priority 0; }; add rule ip deaf in tcp "+
		"flags syn drop")
	e.Apply(t, web(svc.TCP, at(e.Host("a"), 9376), at(e.Host("b"), 9376), at(e.Host("d"), 1)), nil)
	var wg sync.WaitGroup
	var failed atomic.Int64
	var slowest atomic.Int64
	for range 4 {
		wg.Go(func() {
			for range connections / 4 {
				before := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				got, err := e.Host("c").Ask(ctx, svc.TCP, vip)
				cancel()
				if err != nil || got.Name != "a" {
					if failed.Add(1) < 5 {
						t.Errorf("%+v, %v", got, err)
					}
				}
				slowest.Store(max(slowest.Load(), int64(time.Since(before))))
			}
		})
	}
	wg.Wait()
	s := e.Dataplane.(*Mode).Carried()
	t.Logf("%d of %d connections failed, the slowest took %s; %+v", failed.Load(), connections, time.Duration(slowest.Load()), s)
	if s.Retried == 0 || s.Retried > connections/4 {
		t.Errorf("%d of %d connections had to be tried again: a dead endpoint is to be avoided", s.Retried, connections)
	}
	if s.Failed != 0 || s.EndpointFailures < s.Retried || s.FailingEndpoints != 2 {
		t.Errorf("%+v, want no connection that failed, a failure for each retry, and two endpoints that fail", s)
	}
	// Those that are gone do not fail any more, nor do those of a Service that is.
	e.Apply(t, web(svc.TCP, at(e.Host("a"), 9376), at(e.Host("d"), 1)), nil)
	if n := e.Dataplane.(*Mode).Carried().FailingEndpoints; n != 1 {
		t.Errorf("%d endpoints fail, of which one is left", n)
	}
	e.Apply(t, table.New(), nil)
	if n := e.Dataplane.(*Mode).Carried().FailingEndpoints; n != 0 {
		t.Errorf("%d endpoints of no Service fail", n)
	}
}

// The end waits for open connections as long as Config.Drain says, and then cuts
// those that are left.
func TestDrainIsBounded(t *testing.T) {
	const drain = 300 * time.Millisecond
	e := flows.NewEnv(t, func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		t.Helper()
		p, err := New(Config{Drain: drain})
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
	e.Apply(t, web(svc.TCP, at(e.Host("a"), 9376)), nil)
	open, err := e.Host("c").Dial(t.Context(), svc.TCP, vip)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Close() }()
	if got, err := testbed.AskOn(open); err != nil || got.Name != "a" {
		t.Fatalf("%+v, %v", got, err)
	}
	began := time.Now()
	if err := e.Dataplane.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took < drain {
		t.Errorf("it ended after %s with a connection open, want %s", took, drain)
	}
	_ = open.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := open.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection that was open got %v, want a reset", err)
	}
	if c := e.Dataplane.(*Mode).Carried(); c.Connections != 0 || c.Accepted != 1 {
		t.Errorf("%+v, want no connection, and one since the start", c)
	}
}

// behaviours 43, 176: the refusal names the Service, and others are not concerned.
func TestSCTPIsRefused(t *testing.T) {
	e := flows.NewEnv(t, create)
	tab := web(svc.TCP, at(e.Host("a"), 9376))
	sctp := servicePort("signal", svc.SCTP, table.Frontend{Kind: table.ClusterIP, Addr: vip,
		Endpoints: []table.Endpoint{{Addr: at(e.Host("a"), 9376)}}})
	tab = table.New(tab.Get(table.Key{ID: svc.PortName{Name: svc.Name{Namespace: "default", Name: "web"}}, Family: svc.IPv4}), sctp)
	var err error
	e.Node.Do(func() { err = e.Dataplane.Apply(t.Context(), tab, nil) })
	var refused *dataplane.Rejected
	if !errors.As(err, &refused) || len(refused.Ports) != 1 || refused.Ports[sctp.Key()] == nil {
		t.Fatalf("got %v, want a refusal of %s alone", err, sctp.ID)
	}
	for _, word := range []string{"default/signal", "SCTP", "--mode nft"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not say %q", err, word)
		}
	}
	if got, err := e.Host("c").Ask(t.Context(), svc.TCP, vip); err != nil || got.Name != "a" {
		t.Errorf("the other Service: %+v, %v", got, err)
	}
}

// A port of the proxy serves what was captured, and no client that goes there
// directly: source ranges would be in vain.
func TestProxyPortsAreNotReachable(t *testing.T) {
	e := flows.NewEnv(t, func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		t.Helper()
		p, err := New(Config{Ports: svc.PortRange{First: 20000, Last: 20003}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
	tab := web(svc.TCP, at(e.Host("a"), 9376))
	tab.NodePortAddrs = []netip.Addr{e.Node.Addr4()}
	e.Apply(t, tab, nil)
	if got, err := e.Host("c").Ask(t.Context(), svc.TCP, vip); err != nil || got.Name != "a" {
		t.Fatalf("%+v, %v", got, err)
	}
	port := firstListener(e).Port
	if port < 20000 || port > 20003 {
		t.Errorf("port %d is not of --proxy-port-range", port)
	}
	for _, from := range []string{"node", "c", "client", "d"} {
		if got, err := e.Host(from).Ask(t.Context(), svc.TCP, at(e.Node, port)); !testbed.Refused(err) {
			t.Errorf("%s reached the proxy's port: %+v, %v", from, got, err)
		}
	}
	// More service ports than the range has: those too many are refused by name.
	var ports []*table.ServicePort
	for i := range 6 {
		ports = append(ports, servicePort(fmt.Sprintf("s%d", i), svc.TCP, table.Frontend{
			Kind: table.ClusterIP, Addr: ap(fmt.Sprintf("10.96.0.%d:80", 20+i)), Endpoints: []table.Endpoint{{Addr: at(e.Host("a"), 9376)}},
		}))
	}
	var err error
	e.Node.Do(func() { err = e.Dataplane.Apply(t.Context(), table.New(ports...), nil) })
	var refused *dataplane.Rejected
	if !errors.As(err, &refused) || len(refused.Ports) < 2 || !strings.Contains(err.Error(), "--proxy-port-range 20000-20003") {
		t.Errorf("six ports out of a range of four: %v", err)
	}
}

func firstListener(e *flows.Env) *listener {
	for _, ls := range e.Dataplane.(*Mode).targets[0].listeners {
		return ls[0]
	}
	return nil
}

// A process that takes over finds the rules, makes them lead to itself, and
// leaves no client with a port that is dead.
func TestRestart(t *testing.T) {
	for _, name := range []string{"after the end of the old process", "beside the old process"} {
		t.Run(name, func(t *testing.T) {
			e := flows.NewEnv(t, create)
			tcp, udp := at(e.Host("a"), 9376), at(e.Host("d"), 9376)
			tab := table.New(
				servicePort("web", svc.TCP, table.Frontend{Kind: table.ClusterIP, Addr: vip, Endpoints: []table.Endpoint{{Addr: tcp}}}),
				servicePort("dns", svc.UDP, table.Frontend{Kind: table.ClusterIP, Addr: vip, Endpoints: []table.Endpoint{{Addr: udp}}}),
			)
			e.Apply(t, tab, nil)
			before := dump(t, e)
			c, err := e.Host("c").Dial(t.Context(), svc.UDP, vip)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			_ = c.SetDeadline(time.Now().Add(30 * time.Second))
			if got, err := testbed.AskOn(c); err != nil || got.Name != "d" {
				t.Fatalf("%+v, %v", got, err)
			}
			open, err := e.Host("c").Dial(t.Context(), svc.TCP, vip)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = open.Close() }()
			if got, err := testbed.AskOn(open); err != nil || got.Name != "a" {
				t.Fatalf("%+v, %v", got, err)
			}
			old := e.Dataplane
			t.Cleanup(func() { _ = old.Close() })
			if name[0] == 'a' {
				_ = open.Close()
				if err := old.Close(); err != nil {
					t.Fatal(err)
				}
				if got, err := e.Host("c").Ask(t.Context(), svc.TCP, vip); !testbed.Refused(err) {
					t.Errorf("between two processes: %+v, %v, want refused", got, err)
				}
			}
			e.Node.Do(func() { e.Dataplane = create(t, e.Node) })
			e.Apply(t, tab, nil)
			if got, err := e.Host("c").Ask(t.Context(), svc.TCP, vip); err != nil || got.Name != "a" {
				t.Errorf("TCP after the restart: %+v, %v", got, err)
			}
			if got, err := testbed.AskOn(c); err != nil || got.Name != "d" {
				t.Errorf("the same UDP socket after the restart: %+v, %v", got, err)
			}
			if r := e.Dataplane.(*Mode).Repaired(); len(r) != 0 {
				t.Errorf("a new process repaired %q", r)
			}
			after := dump(t, e)
			if name[0] == 'a' && after != before {
				t.Errorf("the ports are not those of the process before:\n%s\n%s", before, after)
			}
			if name[0] == 'b' {
				if _, err := open.Write([]byte("x")); err != nil {
					t.Errorf("an open connection of the old process: %v", err)
				}
				if b := make([]byte, 1); true {
					if _, err := open.Read(b); err != nil || b[0] != 'x' {
						t.Errorf("an open connection of the old process: %q, %v", b, err)
					}
				}
				_ = open.Close()
			}
		})
	}
}

func dump(t testing.TB, e *flows.Env) string {
	t.Helper()
	var text string
	var err error
	e.Node.Do(func() { text, err = e.Dataplane.Dump(t.Context()) })
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// What another program removes or alters comes back, and is reported.
func TestRepair(t *testing.T) {
	e := flows.NewEnv(t, create)
	tab := web(svc.TCP, at(e.Host("a"), 9376))
	e.Apply(t, tab, nil)
	want := dump(t, e)
	for _, c := range []struct{ harm, told string }{
		{"delete table ip fairlead-userspace", "table ip fairlead-userspace"},
		{"flush chain ip fairlead-userspace services", "chain services"},
		{"add rule ip fairlead-userspace services drop", "chain services"},
		{"delete element ip fairlead-userspace vips { 10.96.0.10 . tcp . 80 }", "element of vips default/web"},
		{"add element ip fairlead-userspace cluster-ips { 10.96.0.77 }", "foreign element of cluster-ips"},
		{"add chain ip fairlead-userspace other", "foreign chain other"},
		{"add set ip fairlead-userspace other { type ipv4_addr; }", "table ip fairlead-userspace"},
		{"delete table ip fairlead-userspace; add table ip fairlead-userspace", "table ip fairlead-userspace"},
	} {
		run(t, e.Node, "nft", c.harm)
		e.Apply(t, tab, nil)
		if got := e.Dataplane.(*Mode).Repaired(); !slices.Contains(got, c.told) {
			t.Errorf("%s: repaired %q, want %q", c.harm, got, c.told)
		}
		if got := dump(t, e); got != want {
			t.Errorf("%s: after the repair:\n%s\nwant:\n%s", c.harm, got, want)
		}
		if got, err := e.Host("c").Ask(t.Context(), svc.TCP, vip); err != nil || got.Name != "a" {
			t.Errorf("%s: %+v, %v", c.harm, got, err)
		}
		e.Apply(t, tab, nil)
		if got := e.Dataplane.(*Mode).Repaired(); len(got) != 0 {
			t.Errorf("%s: repaired %q once more", c.harm, got)
		}
	}
	// A change that meets a table that was removed does not wait for an audit.
	run(t, e.Node, "nft", "delete table ip fairlead-userspace")
	tab = web(svc.TCP, at(e.Host("b"), 9376))
	key := servicePort("web", svc.TCP).Key()
	e.Apply(t, table.New(), []table.Key{key})
	e.Apply(t, tab, []table.Key{key})
	if got, err := e.Host("c").Ask(t.Context(), svc.TCP, vip); err != nil || got.Name != "b" {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestProbeAndCleanup(t *testing.T) {
	e := flows.NewEnv(t, create)
	run(t, e.Node, "nft", "add table ip foreign")
	ruleset := func() string {
		out, err := e.Node.Command(t.Context(), "nft", "list", "ruleset").Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	clean := ruleset()
	e.Node.Do(func() {
		if err := Probe(); err != nil {
			t.Error(err)
		}
		if err := Cleanup(t.Context()); err != nil {
			t.Errorf("with nothing there: %v", err)
		}
	})
	if got := ruleset(); got != clean {
		t.Errorf("Probe left:\n%s", got)
	}
	e.Apply(t, web(svc.TCP, at(e.Host("a"), 9376)), nil)
	if !bytes.Contains([]byte(ruleset()), []byte("fairlead-userspace")) {
		t.Error("no table was written")
	}
	e.Node.Do(func() {
		if err := Cleanup(t.Context()); err != nil {
			t.Error(err)
		}
	})
	if got := ruleset(); got != clean {
		t.Errorf("Cleanup left:\n%s", got)
	}
}

// An UDP client of a Service whose listener changes is taken along.
func TestUDPClientFollowsItsListener(t *testing.T) {
	e := flows.NewEnv(t, create)
	a, b := []table.Endpoint{{Addr: at(e.Host("a"), 9376)}}, []table.Endpoint{{Addr: at(e.Host("b"), 9376)}}
	lb := table.Frontend{Kind: table.LoadBalancerIP, Addr: ap("203.0.113.20:80"), Endpoints: a}
	same := servicePort("web", svc.UDP, table.Frontend{Kind: table.ClusterIP, Addr: vip, Endpoints: a}, lb)
	lb.Endpoints = b
	differ := servicePort("web", svc.UDP, table.Frontend{Kind: table.ClusterIP, Addr: vip, Endpoints: a}, lb)
	e.Apply(t, table.New(same), nil)
	c, err := e.Host("c").Dial(t.Context(), svc.UDP, lb.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	for i, want := range []string{"a", "b", "a", "b"} {
		e.Apply(t, table.New([]*table.ServicePort{same, differ}[i%2]), []table.Key{same.Key()})
		if got, err := testbed.AskOn(c); err != nil || got.Name != want {
			t.Fatalf("%+v, %v, want %s", got, err, want)
		}
	}
	var n int
	e.Node.Do(func() {
		n, err = conntrack.Delete(t.Context(), []conntrack.Flow{{Protocol: svc.UDP, OrigDst: lb.Addr}})
	})
	if err != nil || n != 1 {
		t.Errorf("%d tracked flows of one client, %v", n, err)
	}
}
