package nft

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// countedOf reads the counts as text by frontend and endpoint.
func countedOf(t *testing.T, p dataplane.Applier) map[string]uint64 {
	t.Helper()
	list, err := p.(dataplane.ServedCounter).Served(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]uint64{}
	for _, c := range list {
		out[fmt.Sprintf("%s %s > %s %t", c.Protocol, c.To, c.Endpoint, c.NodePort)] += c.Connections
	}
	return out
}

// Every connection, and every flow of UDP, is counted once for its frontend and endpoint, with and without affinity, of node ports too,
// wherever its client and its endpoint are; a change of endpoints changes no count, and nft(8) can print it all.
func TestServed(t *testing.T) {
	e := flows.NewEnv(t, create)
	a, b := e.Host("a"), e.Host("b")
	both := func(six bool, hosts ...*testbed.Host) (out []table.Endpoint) {
		for _, h := range hosts {
			at := h.Addr4()
			if six {
				at = h.Addr6()
			}
			out = append(out, table.Endpoint{Addr: netip.AddrPortFrom(at, 9376), Local: h != e.Node})
		}
		return out
	}
	vip4, vip6, kept, node := flows.AP("10.96.0.10:80"), flows.AP("[fd00:10:96::10]:80"), flows.AP("10.96.0.11:80"), flows.AP("0.0.0.0:30080")
	build := func(hosts ...*testbed.Host) *table.Table {
		keep := flows.Port("kept", "", svc.IPv4, svc.TCP, table.Frontend{Addr: kept, Endpoints: both(false, hosts...)})
		keep.Affinity = time.Hour
		keep6 := flows.Port("kept", "", svc.IPv6, svc.TCP, table.Frontend{Addr: flows.AP("[fd00:10:96::11]:80"), Endpoints: both(true, hosts...)})
		keep6.Affinity = time.Hour
		tab := table.New(keep, keep6,
			flows.Port("web", "", svc.IPv4, svc.TCP,
				table.Frontend{Addr: vip4, Endpoints: both(false, hosts...)},
				table.Frontend{Kind: table.NodePort, Addr: node, Endpoints: both(false, hosts...)}),
			flows.Port("web", "udp", svc.IPv4, svc.UDP, table.Frontend{Addr: vip4, Endpoints: both(false, hosts...)}),
			flows.Port("web", "", svc.IPv6, svc.TCP, table.Frontend{Addr: vip6, Endpoints: both(true, hosts...)}))
		tab.NodePortAddrs = []netip.Addr{e.Node.Addr4(), netip.MustParseAddr("127.0.0.1")}
		return tab
	}
	e.Apply(t, build(a, b), nil)
	want := map[string]uint64{}
	askBy := func(p svc.Protocol, client string, to netip.AddrPort, as string, node bool) {
		t.Helper()
		got, err := e.Host(client).Ask(t.Context(), p, to)
		if err != nil {
			t.Fatal(err)
		}
		at := e.Host(got.Name).Addr4()
		if to.Addr().Is6() {
			at = e.Host(got.Name).Addr6()
		}
		want[fmt.Sprintf("%s %s > %s %t", p, as, netip.AddrPortFrom(at, 9376), node)]++
	}
	ask := func(client string, to netip.AddrPort, as string, node bool) {
		t.Helper()
		askBy(svc.TCP, client, to, as, node)
	}
	round := func(n int) {
		t.Helper()
		for range n {
			ask("c", vip4, vip4.String(), false)
			askBy(svc.UDP, "c", vip4, vip4.String(), false)
			ask("c", vip6, vip6.String(), false)
			ask("c", kept, kept.String(), false)
			ask("c", flows.AP("[fd00:10:96::11]:80"), "[fd00:10:96::11]:80", false)
			ask("c", netip.AddrPortFrom(e.Node.Addr4(), 30080), node.String(), true)
		}
	}
	round(8)
	// Clients and endpoints on this node meet other hooks: a client of a pod, an endpoint of the node, both, and a node port at loopback.
	e.Apply(t, build(e.Node), nil)
	for _, client := range []string{"c", "node", "client"} {
		ask(client, vip4, vip4.String(), false)
		ask(client, kept, kept.String(), false)
		ask(client, vip6, vip6.String(), false)
		ask(client, netip.AddrPortFrom(e.Node.Addr4(), 30080), node.String(), true)
	}
	e.Apply(t, build(a), nil)
	ask("node", vip4, vip4.String(), false)
	ask("node", flows.AP("127.0.0.1:30080"), node.String(), true)
	ask("a", vip4, vip4.String(), false)
	e.Apply(t, build(b), nil)
	round(3)
	if got := countedOf(t, e.Dataplane); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("counted\n%v\nwant\n%v", got, want)
	}
	e.Node.Do(func() {
		if text := flows.Command(t, "", "nft", "list", "ruleset"); !strings.Contains(text, "counter packets") {
			t.Errorf("nft(8) shows no count:\n%s", text)
		}
	})
}

// Without room for another pair of endpoint and frontend, connections are served without a count, as fairly as with one,
// clients stay where they are kept, and known pairs are counted further.
func TestServedWithoutRoom(t *testing.T) {
	e := flows.NewEnv(t, create)
	vip, kept := flows.AP("10.96.0.10:80"), flows.AP("10.96.0.11:80")
	use := func(hosts ...string) {
		t.Helper()
		var list []table.Endpoint
		for _, h := range hosts {
			list = append(list, table.Endpoint{Addr: netip.AddrPortFrom(e.Host(h).Addr4(), 9376)})
		}
		keep := flows.Port("kept", "", svc.IPv4, svc.TCP, table.Frontend{Addr: kept, Endpoints: list})
		keep.Affinity = time.Hour
		e.Apply(t, table.New(keep, flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: vip, Endpoints: list})), nil)
	}
	ask := func(to netip.AddrPort, among string) string {
		t.Helper()
		got, err := e.Host("c").Ask(t.Context(), svc.TCP, to)
		if err != nil || !strings.Contains(among, got.Name) {
			t.Fatalf("%s: %q, %v; want one of %q", to, got.Name, err, among)
		}
		return got.Name
	}
	use("a")
	ask(vip, "a")
	e.Node.Do(func() { fillServed(t) })
	before := countedOf(t, e.Dataplane)
	use("b", "d")
	first := ask(kept, "bd")
	for range 5 {
		ask(vip, "bd")
		if got := ask(kept, "bd"); got != first {
			t.Errorf("the client was kept at %s, and is sent to %s", first, got)
		}
	}
	// Of two endpoints of which one is counted, each gets its half: six standard deviations of 400 throws of a coin are 60.
	use("a", "b")
	const throws = 400
	n := 0
	for range throws {
		if ask(vip, "ab") == "a" {
			n++
		}
	}
	if n < throws/2-60 || n > throws/2+60 {
		t.Errorf("%d of %d connections went to the endpoint that is counted, want half of them", n, throws)
	}
	before[fmt.Sprintf("TCP %s > %s false", vip, netip.AddrPortFrom(e.Host("a").Addr4(), 9376))] += uint64(n)
	if got := countedOf(t, e.Dataplane); fmt.Sprint(got) != fmt.Sprint(before) {
		t.Errorf("%d pairs are counted, want %d, and only the known one further", len(got), len(before))
	}
}

// fillServed fills the sets of counts of virtual IPs of IPv4 in this network namespace.
func fillServed(t *testing.T) {
	t.Helper()
	k, err := nftables.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = k.Close() }()
	l := newLayout(svc.IPv4, &Config{})
	for set, size := range map[string]int{setServed: 20, setNodeServed: 16} {
		have := 0
		if err := k.Elems(l.table, set, func() { have = 0 }, func(nftables.Elem) { have++ }); err != nil {
			t.Fatal(err)
		}
		for n := have; n < servedSize; {
			b := nftables.NewBatch()
			for ; n < servedSize && b.Size() < k.MaxBatch()/2; n++ {
				at := netip.AddrFrom4([4]byte{198, 18, byte(n >> 8), byte(n)})
				key := bytes.Repeat(append(at.AsSlice(), 0, 80, 0, 0), 3)[:size]
				b.AddElem(l.table, set, &nftables.Elem{Key: key, Timeout: uint64(time.Hour.Milliseconds())})
			}
			if err := k.Commit(b); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// twice lists some elements of sets two times, as the kernel does when a set changes while it is listed.
type twice struct{ l *layout }

func (k twice) Elems(t nftables.Table, set string, begin func(), f func(nftables.Elem)) error {
	if t != k.l.table || set != setServed {
		return nil
	}
	key := []byte{10, 244, 1, 2, 0x24, 0xa0, 0, 0, 10, 96, 0, 10, 6, 0, 0, 0, 0, 80, 0, 0}
	begin()
	f(nftables.Elem{Key: key, Packets: 7})
	begin()
	f(nftables.Elem{Key: key, Packets: 8})
	f(nftables.Elem{Key: key, Packets: 9})
	return nil
}

func (twice) Close() error { return nil }

// An element that is read twice is counted once, with what it had last.
func TestServedListedTwice(t *testing.T) {
	cfg := Config{}
	l := newLayout(svc.IPv4, &cfg)
	m := &Mode{targets: []*target{{layout: l}}, served: &served{conn: twice{l}}}
	got, want := countedOf(t, m), map[string]uint64{"TCP 10.96.0.10:80 > 10.244.1.2:9376 false": 9}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("counted %v, want %v", got, want)
	}
}
