package pods

import (
	"errors"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/dialect"
)

// More clients have a Pod with more weight, and its earlier clients keep it.
func TestSourceHashByWeights(t *testing.T) {
	var pods []netip.AddrPort
	for i := range 4 {
		pods = append(pods, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80))
	}
	before, after := newPool(t, slog.New(slog.DiscardHandler)), newPool(t, slog.New(slog.DiscardHandler))
	before.Set(Options{Balance: dialect.SourceHash}, pods, 0)
	after.Set(Options{Balance: dialect.SourceHash, Weights: map[netip.AddrPort]int{pods[0]: 3}}, pods, 0)
	had, has, lost := 0, 0, 0
	for i := range 4000 {
		client := netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)})
		a, _ := before.Pick(client, nil)
		b, _ := after.Pick(client, nil)
		switch first := pods[0]; {
		case a.addr == first && b.addr != first, a.addr != b.addr && b.addr != first:
			lost++
		case b.addr == first:
			has++
		}
		if a.addr == pods[0] {
			had++
		}
	}
	if lost > 0 || had < 900 || had > 1100 || has < 1850 || has > 2150 { // 1/4 and 3/6 of them
		t.Errorf("%d had the Pod, %d have it, %d have another one without a reason", had, has, lost)
	}
}

func TestBalance(t *testing.T) {
	pods := func(n int) (out []netip.AddrPort) {
		for i := range n {
			out = append(out, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80))
		}
		return out
	}
	make := func(b dialect.Balance, n int) *Pool {
		p := newPool(t, slog.New(slog.DiscardHandler))
		p.Set(Options{Balance: b}, pods(n), 0)
		return p
	}
	client := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}) }
	counts := map[netip.AddrPort]int{}
	for p, i := make(dialect.RoundRobin, 4), 0; i < 400; i++ {
		m, _ := p.Pick(client(1), nil)
		counts[m.addr]++
	}
	for a, n := range counts {
		if n != 100 || len(counts) != 4 {
			t.Errorf("round robin: %s has %d of 400", a, n)
		}
	}
	p := make(dialect.LeastConnections, 3)
	for range 30 {
		m, _ := p.Pick(client(1), nil)
		p.Add(m, &Link{})
	}
	for _, m := range p.members {
		if len(m.conns) != 10 {
			t.Errorf("least connections: %s has %d of 30", m.addr, len(m.conns))
		}
	}
	before, after := make(dialect.SourceHash, 5), make(dialect.SourceHash, 4)
	moved, used := 0, map[netip.AddrPort]bool{}
	for i := range 250 {
		a, _ := before.Pick(client(i), nil)
		again, _ := before.Pick(client(i), nil)
		b, _ := after.Pick(client(i), nil)
		used[a.addr] = true
		if a != again {
			t.Fatal("a client changes its Pod")
		}
		if a.addr != b.addr && a.addr != pods(5)[4] {
			moved++
		}
	}
	if moved > 0 || len(used) != 5 {
		t.Errorf("source hash: %d clients moved without a reason; %d Pods used", moved, len(used))
	}
	if _, err := make(dialect.RandomOfTwo, 0).Pick(client(1), nil); !errors.Is(err, ErrNone) {
		t.Error(err)
	}
}
