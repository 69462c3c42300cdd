package flows

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// What is counted of 10,000 Services grows by less than 10 MB while 100 of them get another endpoint, and 100 take the place of others,
// with each of many reads: what has gone is forgotten.
func TestMemory(t *testing.T) {
	const services, each, reads = 10_000, 100, 30
	const most = 10 << 20
	endpointOf := func(i, turn int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(turn), byte(i >> 8), byte(i)}), 80)
	}
	frontend := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 80)
	}
	turns, names := make([]int, services), make([]int, services)
	tab := func() (*table.Table, []dataplane.ServedCount) {
		ports, served := make([]*table.ServicePort, services), make([]dataplane.ServedCount, services)
		for i := range ports {
			to := endpointOf(i, turns[i])
			ports[i] = port(fmt.Sprintf("web-%d-%d", i, names[i]), "", svc.IPv4, svc.TCP,
				table.Frontend{Kind: table.ClusterIP, Addr: frontend(i), Endpoints: []table.Endpoint{{Addr: to}}})
			served[i] = dataplane.ServedCount{Protocol: svc.TCP, To: frontend(i), Endpoint: to, Connections: 1}
		}
		return table.New(ports...), served
	}
	used := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc) //nolint:gosec // it is far below
	}
	now, served := tab()
	a := &counts{served: served}
	r := read(a, func() *table.Table { return now })
	if _, err := r.Connections(t.Context()); err != nil {
		t.Fatal(err)
	}
	start := used()
	for turn := range reads {
		for k := range each {
			i := (turn*each + k) % services
			turns[i]++
			names[(i+services/2)%services]++
		}
		now, a.served = tab()
		got, err := r.Connections(t.Context())
		if err != nil || len(got) != services {
			t.Fatalf("%d ports of %d: %v", len(got), services, err)
		}
	}
	grown := used() - start
	t.Logf("%d Services: %.1f MB more after %d reads with %d changes", services, float64(grown)/(1<<20), reads, 2*reads*each)
	if grown > most {
		t.Errorf("the counts grow by %d bytes", grown)
	}
	if n := len(r.totals.ports); n != services {
		t.Errorf("%d ports are kept, of %d", n, services)
	}
}
