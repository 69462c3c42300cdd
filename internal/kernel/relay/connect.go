package relay

import (
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// acceptAtOnce is how many connections of a listener are accepted before other
// events have their turn.
const acceptAtOnce = 8

// attempt is a try to reach an endpoint.
type attempt struct {
	flow     *flow
	number   int // flow.attempts at the time
	deadline time.Time
}

func familyIndex(f svc.Family) int {
	if f == svc.IPv6 {
		return 1
	}
	return 0
}

// accept takes up to limit connections of a listener. The socket for the
// endpoint is made first: a connection that was accepted cannot be put back.
func (w *worker) accept(l *Listener, limit int) {
	spare := &w.spare[familyIndex(l.Family)]
	for range limit {
		if w.paused {
			return
		}
		if !w.room(2) {
			w.pause()
			return
		}
		var err error
		if *spare < 0 {
			if *spare, err = w.socket(l.Family); err != nil {
				w.leave(2)
				w.pause()
				return
			}
		}
		fd, err := w.name.accept(l.fd)
		if err != nil {
			w.leave(2)
			if noFiles(err) {
				w.pause()
			}
			if is(err, unix.ECONNABORTED) || is(err, unix.EINTR) {
				continue
			}
			return
		}
		c := accepted{l, fd, *spare, w.name.addrPort()}
		*spare = -1
		w.least().take(w, c)
	}
}

// accepted is a connection of a client, and the socket for the endpoint.
type accepted struct {
	listener         *Listener
	client, endpoint int
	from             netip.AddrPort
}

// least is the thread with the fewest connections, w itself unless another one
// has clearly fewer: the kernel gives a new connection to any thread that waits,
// and mostly to the same one. Long connections would stay together there; with
// short ones the numbers differ by chance, and to pass them on would only cost.
func (w *worker) least() *worker {
	best := w
	for _, o := range w.engine.workers {
		if n := o.load.Load(); n+n/2+1 < best.load.Load() {
			best = o
		}
	}
	return best
}

// take begins a connection that w by has accepted.
func (w *worker) take(by *worker, c accepted) {
	w.load.Add(1)
	if w == by {
		w.begin(c)
	} else if !w.do(func() { w.begin(c) }) {
		w.load.Add(-1)
		by.load.Add(1)
		by.begin(c) // the other thread has ended
	}
}

// leave gives n open files back.
func (w *worker) leave(n int64) { w.engine.count.files.Add(-n) }

// begin starts the flow of a connection just accepted.
func (w *worker) begin(c accepted) {
	f := &flow{listener: c.listener, from: c.from.Addr(), unused: c.endpoint}
	f.client.fd, f.server.fd = c.client, -1
	f.up.from, f.up.to, f.up.carried = &f.client, &f.server, &w.toEndpoints
	f.down.from, f.down.to, f.down.carried = &f.server, &f.client, &w.toClients
	f.slot = w.flows.add(f)
	w.engine.count.accepted.Add(1)
	w.engine.count.connections.Add(1)
	if w.aborting {
		w.abort(f)
		return
	}
	if g := c.listener.gate; g != nil {
		if f.session, f.idle = g.Accept(&Conn{w, f}, c.from); f.session == nil {
			w.end(f, unix.Close)
			return
		}
		w.lookIdle(f.idle)
	}
	w.connect(f)
	if !f.ended && w.watch(f.client.fd, flowEvents, kindClient, f.slot) != nil {
		w.abort(f)
	}
}

const flowEvents = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET

// connect begins to connect to an endpoint, to the next one if that fails at
// once, and ends the flow if there is none left.
func (w *worker) connect(f *flow) {
	for {
		ep, others := f.pick()
		fd := -1
		if ep.IsValid() {
			fd = w.outgoing(f, svc.FamilyOf(ep.Addr()))
		}
		if fd < 0 {
			w.engine.count.failed.Add(1)
			if f.session != nil {
				w.end(f, unix.Close)
			} else {
				w.abort(f)
			}
			return
		}
		err := w.name.connect(fd, ep)
		if err == nil || is(err, unix.EINPROGRESS) {
			f.endpoint, f.server = ep, side{fd: fd}
			if w.watch(fd, flowEvents, kindServer, f.slot) != nil {
				w.abort(f)
				return
			}
			w.await(f, others)
			return
		}
		_ = unix.Close(fd)
		w.next(f, ep, err)
	}
}

// pick returns the endpoint to connect to, and whether there are others.
func (f *flow) pick() (ep netip.AddrPort, others bool) {
	if f.session != nil {
		return f.session.Pick(), true // a session allows its last one no longer
	}
	return f.listener.target.Pick(f.from, f.tried)
}

// outgoing returns a socket to connect with, -1 if there is none to be had. The one that is there already has the
// listener's family.
func (w *worker) outgoing(f *flow, family svc.Family) int {
	if fd := f.unused; fd >= 0 && family == f.listener.Family {
		f.unused = -1
		return fd
	}
	fd, err := w.socket(family)
	if err != nil {
		return -1
	}
	return fd
}

// countAttempt counts one that is over: its deadline is none of the next one.
func (w *worker) countAttempt(f *flow) {
	if f.attempts == 0 {
		w.engine.count.retried.Add(1)
	}
	f.attempts++
}

// next makes the flow try another endpoint than ep next time.
func (w *worker) next(f *flow, ep netip.AddrPort, err error) {
	w.countAttempt(f)
	switch {
	case f.session != nil:
		w.engine.count.endpointFailures.Add(1)
		f.session.Failed(err)
		return
	case !is(err, unix.EADDRNOTAVAIL): // without a free local port it is not the endpoint's fault
		w.engine.failed(f.listener.target, ep)
	}
	f.tried = append(f.tried, ep)
}

// await notes until when the endpoint may answer.
func (w *worker) await(f *flow, others bool) {
	which, timeout := 0, w.engine.cfg.ConnectTimeout
	if !others {
		which, timeout = 1, lastFactor*timeout
	}
	w.connecting[which] = append(w.connecting[which], attempt{f, f.attempts, w.now.Add(timeout)})
}

func (w *worker) expireConnecting() {
	for i := range w.connecting {
		q := w.connecting[i]
		for len(q) > 0 {
			a := q[0]
			waits := !a.flow.ended && !a.flow.open && a.flow.attempts == a.number
			if waits && w.now.Before(a.deadline) {
				break
			}
			q[0] = attempt{}
			q = q[1:]
			if waits {
				w.connecting[i] = q
				w.another(a.flow, os.ErrDeadlineExceeded)
				q = w.connecting[i] // another may have appended
			}
		}
		w.connecting[i] = q
	}
}

// another gives up on the endpoint that a flow tries and goes on to the next.
func (w *worker) another(f *flow, err error) {
	w.leaveEndpoint(f)
	w.next(f, f.endpoint, err)
	w.connect(f)
}

// leaveEndpoint closes the connection to an endpoint of which nothing was carried.
func (w *worker) leaveEndpoint(f *flow) {
	_ = unix.Close(f.server.fd)
	f.server = side{fd: -1}
}

// socketError returns why a connection to an endpoint has failed.
func socketError(fd int) error {
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return err
	}
	return syscall.Errno(n)
}
