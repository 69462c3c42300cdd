package relay

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/svc"
)

// Gate decides about each connection of a Listener by itself, where a Target only chooses endpoints. The Engine's
// threads call Accept, several at once; it does not block.
type Gate interface {
	// Accept decides about a client's connection, and returns for how long it may carry nothing (0: forever).
	// One without a Session is closed.
	Accept(c *Conn, client netip.AddrPort) (s Session, idle time.Duration)
}

// Session is a connection of a Gate. One thread calls its methods, which do not block.
type Session interface {
	// Pick chooses the endpoint to connect to, also after Failed. The invalid address gives up, and the client's
	// connection is closed.
	Pick() netip.AddrPort
	// Failed reports why the endpoint of the last Pick does not answer.
	Failed(err error)
	// Answered reports that it does. It returns what the endpoint is sent before the client's bytes; without ok
	// another endpoint is picked.
	Answered() (first []byte, ok bool)
	// Ended reports the end of the connection, and how many bytes were passed on.
	Ended(toEndpoint, toClient int64)
}

// Conn is a connection of a Gate.
type Conn struct {
	worker *worker
	flow   *flow
}

// Close ends the connection soon. Any goroutine may call it, at any time.
func (c *Conn) Close() error {
	c.worker.do(func() { c.worker.tcp.end(c.flow, unix.Close) })
	return nil
}

// Serve has a Gate decide about the connections that come to a socket, which the Engine has from then on beside the
// caller: that may close its own, and else accepts connections, too.
func (e *Engine) Serve(s *net.TCPListener, g Gate) (*Listener, error) {
	raw, err := s.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd := -1
	var failed error
	err = raw.Control(func(own uintptr) {
		if fd, failed = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0); failed == nil {
			failed = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) // connections inherit it
		}
	})
	if err = errors.Join(err, failed); err != nil {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		return nil, fmt.Errorf("relay: the socket of %s: %w", s.Addr(), err)
	}
	at := s.Addr().(*net.TCPAddr).AddrPort()
	l := &Listener{Protocol: svc.TCP, Family: svc.FamilyOf(at.Addr().Unmap()), Port: at.Port(), engine: e, gate: g, fd: fd}
	return l, e.open(l)
}

// Socket returns a socket at which the same connections arrive.
func (l *Listener) Socket() (*net.TCPListener, error) {
	fd, err := unix.FcntlInt(uintptr(l.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("relay: %w", os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err))
	}
	f := os.NewFile(uintptr(fd), "listener")
	made, err := net.FileListener(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	return made.(*net.TCPListener), nil
}

// answered begins to carry bytes, or leaves the endpoint for another one.
func (k *connector) answered(f *flow) {
	if f.session == nil {
		f.listener.target.Answered(f.endpoint)
	} else {
		first, ok := f.session.Answered()
		if !ok {
			k.leaveEndpoint(f)
			k.countAttempt(f)
			k.connect(f)
			return
		}
		f.up.spill, f.up.bytes = first, -int64(len(first))
		f.bound()
	}
	f.open, f.last = true, k.w.now
	k.w.tcp.serve(f)
}

// bound has the kernel end a connection whose endpoint acknowledges nothing for as long as it may be idle: a client that goes on sending
// would hold it for 15 minutes.
func (f *flow) bound() {
	if ms := int(socket.UserTimeoutOf(f.idle).Milliseconds()); ms > 0 {
		_ = unix.SetsockoptInt(f.server.fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, ms) // without it the kernel has its own bound
	}
}

// expireIdle ends connections of Gates that have carried nothing for too long; it may be a quarter more.
func (t *streams) expireIdle() {
	if t.nextIdle.IsZero() || t.w.now.Before(t.nextIdle) {
		return
	}
	t.nextIdle = time.Time{}
	for _, f := range t.flows.all {
		switch {
		case f == nil || f.idle <= 0:
		case f.open && t.w.now.Sub(f.last) >= f.idle:
			t.end(f, unix.Close)
		default:
			t.lookIdle(f.idle)
		}
	}
}

// lookIdle has expireIdle run within a quarter of the time that a connection may be idle.
func (t *streams) lookIdle(idle time.Duration) {
	if next := t.w.now.Add(max(idle/4, time.Millisecond)); idle > 0 && (t.nextIdle.IsZero() || next.Before(t.nextIdle)) {
		t.nextIdle = next
	}
}
