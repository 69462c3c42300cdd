package nft

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

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

func benchPlane(b *testing.B, f func(p *Mode)) {
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
			tab := table.New(flows.Large(n[0], n[1])...)
			before := resident(b)
			for b.Loop() {
				b.StopTimer()
				benchPlane(b, func(p *Mode) {
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
		ports := flows.Large(n, 10)
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
					p.Frontends = flows.LargePort(i*7%n, 10).Frontends
				}
				return &p
			}},
			{"replace", func(i int) *table.ServicePort { return flows.OtherEndpoint(ports[i*7%n], i) }},
			{"new-service", func(i int) *table.ServicePort { return flows.LargePort(n+i, 10) }},
		} {
			b.Run(fmt.Sprintf("%s/%d", c.name, n), func(b *testing.B) {
				benchPlane(b, func(p *Mode) {
					if err := p.Apply(b.Context(), table.New(ports...), nil); err != nil {
						b.Fatal(err)
					}
					var took []time.Duration
					i := 0
					for b.Loop() {
						b.StopTimer()
						next := c.change(i)
						// The Applier reads only the changed port of a Table.
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
