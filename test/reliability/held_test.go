package reliability

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// heldPatience is how long a request on a connection that is held may take: a fault that is
// mended lets a connection go on, with what TCP sends again.
const heldPatience = 2 * time.Minute

// held are connections of the clients that go through all faults, with a request ten times a
// second. One ends only with its client's machine or with the process at its other end.
type held struct {
	l  *load
	wg sync.WaitGroup
	// clients are how many hold a connection.
	clients int

	mu sync.Mutex
	// losses counts how often each end has ended on purpose.
	losses map[end]int
	open   map[*heldConn]bool
	// asked counts answers, made connections; excused are those that ended on purpose.
	asked, made, excused int
	cut                  []request
	slowest              time.Duration // answer
}

// end is one of a connection: a machine, or its Pod.
type end struct {
	*node
	pod bool
}

// heldConn is a connection from a client of one machine to the Pod of another, or of the same.
type heldConn struct {
	net.Conn
	name   string
	from   *node
	to     *node
	opened time.Time
	before map[end]int // losses when it was opened
	last   time.Time   // an answer; guarded by held.mu
}

func newHeld(l *load) *held {
	return &held{l: l, losses: map[end]int{}, open: map[*heldConn]bool{}}
}

// keep holds one connection until ctx ends. One that ends is followed by another.
func (h *held) keep(ctx context.Context, name string, from *node, dial dialer) {
	h.clients++
	h.wg.Go(func() {
		tick := time.NewTicker(askInterval)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if !h.l.isOff(from) {
				h.hold(ctx, name, from, dial, tick.C)
			}
		}
	})
}

// hold opens a connection and asks until it ends.
func (h *held) hold(ctx context.Context, name string, from *node, dial dialer, tick <-chan time.Time) {
	h.mu.Lock()
	before := maps.Clone(h.losses)
	h.mu.Unlock()
	dialing, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	conn, err := dial(dialing)
	if err != nil {
		return // the other clients count that
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	r := bufio.NewReader(conn)
	answer, err := exchange(conn, r, askTime, "keep-alive")
	if err != nil {
		return
	}
	c := &heldConn{Conn: conn, name: name, from: from, to: h.l.r.nodeOf(answer), opened: time.Now(), before: before}
	if c.to == nil || !h.begins(c) {
		return
	}
	for {
		select {
		case <-ctx.Done():
		case <-tick:
		}
		begin := time.Now()
		_, err := exchange(conn, r, heldPatience, "keep-alive")
		if h.answered(ctx, c, begin, err); err != nil {
			return
		}
	}
}

// begins reports whether a connection counts: its ends have not been lost since it was dialed.
func (h *held) begins(c *heldConn) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lost(c) {
		return false
	}
	h.open[c] = true
	h.made++
	return true
}

// lost reports whether an end of c was ended on purpose. It is called with mu held.
func (h *held) lost(c *heldConn) bool {
	from, to := end{c.from, false}, end{c.to, true}
	return h.losses[from] != c.before[from] || h.losses[to] != c.before[to]
}

// answered takes down one answer, or the end of the connection.
func (h *held) answered(ctx context.Context, c *heldConn, begin time.Time, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		h.asked++
		c.last, h.slowest = time.Now(), max(h.slowest, time.Since(begin))
		return
	}
	delete(h.open, c)
	switch {
	case ctx.Err() != nil:
	case h.lost(c):
		h.excused++
	default:
		h.cut = append(h.cut, request{
			client: fmt.Sprintf("%s to the Pod of %s, open for %s,", c.name, c.to.host.Name(), time.Since(c.opened).Round(time.Millisecond)),
			begin:  begin, end: time.Now(), err: err,
		})
	}
}

// loses is called before and after a machine, or its Pod alone, ends: its connections end with it.
func (h *held) loses(n *node, podAlone bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.losses[end{n, true}]++
	if !podAlone {
		h.losses[end{n, false}]++
	}
	for c := range h.open {
		if h.lost(c) {
			c.Close()
		}
	}
}

// cuts returns the connections that were cut.
func (h *held) cuts() []request {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.cut)
}

// whole returns an error unless every client holds its connection.
func (h *held) whole() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.open) != h.clients {
		return fmt.Errorf("%d of %d clients do", len(h.open), h.clients)
	}
	return nil
}

// through returns how many connections are open since before begin and have been answered after end.
func (h *held) through(begin, end time.Time) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for c := range h.open {
		if c.opened.Before(begin) && c.last.After(end) {
			n++
		}
	}
	return n
}

// summary is what became of all connections.
func (h *held) summary() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return fmt.Sprintf("%d connections were held, with %d answers on them, the slowest after %s; %d ended with an end of theirs, %d were cut",
		h.made, h.asked, h.slowest.Round(10*time.Millisecond), h.excused, len(h.cut))
}

// nodeOf returns the machine whose Pod has answered.
func (r *rig) nodeOf(answer string) *node {
	name, _, _ := strings.Cut(answer, " ")
	i := slices.IndexFunc(r.nodes, func(n *node) bool { return podOn(n) == name })
	if i < 0 {
		r.t.Errorf("an answer of %q", answer)
		return nil
	}
	return r.nodes[i]
}
