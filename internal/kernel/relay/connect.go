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

// connector accepts a thread's connections and connects them to endpoints. Only
// the thread uses it.
type connector struct {
	w     *worker
	name  sockName
	spare [2]int // sockets for the next connection of each family, or -1
	// connecting are the attempts in the order of their deadlines, for each of the
	// two timeouts.
	connecting [2][]attempt
}

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
func (k *connector) accept(l *Listener, limit int) {
	spare := &k.spare[familyIndex(l.Family)]
	for range limit {
		if k.w.paused {
			return
		}
		if !k.w.room(2) {
			k.w.pause()
			return
		}
		var err error
		if *spare < 0 {
			if *spare, err = k.socket(l.Family); err != nil {
				k.w.leave(2)
				k.w.pause()
				return
			}
		}
		fd, err := k.name.accept(l.fd)
		if err != nil {
			k.w.leave(2)
			if noFiles(err) {
				k.w.pause()
			}
			if is(err, unix.ECONNABORTED) || is(err, unix.EINTR) {
				continue
			}
			return
		}
		c := accepted{l, fd, *spare, k.name.addrPort()}
		*spare = -1
		k.w.least().take(k.w, c)
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
		w.dial.begin(c)
	} else if !w.do(func() { w.dial.begin(c) }) {
		w.load.Add(-1)
		by.load.Add(1)
		by.dial.begin(c) // the other thread has ended
	}
}

// leave gives n open files back.
func (w *worker) leave(n int64) { w.engine.count.files.Add(-n) }

// begin starts the flow of a connection just accepted.
func (k *connector) begin(c accepted) {
	f := &flow{listener: c.listener, from: c.from.Addr(), unused: c.endpoint}
	f.client.fd, f.server.fd = c.client, -1
	f.up.from, f.up.to, f.up.carried = &f.client, &f.server, &k.w.toEndpoints
	f.down.from, f.down.to, f.down.carried = &f.server, &f.client, &k.w.toClients
	f.slot = k.w.tcp.flows.add(f)
	k.w.engine.count.accepted.Add(1)
	k.w.engine.count.connections.Add(1)
	if k.w.tcp.aborting {
		k.w.tcp.abort(f)
		return
	}
	if g := c.listener.gate; g != nil {
		if f.session, f.idle = g.Accept(&Conn{k.w, f}, c.from); f.session == nil {
			k.w.tcp.end(f, unix.Close)
			return
		}
		k.w.tcp.lookIdle(f.idle)
	}
	k.connect(f)
	if !f.ended && k.w.watch(f.client.fd, flowEvents, kindClient, f.slot) != nil {
		k.w.tcp.abort(f)
	}
}

const flowEvents = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET

// connect begins to connect to an endpoint, to the next one if that fails at
// once, and ends the flow if there is none left.
func (k *connector) connect(f *flow) {
	for {
		ep, others := f.pick()
		fd := -1
		if ep.IsValid() {
			fd = k.outgoing(f, svc.FamilyOf(ep.Addr()))
		}
		if fd < 0 {
			k.w.engine.count.failed.Add(1)
			if f.session != nil {
				k.w.tcp.end(f, unix.Close)
			} else {
				k.w.tcp.abort(f)
			}
			return
		}
		err := k.name.connect(fd, ep)
		if err == nil || is(err, unix.EINPROGRESS) {
			f.endpoint, f.server = ep, side{fd: fd}
			if k.w.watch(fd, flowEvents, kindServer, f.slot) != nil {
				k.w.tcp.abort(f)
				return
			}
			k.await(f, others)
			return
		}
		_ = unix.Close(fd)
		k.next(f, ep, err)
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
func (k *connector) outgoing(f *flow, family svc.Family) int {
	if fd := f.unused; fd >= 0 && family == f.listener.Family {
		f.unused = -1
		return fd
	}
	fd, err := k.socket(family)
	if err != nil {
		return -1
	}
	return fd
}

// countAttempt counts one that is over: its deadline is none of the next one.
func (k *connector) countAttempt(f *flow) {
	if f.attempts == 0 {
		k.w.engine.count.retried.Add(1)
	}
	f.attempts++
}

// next makes the flow try another endpoint than ep next time.
func (k *connector) next(f *flow, ep netip.AddrPort, err error) {
	k.countAttempt(f)
	switch {
	case f.session != nil:
		k.w.engine.count.endpointFailures.Add(1)
		f.session.Failed(err)
		return
	case !is(err, unix.EADDRNOTAVAIL): // without a free local port it is not the endpoint's fault
		k.w.engine.failed(f.listener.target, ep)
	}
	f.tried = append(f.tried, ep)
}

// await notes until when the endpoint may answer.
func (k *connector) await(f *flow, others bool) {
	which, timeout := 0, k.w.engine.cfg.ConnectTimeout
	if !others {
		which, timeout = 1, lastFactor*timeout
	}
	k.connecting[which] = append(k.connecting[which], attempt{f, f.attempts, k.w.now.Add(timeout)})
}

func (k *connector) expire() {
	for i := range k.connecting {
		q := k.connecting[i]
		for len(q) > 0 {
			a := q[0]
			waits := !a.flow.ended && !a.flow.open && a.flow.attempts == a.number
			if waits && k.w.now.Before(a.deadline) {
				break
			}
			q[0] = attempt{}
			q = q[1:]
			if waits {
				k.connecting[i] = q
				k.another(a.flow, os.ErrDeadlineExceeded)
				q = k.connecting[i] // another may have appended
			}
		}
		k.connecting[i] = q
	}
}

// another gives up on the endpoint that a flow tries and goes on to the next.
func (k *connector) another(f *flow, err error) {
	k.leaveEndpoint(f)
	k.next(f, f.endpoint, err)
	k.connect(f)
}

// leaveEndpoint closes the connection to an endpoint of which nothing was carried.
func (k *connector) leaveEndpoint(f *flow) {
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
