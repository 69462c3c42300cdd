package nft

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
)

// large is n Services of one port with a number of endpoints each.
func large(n, endpoints int) []*table.ServicePort {
	ports := make([]*table.ServicePort, n)
	for i := range ports {
		ports[i] = largePort(i, endpoints)
	}
	return ports
}

func largePort(i, endpoints int) *table.ServicePort {
	list := make([]table.Endpoint, endpoints)
	for j := range list {
		x := i*endpoints + j
		list[j].Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(64 + x>>16), byte(x >> 8), byte(x)}), 8080)
	}
	slices.SortFunc(list, func(a, b table.Endpoint) int { return a.Addr.Compare(b.Addr) })
	vip := netip.AddrPortFrom(netip.AddrFrom4([4]byte{172, byte(16 + i>>16), byte(i >> 8), byte(i)}), 80)
	return servicePort(fmt.Sprintf("service-%d", i), "http", svc.IPv4, svc.TCP, table.Frontend{Kind: table.ClusterIP, Addr: vip, Endpoints: list})
}

// resident is the process's memory in MB, after what is garbage is returned.
func resident(b testing.TB) float64 {
	b.Helper()
	debug.FreeOSMemory()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	kb := 0.0
	_, _ = fmt.Sscan(rest, &kb)
	return kb / 1024
}

func benchPlane(b *testing.B, f func(p *Plane)) {
	b.Helper()
	testbed.NewNetwork(b).Outside("host").Do(func() {
		p, err := New(Config{})
		if err != nil {
			b.Fatal(err)
		}
		defer func() { _ = p.Close() }()
		f(p)
	})
}

// BenchmarkLoad writes everything into an empty kernel. Expected: 5,000 x 50
// under 5 s, two thirds of it the kernel's.
func BenchmarkLoad(b *testing.B) {
	for _, n := range [][2]int{{1000, 10}, {5000, 10}, {10000, 10}, {5000, 50}, {50000, 10}} {
		b.Run(fmt.Sprintf("%dx%d", n[0], n[1]), func(b *testing.B) {
			tab := table.New(large(n[0], n[1])...)
			before := resident(b)
			for b.Loop() {
				b.StopTimer()
				benchPlane(b, func(p *Plane) {
					b.StartTimer()
					if err := p.Apply(b.Context(), tab, nil); err != nil {
						b.Fatal(err)
					}
					b.StopTimer()
					b.ReportMetric(resident(b)-before, "MB")
					start := time.Now()
					if err := p.Apply(b.Context(), tab, nil); err != nil {
						b.Fatal(err)
					}
					b.ReportMetric(time.Since(start).Seconds()*1000, "ms-audit")
				})
				b.StartTimer()
			}
			runtime.KeepAlive(tab)
		})
	}
}

// BenchmarkChange measures one change among many Services. Expected: under
// 1 ms, whatever their number.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{100, 10000, 50000} {
		ports := large(n, 10)
		for _, c := range []struct {
			name   string
			change func(i int) *table.ServicePort
		}{
			{"endpoint", func(i int) *table.ServicePort {
				// One endpoint goes or comes back.
				p := *ports[i*7%n]
				p.Frontends = slices.Clone(p.Frontends)
				if e := p.Frontends[0].Endpoints; len(e) == 10 {
					p.Frontends[0].Endpoints = slices.Delete(slices.Clone(e), i%10, i%10+1)
				} else {
					p.Frontends = largePort(i*7%n, 10).Frontends
				}
				return &p
			}},
			{"replace", func(i int) *table.ServicePort {
				p := *ports[i*7%n]
				p.Frontends = slices.Clone(p.Frontends)
				e := slices.Clone(p.Frontends[0].Endpoints)
				e[9].Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 255, byte(i >> 8), byte(i)}), 8080)
				p.Frontends[0].Endpoints = e
				return &p
			}},
			{"new-service", func(i int) *table.ServicePort { return largePort(n+i, 10) }},
		} {
			b.Run(fmt.Sprintf("%s/%d", c.name, n), func(b *testing.B) {
				benchPlane(b, func(p *Plane) {
					if err := p.Apply(b.Context(), table.New(ports...), nil); err != nil {
						b.Fatal(err)
					}
					var took []time.Duration
					i := 0
					for b.Loop() {
						b.StopTimer()
						next := c.change(i)
						// The Plane reads only the changed port of a Table.
						tab := table.New(next)
						i++
						b.StartTimer()
						start := time.Now()
						if err := p.Apply(b.Context(), tab, []table.Key{next.Key()}); err != nil {
							b.Fatal(err)
						}
						took = append(took, time.Since(start))
					}
					slices.Sort(took)
					b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs-p50")
					b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "µs-p99")
				})
			})
		}
	}
}
