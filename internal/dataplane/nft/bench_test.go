package nft

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
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

// BenchmarkCounting measures what the count of a new connection costs: the first packets of UDP flows, each from a port of its
// own, with the chains that count and without them, in turn, each the best of many rounds. Expected: under 500 ns for one, which
// is 1 % of a processor at 20,000 connections a second.
func BenchmarkCounting(b *testing.B) {
	const flowsARound, rounds, turns = 20, 600, 5
	benchPlane(b, func(p *Mode) {
		flows.Command(b, "", "ip", "link", "set", "lo", "up")
		flows.Command(b, "", "ip", "route", "add", "10.96.0.0/16", "dev", "lo")
		tab := table.New(flows.Port("web", "", svc.IPv4, svc.UDP,
			table.Frontend{Addr: flows.AP("10.96.0.10:80"), Endpoints: flows.Endpoints("127.0.0.1:9", "127.0.0.1:10")}))
		if err := os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_udp_timeout", []byte("1"), 0o644); err != nil {
			b.Fatal(err)
		}
		var best [2]time.Duration
		var seq uint32
		for b.Loop() {
			for i := range 2 * turns {
				flows.Apply(b, p, tab, nil)
				if i%2 == 1 {
					flows.Command(b, "", "nft", "delete chain ip fairlead served-here; delete chain ip fairlead served-elsewhere")
				}
				for range rounds {
					if took := firstPackets(b, 10, flowsARound, &seq); best[i%2] == 0 || took < best[i%2] {
						best[i%2] = took
					}
				}
			}
		}
		each := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / flowsARound }
		sum := uint64(0)
		list, err := p.Served(b.Context())
		for _, c := range list {
			sum += c.Connections
		}
		if err != nil || sum != uint64(seq)/2 {
			b.Fatalf("%d of %d connections are counted, want half of them; %v", sum, seq, err)
		}
		b.ReportMetric(each(best[0]), "ns-counted")
		b.ReportMetric(each(best[1]), "ns-plain")
		b.ReportMetric(each(best[0]-best[1]), "ns-count")
	})
}

// firstPackets sends n datagrams, each from a new socket with an address and port of its number, and returns how long that took. seq
// is the last number that was used.
func firstPackets(b *testing.B, to4 byte, n int, seq *uint32) time.Duration {
	b.Helper()
	dst := &syscall.SockaddrInet4{Port: 80, Addr: [4]byte{10, 96, 0, to4}}
	start := time.Now()
	for range n {
		*seq++
		src := &syscall.SockaddrInet4{Port: 1024 + int(*seq%32768), Addr: [4]byte{127, 1, byte(*seq >> 23), byte(*seq >> 15)}}
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM, 0)
		if err == nil {
			err = errors.Join(syscall.Bind(fd, src), syscall.Sendto(fd, []byte("x"), 0, dst))
			_ = syscall.Close(fd)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(start)
}
