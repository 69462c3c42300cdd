package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

var vip = flows.AP("10.96.0.10:80")

// web is a Service with the endpoints named, and its scheduler. Clients outside
// get their answers by way of the node.
func web(e *flows.Env, scheduler, names string) *table.ServicePort {
	var list []table.Endpoint
	for n := range strings.FieldsSeq(names) {
		h := e.Host(n)
		list = append(list, table.Endpoint{Addr: netip.AddrPortFrom(h.Addr4(), 9376), Local: h.Node() == e.Node})
	}
	p := flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Kind: table.ClusterIP, Addr: vip, Endpoints: list, Masquerade: true})
	p.Scheduler = scheduler
	return p
}

func apply(t *testing.T, e *flows.Env, p *table.ServicePort) {
	t.Helper()
	e.Apply(t, table.New(p), []table.Key{p.Key()})
}

// ask asks n times and counts who answers.
func ask(t *testing.T, e *flows.Env, from string, n int) map[string]int {
	t.Helper()
	seen := map[string]int{}
	for range n {
		got, err := e.Host(from).Ask(t.Context(), svc.TCP, vip)
		if err != nil {
			t.Fatalf("%s, after %v: %v\n%s", from, seen, err, dumpOf(t, e))
		}
		seen[got.Name]++
	}
	return seen
}

// dial opens a connection and returns who answers.
func dial(t *testing.T, e *flows.Env, from string) (net.Conn, string) {
	t.Helper()
	c, err := e.Host(from).Dial(t.Context(), svc.TCP, vip)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	got, err := testbed.AskOn(c)
	if err != nil {
		t.Fatal(err)
	}
	return c, got.Name
}

// behaviours 55 to 58: what each scheduler is for shows in where connections go. A
// Service changes its scheduler without a pause.
func TestSchedulers(t *testing.T) {
	e := flows.NewEnv(t, create("rr"))
	apply(t, e, web(e, "", "a b d"))
	if seen := ask(t, e, "c", 24); seen["a"] != 8 || seen["b"] != 8 || seen["d"] != 8 {
		t.Errorf("rr: %v, want 8 each", seen)
	}
	apply(t, e, web(e, "wrr", "a b d"))
	if seen := ask(t, e, "c", 24); seen["a"] != 8 || seen["b"] != 8 || seen["d"] != 8 {
		t.Errorf("wrr of equal weights: %v, want 8 each", seen)
	}
	heavy := web(e, "wrr", "a b d")
	heavy.Frontends[0].Endpoints[0].Weight, heavy.Frontends[0].Endpoints[1].Weight = 4, 3
	apply(t, e, heavy)
	if seen := ask(t, e, "c", 24); seen["a"] != 12 || seen["b"] != 9 || seen["d"] != 3 {
		t.Errorf("wrr of weights 4, 3 and 1: %v, want 12, 9 and 3", seen)
	}
	// Two endpoints get long connections; the third one's end at once.
	for _, scheduler := range []string{"lc", "wlc", "sed", "nq"} {
		t.Run(scheduler, func(t *testing.T) {
			apply(t, e, web(e, "rr", ""))
			apply(t, e, web(e, scheduler, "a b"))
			held := map[string]int{}
			for range 20 {
				_, who := dial(t, e, "c")
				held[who]++
			}
			if d := held["a"] - held["b"]; d < -1 || d > 1 {
				t.Errorf("open connections went to %v, want as many to a as to b", held)
			}
			apply(t, e, web(e, scheduler, "a b d"))
			if seen := ask(t, e, "c", 9); seen["d"] != 9 {
				t.Errorf("with 10 open connections at each of a and b, 9 short ones went to %v, want all to d", seen)
			}
		})
	}
	for _, scheduler := range []string{"sh", "dh", "lblc", "lblcr", "mh"} {
		t.Run(scheduler, func(t *testing.T) {
			apply(t, e, web(e, scheduler, "a b d e"))
			for _, from := range []string{"c", "client", "node"} {
				if seen := ask(t, e, from, 8); len(seen) != 1 {
					t.Errorf("8 connections of %s went to %v, want one endpoint", from, seen)
				}
			}
		})
	}
}

// mh: when an endpoint goes, clients of the others stay where they are.
func TestMaglevIsStable(t *testing.T) {
	e := flows.NewEnv(t, create("mh"))
	const clients = 24
	at := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 168, 77, byte(100 + i)}) }
	for i := range clients {
		out, err := e.Client.Command(t.Context(), "ip", "address", "add", at(i).String()+"/24", "dev", "eth0").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	where := func() (out [clients]string) {
		for i := range clients {
			got, err := e.Client.AskFrom(t.Context(), svc.TCP, netip.AddrPortFrom(at(i), 0), vip)
			if err != nil {
				t.Fatal(err)
			}
			out[i] = got.Name
		}
		return out
	}
	apply(t, e, web(e, "", "a b d e"))
	before := where()
	met := map[string]int{}
	for _, name := range before {
		met[name]++
	}
	if len(met) < 3 {
		t.Errorf("%d clients went to %v: hardly spread at all", clients, met)
	}
	gone := before[0]
	var left []string
	for _, n := range []string{"a", "b", "d", "e"} {
		if n != gone {
			left = append(left, n)
		}
	}
	apply(t, e, web(e, "", strings.Join(left, " ")))
	moved := 0
	for i, name := range where() {
		switch {
		case name == gone:
			t.Errorf("client %d still goes to %s", i, gone)
		case before[i] != gone && before[i] != name:
			moved++
		}
	}
	// The table has 4,093 slots: a few change hands.
	if moved > clients/6 {
		t.Errorf("%d of %d clients moved though their endpoint stayed", moved, clients-met[gone])
	}
}

// kubernetes/kubernetes#92019 and what it links: an endpoint that is leaving
// keeps its connections and gets no new ones, also from a client that uses a
// port again that it has reset (TestPortUsedAgain has the others); when it comes back, after a restart of the proxy too, it takes new
// ones.
func TestLeavingEndpoint(t *testing.T) {
	e := flows.NewEnv(t, create("rr"))
	apply(t, e, web(e, "", "a"))
	open, _ := dial(t, e, "c")
	from := netip.AddrPortFrom(e.Host("c").Addr4(), 40001)
	again := func(want string) {
		t.Helper()
		c, err := e.Host("c").DialFrom(t.Context(), svc.TCP, from, vip)
		if err != nil {
			t.Fatalf("from port 40001: %v, want %s", err, want)
		}
		got, err := testbed.AskOn(c)
		if err != nil || got.Name != want {
			t.Errorf("from port 40001: %+v, %v, want %s", got, err, want)
		}
		// With a reset, the port is free for the client, but not yet for IPVS.
		if err := errors.Join(c.(*net.TCPConn).SetLinger(0), c.Close()); err != nil {
			t.Error(err)
		}
	}
	again("a")
	apply(t, e, web(e, "", "a b"))
	apply(t, e, web(e, "", "b"))
	if d := dumpOf(t, e); !strings.Contains(d, e.Host("a").Addr4().String()+":9376 weight 0") {
		t.Errorf("the endpoint that has a connection is not kept for it:\n%s", d)
	}
	for range 5 {
		again("b")
	}
	if seen := ask(t, e, "c", 6); seen["b"] != 6 {
		t.Errorf("went to %v, want b", seen)
	}
	if _, err := fmt.Fprint(open, "still there?"); err != nil {
		t.Error(err)
	}
	if _, err := open.Read(make([]byte, 20)); err != nil {
		t.Errorf("the connection that was open: %v", err)
	}
	// A new process finds weight 0, and a wanted endpoint gets its weight back.
	if err := e.Dataplane.Close(); err != nil {
		t.Error(err)
	}
	e.Node.Do(func() { e.Dataplane = create("rr")(t, e.Node) })
	e.Apply(t, table.New(web(e, "", "a b")), nil)
	if seen := ask(t, e, "c", 6); seen["a"] != 3 || seen["b"] != 3 {
		t.Errorf("after a restart: %v, want 3 each", seen)
	}
}

func dumpOf(t *testing.T, e *flows.Env) string {
	t.Helper()
	var d string
	e.Node.Do(func() { d = flows.Dump(t, e.Dataplane) })
	return d
}

// kubernetes/kubernetes#57841: what listens on all addresses of the node is not
// reached by way of a virtual IP.
func TestOwnListenersAreHidden(t *testing.T) {
	e := flows.NewEnv(t, create(""))
	p := web(e, "", "a")
	p.Frontends = append(p.Frontends,
		table.Frontend{Kind: table.LoadBalancerIP, Addr: flows.AP("203.0.113.20:80"), Endpoints: p.Frontends[0].Endpoints, Masquerade: true})
	apply(t, e, p)
	for _, proto := range []svc.Protocol{svc.TCP, svc.UDP, svc.SCTP} {
		for _, from := range []string{"c", "node", "client"} {
			// The node itself serves 9376, on all addresses.
			for _, at := range []string{"10.96.0.10:9376", "203.0.113.20:9376"} {
				ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
				got, err := e.Host(from).Ask(ctx, proto, flows.AP(at))
				cancel()
				if err == nil {
					t.Errorf("%s from %s to %s reached %+v", proto, from, at, got)
				}
			}
		}
	}
	if seen := ask(t, e, "c", 2); seen["a"] != 2 {
		t.Errorf("the port that is served: %v", seen)
	}
}

// What was written goes on without a process, and a successor takes it over
// without a connection lost; nor is one lost while endpoints come and go.
func TestAdoptionUnderLoad(t *testing.T) { flows.AdoptionUnderLoad(t, create("")) }

func TestChurnUnderLoad(t *testing.T) { flows.ChurnUnderLoad(t, create("")) }
