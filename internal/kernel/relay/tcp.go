package relay

import (
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
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
	attempts int // that are over
	// Of a Gate's connection. It has ended if it has carried nothing for idle since last.
	session Session
	idle    time.Duration
	last    time.Time

	unused  int  // a socket to connect with, or -1
	open    bool // the endpoint has answered
	waiting bool // it is among streams.ready
	ended   bool
}

// side is a socket of a flow, and its events so far. The epoll reports
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
	carried   *atomic.Int64 // counts the bytes written, also by other connections
	bytes     int64         // written
	pipe      pipe
	borrowed  bool
	held      int
	spill     []byte
	bulk      bool // splice, do not copy
	burst     int  // bytes since the last time there was nothing to read
	eof, done bool
}

// streams carry the bytes of a thread's connections. Only the thread uses them.
type streams struct {
	w        *worker
	flows    slots[*flow]
	ready    []*flow
	buffer   [bufferSize]byte
	nextIdle time.Time // of expireIdle, zero while there is nothing for it
	aborting bool      // end new connections at once
}

func (t *streams) flowEvent(f *flow, server bool, events uint32) {
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
		t.abort(f) // a reset, which no read would find
	case f.open:
		t.serve(f)
	case !server && over:
		t.abort(f) // the client did not wait
	case server && over:
		t.w.dial.another(f, socketError(f.server.fd))
	case server && s.writable:
		t.w.dial.answered(f)
	}
}

// serve carries what there is in both directions.
func (t *streams) serve(f *flow) {
	before := f.up.bytes + f.down.bytes
	more, err := t.pump(&f.up)
	if err == nil {
		var m bool
		m, err = t.pump(&f.down)
		more = more || m
	}
	if f.up.bytes+f.down.bytes > before {
		f.last = t.w.now
	}
	switch {
	case err != nil:
		t.abort(f)
	case f.up.eof && f.down.eof && f.up.empty() && f.down.empty():
		t.end(f, unix.Close)
	default:
		err = f.up.finish()
		if err == nil {
			err = f.down.finish()
		}
		if err != nil {
			t.abort(f)
		} else if more && !f.waiting {
			f.waiting = true
			t.ready = append(t.ready, f)
		}
	}
}

func (t *streams) runReady() {
	ready := t.ready
	t.ready = nil
	for _, f := range ready {
		f.waiting = false
		if !f.ended {
			t.serve(f)
		}
	}
	if t.ready == nil {
		t.ready = ready[:0]
	}
}

func (d *direction) count(n int) {
	d.carried.Add(int64(n))
	d.bytes += int64(n)
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
func (t *streams) pump(d *direction) (more bool, err error) {
	for range pumpTurns {
		switch {
		case !d.empty():
			if !d.to.writable {
				return false, nil
			}
			err = t.drain(d)
		case d.eof || !d.from.readable:
			return false, nil
		case d.bulk:
			err = t.spliceIn(d)
		default:
			err = t.copy(d)
		}
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

// copy carries what fits into the buffer.
func (t *streams) copy(d *direction) error {
	n, err := readFrom(d.from.fd, t.buffer[:])
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
		rest, broken = t.rest(d, t.buffer[n:])
		n += rest
	default:
		d.pauseReading() // there was no more; the epoll reports when there is
	}
	m := 0
	if d.to.writable {
		flags := 0
		if d.eof {
			flags = unix.MSG_MORE // the end goes into the same packet
		}
		m, err = send(d.to.fd, t.buffer[:n], flags)
		if is(err, unix.EAGAIN) {
			m, err = 0, nil
		}
		if err != nil {
			return err
		}
		d.to.writable = m == n
		d.count(m)
	}
	if m < n {
		t.hold(d, t.buffer[m:n])
	}
	return broken
}

// rest reads on from a peer that has ended: mostly only the end is left.
func (t *streams) rest(d *direction, b []byte) (n int, err error) {
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
func (t *streams) hold(d *direction, b []byte) {
	if t.borrow(d) {
		if n, err := writeTo(d.pipe.w, b); err == nil {
			d.held = n
			b = b[n:]
		}
	}
	d.spill = append([]byte(nil), b...)
}

// borrow sees to it that a direction has a pipe, if there is one to be had.
func (t *streams) borrow(d *direction) bool {
	if !d.borrowed {
		d.pipe, d.borrowed = t.w.pipes.take()
	}
	return d.borrowed
}

func (t *streams) release(d *direction) {
	if d.borrowed {
		t.w.pipes.giveBack(d.pipe, d.held == 0)
		d.borrowed = false
	}
}

// spliceIn moves bytes into the pipe.
func (t *streams) spliceIn(d *direction) error {
	if !t.borrow(d) {
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
		t.release(d)
		return nil
	case err != nil:
		return err
	case n == 0:
		d.eof = true
		t.release(d)
		return nil
	}
	d.burst += n
	d.held = n
	return nil
}

// drain writes what is held.
func (t *streams) drain(d *direction) error {
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
		d.count(n)
	}
	if d.empty() {
		d.spill = nil
		if !d.bulk || d.eof {
			t.release(d)
		}
	}
	return err
}

// abort ends a flow so that both peers see that something was lost.
func (t *streams) abort(f *flow) {
	t.end(f, func(fd int) error { reset(fd); return nil })
}

func (t *streams) end(f *flow, shut func(fd int) error) {
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
	t.w.load.Add(-1)
	t.release(&f.up)
	t.release(&f.down)
	f.up.spill, f.down.spill = nil, nil
	t.flows.remove(f.slot)
	t.w.leave(2)
	t.w.engine.count.connections.Add(-1)
	if f.session != nil {
		f.session.Ended(f.up.bytes, f.down.bytes)
	}
}
