package dns

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/kernel/process"
)

// childEnv makes the test binary a server for BenchmarkLoopback.
const childEnv = "FAIRLEAD_DNS_BENCHMARK_SERVER"

// serveForBenchmark prints the address it serves on and ends with stdin.
func serveForBenchmark() {
	o := Options{Listen: []string{"127.0.0.1:0"}}
	s, err := New(o)
	if err == nil {
		err = s.Listen()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	s.Zone().SetService(headless("prod", "fifty"))
	s.Zone().SetSlice(sliceOf("prod", "fifty", 50))
	web := headless("prod", "web")
	web.Spec.ClusterIP = "10.96.0.20"
	s.Zone().SetService(web)
	ctx, cancel := context.WithCancel(context.Background())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); cancel() }()
	fmt.Println(s.Addrs()[0])
	_ = s.Run(ctx)
}

// startChild runs the server in its own process, so that its processor
// time can be told from the client's.
func startChild(b *testing.B) (netip.AddrPort, int) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	return netip.MustParseAddrPort(strings.TrimSpace(line)), cmd.Process.Pid
}

// cpu is the processor time of a process so far; the kernel counts it in
// hundredths of a second.
func cpu(b *testing.B, pid int) time.Duration {
	s, err := process.ReadStat(pid)
	if err != nil {
		b.Fatal(err)
	}
	return s.CPU
}

// BenchmarkLoopback asks a server in another process over UDP, with 4 sockets
// and 32 questions under way on each, and reports the processor time of the
// server for each. Expected: at most 7 µs for an A record.
func BenchmarkLoopback(b *testing.B) {
	for _, c := range []struct {
		what, name string
		typ        uint16
	}{
		{"A", "web.prod.svc.cluster.local.", mdns.TypeA},
		{"A-headless50", "fifty.prod.svc.cluster.local.", mdns.TypeA},
		{"SRV", "_http._tcp.web.prod.svc.cluster.local.", mdns.TypeSRV},
		{"NXDOMAIN", "www.example.com.prod.svc.cluster.local.", mdns.TypeA},
	} {
		b.Run(c.what, func(b *testing.B) {
			addr, pid := startChild(b)
			m := question(c.name, c.typ)
			m.SetEdns0(1232, false)
			req, _ := m.Pack()
			flood(b, addr, req, 1000)
			before, n := cpu(b, pid), max(b.N, 1)
			begin := time.Now()
			b.ResetTimer()
			flood(b, addr, req, n)
			b.StopTimer()
			used := cpu(b, pid) - before
			b.ReportMetric(float64(used.Microseconds())/float64(n), "cpu-µs/query")
			b.ReportMetric(float64(n)/time.Since(begin).Seconds(), "queries/s")
		})
	}
}

func flood(b *testing.B, addr netip.AddrPort, req []byte, n int) {
	const sockets, window = 4, 32
	var wg sync.WaitGroup
	var left, lost atomic.Int64
	left.Store(int64(n))
	for range sockets {
		wg.Go(func() {
			c, err := net.Dial("udp", addr.String())
			if err != nil {
				b.Error(err)
				return
			}
			defer c.Close()
			buf := make([]byte, 2048)
			under := 0
			for {
				for under < window && left.Add(-1) >= 0 {
					_, _ = c.Write(req)
					under++
				}
				if under == 0 {
					return
				}
				_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
				if _, err := c.Read(buf); err != nil {
					lost.Add(int64(under))
					under = 0
					continue
				}
				under--
			}
		})
	}
	wg.Wait()
	if l := lost.Load(); l > int64(n/100) {
		b.Errorf("%d of %d questions were not answered", l, n)
	}
}
