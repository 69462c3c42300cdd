package iptables

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// BenchmarkLoad writes everything into an empty kernel. Expected: 5,000 x 10
// under 4 s with variant nft, under 2 s with variant legacy.
func BenchmarkLoad(b *testing.B) {
	for _, v := range []Variant{NFT, Legacy} {
		for _, n := range [][2]int{{1000, 10}, {5000, 10}, {10000, 10}, {5000, 50}} {
			b.Run(fmt.Sprintf("%s/%dx%d", v, n[0], n[1]), func(b *testing.B) {
				tab := bigTable(n[0], n[1])
				for b.Loop() {
					b.StopTimer()
					inside(b, Config{Variant: v}, func(p *Mode) {
						b.StartTimer()
						flows.Apply(b, p, tab, nil)
						b.StopTimer()
						start := time.Now()
						flows.Apply(b, p, tab, nil)
						b.ReportMetric(time.Since(start).Seconds()*1000, "ms-audit")
						chains := 0
						for _, f := range p.targets {
							chains += len(f.stored)
						}
						b.ReportMetric(float64(chains), "chains")
					})
					b.StartTimer()
				}
				runtime.KeepAlive(tab)
			})
		}
	}
}

// BenchmarkChange measures one change among many Services. Expected at 10,000:
// under 0.1 s with variant nft; with variant legacy the kernel takes the whole table
// anew, which takes time in proportion to it: 0.3 s.
func BenchmarkChange(b *testing.B) {
	for _, v := range []Variant{NFT, Legacy} {
		for _, n := range []int{100, 5000, 10000} {
			ports := flows.Large(n, 10)
			for _, c := range []struct {
				name   string
				change func(i int) *table.ServicePort
			}{
				{"endpoint", func(i int) *table.ServicePort { return flows.OtherEndpoint(ports[i*7%n], i) }},
				{"new-service", func(i int) *table.ServicePort { return flows.LargePort(n+i, 10) }},
			} {
				b.Run(fmt.Sprintf("%s/%s/%d", v, c.name, n), func(b *testing.B) {
					inside(b, Config{Variant: v}, func(p *Mode) {
						flows.Apply(b, p, table.New(ports...), nil)
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
							flows.Apply(b, p, tab, []table.Key{next.Key()})
							took = append(took, time.Since(start))
						}
						slices.Sort(took)
						b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "ms-p50")
						b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "ms-p99")
					})
				})
			}
		}
	}
}
