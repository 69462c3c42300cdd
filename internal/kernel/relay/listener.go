package relay

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// Listener takes connections or datagrams for a Target on one port of all
// addresses of one family.
type Listener struct {
	Protocol svc.Protocol
	Family   svc.Family
	Port     uint16

	engine *Engine
	target Target // nil with a gate
	gate   Gate
	id     int32
	fd     int
	users  []*worker     // that have fd in their epoll
	left   atomic.Int32  // of those, the ones that have not let go of it
	done   chan struct{} // closed when none has it any more
}

// ErrPortTaken is the error of Listen for a port that another socket has.
var ErrPortTaken = unix.EADDRINUSE

// backlog is how many connections may wait to be accepted; the kernel bounds it
// by net.core.somaxconn.
const backlog = 4096

// Listen opens a listener in the network namespace of the caller. Port 0 lets
// the kernel choose one at random.
func (e *Engine) Listen(p svc.Protocol, f svc.Family, port uint16, t Target) (*Listener, error) {
	fd, port, err := listen(p, f, port)
	if err != nil {
		return nil, fmt.Errorf("listen on %s port %d, %s: %w", p, port, f, err)
	}
	l := &Listener{Protocol: p, Family: f, Port: port, engine: e, target: t, fd: fd}
	if err := e.open(l); err != nil {
		return nil, err
	}
	return l, nil
}

// open has the threads listen. It closes the socket if it fails.
func (e *Engine) open(l *Listener) error {
	l.done = make(chan struct{})
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		_ = unix.Close(l.fd)
		return os.ErrClosed
	}
	l.id = e.nextID
	e.nextID++
	if l.Protocol == svc.TCP {
		l.users = e.workers
	} else {
		l.users = []*worker{e.workers[e.turn%len(e.workers)]}
		e.turn++
	}
	l.left.Store(int32(len(l.users)))
	e.opened[l] = true
	for _, w := range l.users {
		w.do(func() { w.addListener(l) })
	}
	return nil
}

// Close accepts what has already connected, and nothing more. Connections that
// are open go on; UDP clients have to find another way.
func (l *Listener) Close() { l.close((*worker).acceptLast) }

// Release is Close for a socket that is open elsewhere, too: what has connected is left for that.
func (l *Listener) Release() { l.close(func(*worker, *Listener) {}) }

// Wait waits until the threads have done what Close or Release asks for, which those do not.
func (l *Listener) Wait() { <-l.done }

func (l *Listener) close(last func(*worker, *Listener)) {
	l.engine.mu.Lock()
	known := l.engine.opened[l]
	delete(l.engine.opened, l)
	l.engine.mu.Unlock()
	if !known {
		return
	}
	for _, w := range l.users {
		w.do(func() {
			w.unlisten(l)
			last(w, l)
			delete(w.listeners, l.id)
			if l.left.Add(-1) == 0 {
				_ = unix.Close(l.fd)
				close(l.done)
			}
		})
	}
}

func listen(p svc.Protocol, f svc.Family, port uint16) (fd int, got uint16, err error) {
	kind := unix.SOCK_STREAM
	if p == svc.UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err = unix.Socket(domain(f), kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, port, os.NewSyscallError("socket", err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	on := func(level, opt int) { err = errors.Join(err, unix.SetsockoptInt(fd, level, opt, 1)) }
	var any unix.Sockaddr = &unix.SockaddrInet4{Port: int(port)}
	if f == svc.IPv6 {
		any = &unix.SockaddrInet6{Port: int(port)}
		on(unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
	}
	switch {
	case p == svc.TCP:
		// Accepted connections inherit these.
		on(unix.IPPROTO_TCP, unix.TCP_NODELAY)
		on(unix.SOL_SOCKET, unix.SO_KEEPALIVE)
		on(unix.SOL_SOCKET, unix.SO_REUSEADDR)
	case f == svc.IPv6:
		on(unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO)
	default:
		on(unix.IPPROTO_IP, unix.IP_PKTINFO)
	}
	if err != nil {
		return -1, port, err
	}
	if err = unix.Bind(fd, any); err != nil {
		return -1, port, err
	}
	if p == svc.TCP {
		if err = unix.Listen(fd, backlog); err != nil {
			return -1, port, err
		}
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		return -1, port, err
	}
	return fd, addrPort(name).Port(), nil
}
