package filter

import (
	"maps"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
)

// One change among 2,000 listeners is its own transaction size.
func TestChangeCostsItself(t *testing.T) {
	addrs, listeners := map[netip.Addr]bool{}, map[Bound]bool{}
	for i := range 1000 {
		a := netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)})
		addrs[a] = true
		for _, port := range []uint16{80, 443} {
			listeners[Bound{Listener: Listener{svc.TCP, netip.AddrPortFrom(a, port)}}] = true
		}
	}
	gone := Bound{Listener: Listener{svc.TCP, netip.MustParseAddrPort("10.9.0.7:80")}}
	fewer := without(listeners, map[Bound]bool{gone: true})
	f := &Filter{addrs: addrs, listeners: listeners}
	if all, one := whole(addrs, listeners).Size(), f.difference(addrs, fewer).Size(); one > 300 || all < 50_000 {
		t.Errorf("the whole table has %d bytes, the change %d", all, one)
	}
}

// Of a cluster of 1,000 Nodes and 50 Services the whole table fits in one message, and a Node is its own change size.
func TestNodesCostThemselves(t *testing.T) {
	var nodes []netip.Prefix
	for i := range 1000 {
		nodes = append(nodes, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, byte(i >> 7), byte(i << 1)}), 32),
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(64 + i>>7), byte(i << 1), 0}), 24))
	}
	groups := make([]Group, 50)
	for i := range groups {
		port := uint16(30000 + 2*i)
		groups[i] = Group{Name: "default/web", NodePorts: []NodePort{{svc.TCP, port}}, HealthPorts: []uint16{port + 1},
			Listeners: []Listener{{svc.TCP, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 8, 0, byte(i)}), 80)}}}
	}
	all, fewer := spansOf(nodes), spansOf(nodes[2:])
	if whole, one := groupRules(all, groups).Size(), nodesChange(all, fewer).Size(); one > 500 || whole > 400_000 {
		t.Errorf("the whole table has %d bytes, the change %d", whole, one)
	}
}

// Networks that overlap or meet are one range, as an interval set needs it.
func TestSpans(t *testing.T) {
	var in []netip.Prefix
	for _, text := range []string{"10.0.0.7/32", "10.0.0.0/24", "10.0.1.0/24", "10.0.3.1/32", "255.255.255.0/24",
		"255.255.255.9/32", "fd00::1/128", "::/128"} {
		in = append(in, netip.MustParsePrefix(text))
	}
	want := map[span]bool{}
	for first, end := range map[string]string{"10.0.0.0": "10.0.2.0", "10.0.3.1": "10.0.3.2", "255.255.255.0": "",
		"fd00::1": "fd00::2", "::": "::1"} {
		last, _ := netip.ParseAddr(end)
		want[span{netip.MustParseAddr(first), last}] = true
	}
	if got := spansOf(in); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
