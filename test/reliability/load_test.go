package reliability

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// askInterval is between the requests of one client.
	askInterval = 100 * time.Millisecond
	// askTime is how long a client waits for its answer.
	askTime = 3 * time.Second
)

// request is one that failed.
type request struct {
	client     string
	begin, end time.Time
	err        error
}

// load is what clients of the Service see: one on each node, one in each Pod, and one outside
// of the cluster that asks nodes in turn. Each request has its own connection; beside these each client holds one.
type load struct {
	r    *rig
	wg   sync.WaitGroup
	stop context.CancelFunc
	held *held

	mu     sync.Mutex
	asked  int
	failed []request
	off    map[*node]bool // machines that do not run
	// waiting are the requests without an answer yet, by the time they began.
	waiting map[*request]bool
}

func startLoad(r *rig) *load {
	ctx, cancel := context.WithCancel(r.t.Context())
	l := &load{r: r, stop: cancel, off: map[*node]bool{}, waiting: map[*request]bool{}}
	l.held = newHeld(l)
	var outside []dialer
	for _, n := range r.nodes {
		byHost := r.dialFrom(n)
		byPod := func(ctx context.Context) (conn net.Conn, err error) {
			enter := netns.Do(n.namespace(), func() error {
				conn, err = new(net.Dialer).DialContext(ctx, "tcp", r.service.String())
				return nil
			})
			return conn, errors.Join(enter, err)
		}
		at := netip.AddrPortFrom(n.host.Addr4(), r.nodePort)
		byPort := func(ctx context.Context) (net.Conn, error) { return r.outside.Dial(ctx, svc.TCP, at) }
		outside = append(outside, byPort)
		for name, dial := range map[string]dialer{n.host.Name(): byHost, "a Pod of " + n.host.Name(): byPod} {
			l.client(ctx, name, func(int) (*node, dialer) { return n, dial })
			l.held.keep(ctx, name, n, dial)
		}
		l.held.keep(ctx, "outside by "+n.host.Name(), n, byPort)
	}
	l.client(ctx, "outside", func(i int) (*node, dialer) { return r.nodes[i%len(r.nodes)], outside[i%len(r.nodes)] })
	r.t.Cleanup(l.end)
	return l
}

func (l *load) end() {
	l.stop()
	l.wg.Wait()
	l.held.wg.Wait()
}

type dialer func(context.Context) (net.Conn, error)

// client asks until ctx ends. next returns the node by which request number i goes.
func (l *load) client(ctx context.Context, name string, next func(i int) (*node, dialer)) {
	l.wg.Go(func() {
		tick := time.NewTicker(askInterval)
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			n, dial := next(i)
			q := &request{client: name + " by " + n.host.Name(), begin: time.Now()}
			if !l.begins(n, q) {
				continue
			}
			_, q.err = ask(ctx, dial)
			l.ends(ctx, n, q)
		}
	})
}

// isOff reports whether a machine does not run.
func (l *load) isOff(n *node) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.off[n]
}

// begins reports whether a request can be made: by a machine that runs.
func (l *load) begins(n *node, q *request) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.off[n] {
		return false
	}
	l.waiting[q] = true
	return true
}

// ends takes a request down, unless its own machine has ended meanwhile.
func (l *load) ends(ctx context.Context, n *node, q *request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.waiting, q)
	if ctx.Err() != nil || l.off[n] {
		return
	}
	l.asked++
	if q.end = time.Now(); q.err != nil {
		l.failed = append(l.failed, *q)
	}
}

// quietSince returns a check that since a moment no request has failed, nor waited for long,
// for a while.
func (l *load) quietSince(moment time.Time) func() error {
	return func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		last := moment
		if len(l.failed) > 0 && l.failed[len(l.failed)-1].end.After(last) {
			last = l.failed[len(l.failed)-1].end
		}
		for q := range l.waiting {
			if time.Since(q.begin) > quiet/2 {
				return fmt.Errorf("%s waits for an answer", q.client)
			}
		}
		return elapsed(last, quiet)()
	}
}

// without has no client use a machine, until the returned function is called.
func (l *load) without(n *node) (again func()) {
	set := func(off bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.off[n] = off
	}
	set(true)
	return func() { set(false) }
}

// count returns how many requests have ended, and those that failed.
func (l *load) count() (asked int, failed []request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.asked, slices.Clone(l.failed)
}

// ask makes one request.
func ask(ctx context.Context, dial dialer) (answer string, err error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	conn, err := dial(ctx)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	return exchange(conn, bufio.NewReader(conn), time.Until(deadline), "close")
}

// exchange makes a request on a connection, of which r reads. connection is its header of that name.
func exchange(conn net.Conn, r *bufio.Reader, patience time.Duration, connection string) (answer string, err error) {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: web\r\nConnection: %s\r\n\r\n", connection); err != nil {
		return "", err
	}
	res, err := http.ReadResponse(r, nil)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = errors.New(res.Status)
	}
	return string(text), err
}
