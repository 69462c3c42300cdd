package proxy

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// What a node remembers of 10,000 Services grows by less than 10 MB in an hour with 100 changes a second, and hardly after it.
func TestHistoryMemory(t *testing.T) {
	const services, endpoints, each = 10_000, 5, 100
	const most = 10 << 20
	port := func(i, turn int) *table.ServicePort {
		p := &table.ServicePort{ID: svc.PortName{Name: svc.Name{Namespace: "default", Name: fmt.Sprintf("web-%d", i)}, Port: "http"},
			Family: svc.IPv4, Protocol: svc.TCP}
		list := make([]table.Endpoint, endpoints)
		for k := range list {
			list[k].Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(turn), byte(i), byte(k)}), 80)
		}
		p.Frontends = []table.Frontend{{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 80), Endpoints: list},
			{Kind: table.NodePort, Addr: netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(i)), Endpoints: list}} //nolint:gosec // i is small
		return p
	}
	now := make([]*table.ServicePort, services)
	for i := range now {
		now[i] = port(i, 0)
	}
	var h history
	at := time.Unix(1000, 0)
	h.note(at, nil, table.New(now...), nil)
	used := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc) //nolint:gosec // it is far below
	}
	next := 0
	change := func(during time.Duration) {
		for range int(during / time.Second) {
			at = at.Add(time.Second)
			before, keys := make([]*table.ServicePort, each), make([]table.Key, each)
			for k := range keys {
				i := next % services
				next++
				before[k], now[i] = now[i], port(i, next/services)
				keys[k] = now[i].Key()
			}
			after := make([]*table.ServicePort, each)
			for k := range after {
				after[k] = now[(next-each+k)%services]
			}
			h.note(at, table.New(before...), table.New(after...), keys)
		}
	}
	start := used()
	change(historyTime)
	first := used()
	change(historyTime / 6)
	second := used()
	t.Logf("%d Services take %.1f MB; the first hour adds %.1f MB, ten minutes more %.1f MB; %d changes are kept", services,
		float64(start)/(1<<20), float64(first-start)/(1<<20), float64(second-first)/(1<<20), len(h.list))
	if first-start > most || second-first > most/10 {
		t.Errorf("the history grows by %d bytes in an hour, and by %d in ten minutes more", first-start, second-first)
	}
	if n := len(h.list); n == 0 || !slices.ContainsFunc(h.list, func(p past) bool { return p.at.Equal(at) }) {
		t.Errorf("%d changes are kept, without the last", n)
	}
	runtime.KeepAlive(now)
}
