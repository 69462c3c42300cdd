package lb

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// Restarting the nodes one after the other, each as soon as the one before is up again, fails no new
// connection: a node goes on to answer until another one can. With more than two, no kept connection is lost
// while the address stays where it is. The five go on to what happens when one dies.
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
	var names []string
	for i := range nodes {
		names = append(names, fmt.Sprint("n", i))
	}
	c := newCluster(t, clusterOptions{}, names...)
	backend := c.net.Outside("backend")
	backend.Serve(svc.TCP, 8080)
	vip := selectorless(t, c.server, backend.Addr4())
	c.voters(map[int]int{2: 3, 5: 5}[nodes])
	c.ask(c.wire.Host(), vip)
	outlast := func(time.Time) bool { return false } // a voter of two that was just restarted does not keep the address of the other one yet
	if nodes > 2 {
		outlast = c.hold(vip).outlast
	}
	load := startLoad(c.wire.Host(), netip.AddrPortFrom(vip, 80))
	const rounds = 2
	for range rounds {
		for _, n := range c.nodes {
			begin := time.Now()
			n.Stop()
			ended := time.Since(begin)
			n.start()
			t.Logf("%s ended after %s, and is up after %s", n.name, ended.Round(time.Millisecond), time.Since(begin).Round(time.Millisecond))
			outlast(begin)
		}
	}
	load.stop()
	t.Logf("%d connections in %s, %d at a time at most: %d failed, %d were open for a moment when the address moved and reset, "+
		"%d took longer than 0.9 s",
		load.total, time.Since(load.begin).Round(time.Millisecond), load.most, len(load.failed), len(load.broken), load.slow)
	if len(load.failed) > 0 {
		t.Errorf("failed connections: %v", load.failed)
	}
	// Those that are open when the address moves are reset, see checkReset. It moves when the node that has it stops,
	// and may move back when that one is up again.
	if moves := 2 * rounds * nodes; len(load.broken) > moves*load.most {
		t.Errorf("%d moves and %d connections at a time at most, but %d reset: %v", moves, load.most, len(load.broken), load.broken)
	}
	if nodes == 5 {
		c.deadNode()
	}
}

// load makes new connections.
type load struct {
	begin time.Time
	end   chan struct{}
	all   sync.WaitGroup

	mu          sync.Mutex
	total, slow int
	// inFlight connections have begun and not ended; most is the highest number of them.
	inFlight, most int
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
	l.mu.Lock()
	l.inFlight++
	l.most = max(l.most, l.inFlight)
	l.mu.Unlock()
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
	l.inFlight--
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
