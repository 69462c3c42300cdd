package relay

import (
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// acceptAtOnce is how many connections of a listener are accepted before
	// other events have their turn.
	acceptAtOnce = 8
	// pumpTurns is how often one connection may read or write in one direction
	// before others have their turn.
	pumpTurns = 16
	// bulkBurst is how much must come at once for the next bytes to be spliced
	// rather than copied.
	bulkBurst = 2 * bufferSize
)

// flow is one connection of a client and one to an endpoint.
type flow struct {
	slot     int32
	listener *Listener
	from     netip.Addr
	client   side
	server   side
	up, down direction // from the client, and to it
	endpoint netip.AddrPort
	tried    []netip.AddrPort
	unused   int  // a socket to connect with, or -1
	open     bool // the endpoint has answered
	waiting  bool // it is among worker.ready
	ended    bool
}

// side is a socket of a flow, and what the epoll has said of it. The epoll tells
// of changes only, so what it said counts until a call finds otherwise.
type side struct {
	fd                 int
	readable, writable bool
	ending             bool // the peer will send nothing more: read to the end
}

// direction carries bytes from one side to the other. What has been read and
// not yet written is in the pipe, held bytes of it, and after them in spill.
type direction struct {
	from, to  *side
	carried   *atomic.Int64 // counts the bytes written
	pipe      pipe
	borrowed  bool
	held      int
	spill     []byte
	bulk      bool // splice, do not copy
	burst     int  // bytes since the last time there was nothing to read
	eof, done bool
}

// attempt is a try to reach an endpoint.
type attempt struct {
	flow     *flow
	number   int // len(flow.tried) at the time
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
			if *spare, err = socket(svc.TCP, l.Family); err != nil {
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
		c := accepted{l, fd, *spare, w.name.addr()}
		*spare = -1
		w.least().take(w, c)
	}
}

// accepted is a connection of a client, and the socket for the endpoint.
type accepted struct {
	listener         *Listener
	client, endpoint int
	from             netip.Addr
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
	f := &flow{listener: c.listener, from: c.from, unused: c.endpoint}
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
		ep, others := f.listener.target.Pick(f.from, f.tried)
		fd := -1
		if ep.IsValid() {
			fd = f.outgoing()
		}
		if fd < 0 {
			w.engine.count.failed.Add(1)
			w.abort(f)
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
		// Without a free local port it is not the endpoint's fault.
		w.next(f, ep, !is(err, unix.EADDRNOTAVAIL))
	}
}

// outgoing returns a socket to connect with, -1 if there is none to be had.
func (f *flow) outgoing() int {
	if fd := f.unused; fd >= 0 {
		f.unused = -1
		return fd
	}
	fd, err := socket(svc.TCP, f.listener.Family)
	if err != nil {
		return -1
	}
	return fd
}

// next makes the flow try another endpoint than ep next time.
func (w *worker) next(f *flow, ep netip.AddrPort, failed bool) {
	if len(f.tried) == 0 {
		w.engine.count.retried.Add(1)
	}
	f.tried = append(f.tried, ep)
	if failed {
		w.engine.failed(f.listener.target, ep)
	}
}

// await notes until when the endpoint may answer.
func (w *worker) await(f *flow, others bool) {
	which, timeout := 0, w.engine.cfg.ConnectTimeout
	if !others {
		which, timeout = 1, lastPatience*timeout
	}
	w.connecting[which] = append(w.connecting[which], attempt{f, len(f.tried), w.now.Add(timeout)})
}

func (w *worker) expireConnecting() {
	for i := range w.connecting {
		q := w.connecting[i]
		for len(q) > 0 {
			a := q[0]
			waits := !a.flow.ended && !a.flow.open && len(a.flow.tried) == a.number
			if waits && w.now.Before(a.deadline) {
				break
			}
			q[0] = attempt{}
			q = q[1:]
			if waits {
				w.connecting[i] = q
				w.another(a.flow)
				q = w.connecting[i] // another may have appended
			}
		}
		w.connecting[i] = q
	}
}

// another gives up on the endpoint that a flow tries and goes on to the next.
func (w *worker) another(f *flow) {
	_ = unix.Close(f.server.fd)
	f.server = side{fd: -1}
	w.next(f, f.endpoint, true)
	w.connect(f)
}

func (w *worker) flowEvent(f *flow, server bool, events uint32) {
	s, reads := &f.client, &f.up
	if server {
		s, reads = &f.server, &f.down
	}
	over := events&(unix.EPOLLERR|unix.EPOLLHUP) != 0
	s.readable = s.readable || over || events&(unix.EPOLLIN|unix.EPOLLRDHUP) != 0
	s.writable = s.writable || over || events&unix.EPOLLOUT != 0
	s.ending = s.ending || over || events&unix.EPOLLRDHUP != 0
	switch {
	case f.open && events&unix.EPOLLERR != 0 && reads.eof:
		w.abort(f) // a reset, which no read would find
	case f.open:
		w.serve(f)
	case !server && over:
		w.abort(f) // the client did not wait
	case server && over:
		w.another(f)
	case server && s.writable:
		f.open = true
		f.listener.target.Answered(f.endpoint)
		w.serve(f)
	}
}

// serve carries what there is in both directions.
func (w *worker) serve(f *flow) {
	more, err := w.pump(&f.up)
	if err == nil {
		var m bool
		m, err = w.pump(&f.down)
		more = more || m
	}
	switch {
	case err != nil:
		w.abort(f)
	case f.up.eof && f.down.eof && f.up.empty() && f.down.empty():
		w.end(f, unix.Close)
	default:
		err = f.up.finish()
		if err == nil {
			err = f.down.finish()
		}
		if err != nil {
			w.abort(f)
		} else if more && !f.waiting {
			f.waiting = true
			w.ready = append(w.ready, f)
		}
	}
}

func (w *worker) runReady() {
	ready := w.ready
	w.ready = nil
	for _, f := range ready {
		f.waiting = false
		if !f.ended {
			w.serve(f)
		}
	}
	if w.ready == nil {
		w.ready = ready[:0]
	}
}

func (d *direction) empty() bool { return d.held == 0 && len(d.spill) == 0 }

// finish passes the end of the bytes on, once.
func (d *direction) finish() error {
	if d.done || !d.eof || !d.empty() {
		return nil
	}
	d.done = true
	if err := unix.Shutdown(d.to.fd, unix.SHUT_WR); !is(err, unix.ENOTCONN) {
		return err
	}
	return nil
}

// pump carries bytes until there are none, or no room for them, or others
// should have their turn (more).
func (w *worker) pump(d *direction) (more bool, err error) {
	for range pumpTurns {
		switch {
		case !d.empty():
			if !d.to.writable {
				return false, nil
			}
			err = w.drain(d)
		case d.eof || !d.from.readable:
			return false, nil
		case d.bulk:
			err = w.spliceIn(d)
		default:
			err = w.copy(d)
		}
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

// copy carries what fits into the buffer.
func (w *worker) copy(d *direction) error {
	n, err := readFrom(d.from.fd, w.buffer[:])
	switch {
	case is(err, unix.EAGAIN):
		d.pauseReading()
		return nil
	case err != nil:
		return err
	case n == 0:
		d.eof = true
		return nil
	}
	d.burst += n
	var broken error
	switch {
	case n == bufferSize:
		d.bulk = true
	case d.from.ending:
		var rest int
		rest, broken = w.rest(d, w.buffer[n:])
		n += rest
	default:
		d.pauseReading() // there was no more; the epoll tells when there is
	}
	m := 0
	if d.to.writable {
		flags := 0
		if d.eof {
			flags = unix.MSG_MORE // the end goes into the same packet
		}
		m, err = send(d.to.fd, w.buffer[:n], flags)
		if is(err, unix.EAGAIN) {
			m, err = 0, nil
		}
		if err != nil {
			return err
		}
		d.to.writable = m == n
		d.carried.Add(int64(m))
	}
	if m < n {
		w.hold(d, w.buffer[m:n])
	}
	return broken
}

// rest reads on from a peer that has ended: mostly only the end is left.
func (w *worker) rest(d *direction, b []byte) (n int, err error) {
	n, err = readFrom(d.from.fd, b)
	switch {
	case is(err, unix.EAGAIN):
		d.pauseReading()
		return 0, nil
	case err != nil:
		return 0, err
	}
	d.eof = n == 0
	d.burst += n
	return n, nil
}

func (d *direction) pauseReading() {
	d.from.readable = false
	if d.burst < bulkBurst {
		d.bulk = false
	}
	d.burst = 0
}

// hold keeps bytes that could not be written.
func (w *worker) hold(d *direction, b []byte) {
	if w.borrow(d) {
		if n, err := writeTo(d.pipe.w, b); err == nil {
			d.held = n
			b = b[n:]
		}
	}
	d.spill = append([]byte(nil), b...)
}

// borrow sees to it that a direction has a pipe, if there is one to be had.
func (w *worker) borrow(d *direction) bool {
	if !d.borrowed {
		d.pipe, d.borrowed = w.pipe()
	}
	return d.borrowed
}

func (w *worker) release(d *direction) {
	if d.borrowed {
		w.giveBack(d.pipe, d.held == 0)
		d.borrowed = false
	}
}

// spliceIn moves bytes into the pipe.
func (w *worker) spliceIn(d *direction) error {
	if !w.borrow(d) {
		d.bulk = false
		return nil
	}
	n, err := retry(func() (int, error) {
		n, err := unix.Splice(d.from.fd, nil, d.pipe.w, nil, pipeSize, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		return int(n), err
	})
	switch {
	case is(err, unix.EAGAIN):
		d.pauseReading()
		w.release(d)
		return nil
	case err != nil:
		return err
	case n == 0:
		d.eof = true
		w.release(d)
		return nil
	}
	d.burst += n
	d.held = n
	return nil
}

// drain writes what is held.
func (w *worker) drain(d *direction) error {
	var n int
	var err error
	if d.held > 0 {
		n, err = retry(func() (int, error) {
			n, err := unix.Splice(d.pipe.r, nil, d.to.fd, nil, d.held, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
			return int(n), err
		})
		if err == nil {
			d.held -= n
		}
	} else {
		n, err = writeTo(d.to.fd, d.spill)
		if err == nil {
			d.spill = d.spill[n:]
		}
	}
	if is(err, unix.EAGAIN) {
		d.to.writable = false
		return nil
	}
	if err == nil {
		d.carried.Add(int64(n))
	}
	if d.empty() {
		d.spill = nil
		if !d.bulk || d.eof {
			w.release(d)
		}
	}
	return err
}

// abort ends a flow so that both peers see that something was lost.
func (w *worker) abort(f *flow) {
	w.end(f, func(fd int) error { reset(fd); return nil })
}

func (w *worker) end(f *flow, shut func(fd int) error) {
	if f.ended {
		return
	}
	f.ended = true
	_ = shut(f.client.fd)
	if f.server.fd >= 0 {
		_ = shut(f.server.fd)
	}
	if f.unused >= 0 {
		_ = unix.Close(f.unused)
	}
	w.load.Add(-1)
	w.release(&f.up)
	w.release(&f.down)
	f.up.spill, f.down.spill = nil, nil
	w.flows.remove(f.slot)
	w.leave(2)
	w.engine.count.connections.Add(-1)
}
