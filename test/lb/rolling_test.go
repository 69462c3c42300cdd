package lb

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// Restarting the nodes one after the other, each as soon as the one before is up again, fails no new
// connection: a node goes on to answer until another one can.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	for _, nodes := range []int{2, 5} {
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			inParallel(t)
			rollingRestart(t, nodes)
		})
	}
}

func rollingRestart(t *testing.T, nodes int) {
	network := testbed.NewNetwork(t)
	dir := t.TempDir()
	host := network.Outside("server")
	server := process.NewServer(host, process.Program("fairlead"), filepath.Join(dir, "server"),
		"--bind-address", "127.0.0.1,"+host.Addr4().String(), "--lb-pool", pools)
	server.Start(t)
	server.AwaitReady(t)
	var start []func() *process.Process
	var running []*process.Process
	for i := range nodes {
		name := fmt.Sprint("n", i)
		on := network.Outside(name)
		on.Sysctl("net/ipv4/ip_forward", "1")
		start = append(start, func() *process.Process {
			cmd := on.Command(context.Background(), process.Program("fairlead"), "agent",
				"--server", "https://"+host.Addr4().String()+":6443", "--token-file", filepath.Join(dir, "server", "node-token"),
				"--data-dir", filepath.Join(dir, name), "--node-name", name, "--node-ip", on.Addr4().String(), "--mode", "nft",
				"--dns-lameduck", "0s") // in which nothing here would ask it
			cmd.Env = append(os.Environ(), "HOME="+dir)
			return process.Start(t, cmd)
		})
		running = append(running, start[i]())
	}
	backend := network.Outside("backend")
	backend.Serve(svc.TCP, 8080)
	vip := netip.AddrPortFrom(selectorless(t, server, backend.Addr4()), 80)
	client := network.Outside("client")
	for _, p := range running {
		p.Says(`is up; DNS answers`)
	}
	testbed.Until(t, "the list of voters to be whole", func() error { return votersOf(t, server, nodes) })
	testbed.Until(t, "an answer from outside", func() error {
		_, err := client.Ask(t.Context(), svc.TCP, vip)
		return err
	})
	load := startLoad(client, vip)
	for i := range 2 * nodes {
		i %= nodes
		begin := time.Now()
		running[i].Stop()
		ended := time.Since(begin)
		running[i] = start[i]()
		running[i].Says(`is up; DNS answers`)
		t.Logf("n%d ended after %s, and is up %s later", i, ended.Round(time.Millisecond), (time.Since(begin) - ended).Round(time.Millisecond))
	}
	load.stop()
	t.Logf("%d connections in %s: %d failed, %d were open for a moment when the address moved and reset, %d took longer than 0.9 s",
		load.total, time.Since(load.begin).Round(time.Millisecond), len(load.failed), len(load.broken), load.slow)
	if len(load.failed) > 0 {
		t.Errorf("failed connections: %v", load.failed)
	}
	if len(load.broken) > 0 {
		t.Log(load.broken)
	}
}

// load makes new connections.
type load struct {
	begin time.Time
	end   chan struct{}
	all   sync.WaitGroup

	mu             sync.Mutex
	total, slow    int
	failed, broken []error
}

// startLoad connects 500 times a second until stop.
func startLoad(from *testbed.Host, to netip.AddrPort) *load {
	l := &load{begin: time.Now(), end: make(chan struct{})}
	l.all.Go(func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-l.end:
				return
			case <-tick.C:
				l.all.Go(func() { l.connect(from, to) })
			}
		}
	})
	return l
}

func (l *load) connect(from *testbed.Host, to netip.AddrPort) {
	ctx, cancel := context.WithTimeout(context.Background(), testbed.Patience)
	defer cancel()
	begin := time.Now()
	c, err := from.Dial(ctx, svc.TCP, to)
	var broken error
	if errors.Is(err, syscall.ECONNRESET) { // once it was open; one that cannot be opened is refused
		err, broken = nil, err
	} else if err == nil {
		_, broken = testbed.AskOn(c)
		_ = c.Close()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total++
	if time.Since(begin) > 900*time.Millisecond {
		l.slow++
	}
	if err != nil {
		l.failed = append(l.failed, err)
	}
	if broken != nil {
		l.broken = append(l.broken, fmt.Errorf("%s: %w", begin.Sub(l.begin), broken))
	}
}

func (l *load) stop() {
	close(l.end)
	l.all.Wait()
}
