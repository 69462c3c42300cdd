package ipvs

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

func wantIntact(t *testing.T, when string, m *Mode, want bool) {
	t.Helper()
	if got, err := m.Intact(); err != nil || got != want {
		t.Errorf("%s: intact %v, %v, want %v", when, got, err, want)
	}
}

// What other programs remove is noticed without a comparison of everything, and what
// the mode itself writes is not.
func TestIntact(t *testing.T) {
	inside(t, func(p dataplane.Applier) {
		m := p.(*Mode)
		wantIntact(t, "nothing written", m, true)
		tab := flows.EveryField()
		flows.Apply(t, m, tab, nil)
		wantIntact(t, "first Apply", m, true)
		for _, next := range append(flows.States(0)[10:], tab) {
			flows.Apply(t, m, next, flows.Changes(tab, next))
			wantIntact(t, "own change", m, true)
			tab = next
		}
		web, pod := ipvs.AddressKey(svc.TCP, flows.AP("10.96.0.10:80")), flows.AP("10.244.1.2:9376")
		send := func(do func(b *ipvs.Batch[string])) {
			c, err := ipvs.Dial()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			b := ipvs.NewBatch[string](c)
			do(b)
			if rejected, err := ipvs.Send(c, b); err != nil || len(rejected) > 0 {
				t.Fatal(rejected, err)
			}
		}
		sets, err := ipset.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer sets.Close()
		must := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		for name, damage := range map[string]func(){
			"virtual server": func() { send(func(b *ipvs.Batch[string]) { b.DelService("", web) }) },
			"scheduler": func() {
				send(func(b *ipvs.Batch[string]) { b.SetService("", ipvs.Service{Key: web, Scheduler: "lc"}) })
			},
			"real server": func() { send(func(b *ipvs.Batch[string]) { b.DelDest("", web, ipvs.Dest{Addr: pod}) }) },
			"weight":      func() { send(func(b *ipvs.Batch[string]) { b.SetDest("", web, ipvs.Dest{Addr: pod}) }) },
			"set":         func() { must(sets.Flush(setFront.name(svc.IPv4))) },
			"element": func() {
				must(sets.Del(setCluster.name(svc.IPv6), []ipset.Element{{IP: netip.MustParseAddr("fd00:10:96::a")}}))
			},
			"address": func() { flows.Command(t, "", "ip", "address", "del", "10.96.0.10/32", "dev", deviceName) },
			"device":  func() { must(link.RemoveDevice(deviceName, alias)) },
			"jump":    func() { flows.Command(t, "*nat\n-D POSTROUTING 1\nCOMMIT\n", "ip6tables-legacy-restore", "--noflush") },
		} {
			damage()
			wantIntact(t, name+" damaged", m, false)
			flows.Apply(t, m, tab, nil)
			if len(m.Repaired()) == 0 {
				t.Errorf("%s: nothing was repaired", name)
			}
			wantIntact(t, name+" repaired", m, true)
		}
	})
}

// Beside many Services one look reads the endpoints of some of them, and all of them
// in turn.
func TestIntactIsBounded(t *testing.T) {
	const n = 2*perCheck + 30
	inside(t, func(p dataplane.Applier) {
		m := p.(*Mode)
		flows.Apply(t, m, with(manyPorts(n, 1)), nil)
		c, real := &counting{}, *m.kernel
		*m.kernel = c.of(&real)
		defer func() { *m.kernel = real }()
		for i, want := range []int{perCheck, perCheck, 30} {
			c.notes = nil
			wantIntact(t, "beside many", m, true)
			if got := strings.Count(strings.Join(c.notes, "\n"), "real servers"); got != want {
				t.Errorf("look %d read the endpoints of %d virtual servers, want %d", i, got, want)
			}
		}
	})
}

// BenchmarkIntact tells what a look costs. Expected: under 200 ms with
// 10,000 x 10 in UML.
func BenchmarkIntact(b *testing.B) {
	for _, n := range sizes {
		tab := with(manyPorts(n, 10))
		b.Run(fmt.Sprintf("%dx10", n), func(b *testing.B) {
			inside(b, func(p dataplane.Applier) {
				flows.Apply(b, p, tab, nil)
				var took time.Duration
				for b.Loop() {
					start := time.Now()
					if ok, err := p.(*Mode).Intact(); !ok || err != nil {
						b.Fatal(ok, err)
					}
					took += time.Since(start)
				}
				b.ReportMetric(took.Seconds()*1e3/float64(b.N), "ms/look")
			})
		})
	}
}
