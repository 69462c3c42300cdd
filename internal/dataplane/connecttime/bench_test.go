package connecttime

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// BenchmarkConnect is connect(2) from the node to a Pod of its own: direct, through nft, and translated, in one run. What counts is the
// tenth percentile in microseconds, and only beside the others: p10-us.
func BenchmarkConnect(b *testing.B) {
	r := newRig(b)
	e := flows.NewEnv(b, r.create)
	pod := netip.AddrPortFrom(e.Host("a").Addr4(), 9376)
	for _, n := range []int{1, 10_000} {
		e.Apply(b, services(n, pod), nil)
		for _, c := range []struct {
			name    string
			to      netip.AddrPort
			outside bool
		}{{"direct", pod, true}, {"nft", web4, true}, {"connect-time", web4, false}} {
			b.Run(fmt.Sprintf("%s/%d", c.name, n), func(b *testing.B) {
				run := func() { e.Node.Do(func() { connects(b, c.to) }) }
				if c.outside {
					r.group.Outside(run)
				} else {
					run()
				}
			})
		}
	}
}

// services is a Table of n Services, the first of which is web's.
func services(n int, pod netip.AddrPort) *table.Table {
	at := []table.Endpoint{{Addr: pod, Local: true}}
	var ports []*table.ServicePort
	for i := range n {
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 8080)
		if i == 0 {
			addr = web4
		}
		ports = append(ports, flows.Port(fmt.Sprintf("web%d", i), "", svc.IPv4, svc.TCP, table.Frontend{Addr: addr, Endpoints: at}))
	}
	return table.New(ports...)
}

func connects(b *testing.B, to netip.AddrPort) {
	var took []time.Duration
	sa := unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	for b.Loop() {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			b.Fatal(err)
		}
		// A reset at the end leaves no connection that waits for its time to pass.
		_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		start := time.Now()
		err = unix.Connect(fd, &sa)
		took = append(took, time.Since(start))
		_ = unix.Close(fd)
		if err != nil {
			b.Fatal(err)
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/10].Nanoseconds())/1000, "p10-us")
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1000, "p50-us")
}
