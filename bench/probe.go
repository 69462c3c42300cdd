package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// serveBackends answers on every endpoint's address: one connection is told
// the address it has reached, and closed.
func serveBackends(h *host) error {
	var l net.Listener
	err := h.on(func() (err error) {
		l, err = net.Listen("tcp4", fmt.Sprintf(":%d", backendPort))
		return err
	})
	if err != nil {
		return fmt.Errorf("serve the endpoints: %w", err)
	}
	go func() { _ = answer(l) }()
	return nil
}

// flood asks an endpoint to send what it can, until the client ends it.
const flood = 'F'

func readOne(c net.Conn, b []byte) bool {
	n, err := c.Read(b)
	return n == 1 && err == nil
}

// answer tells each connection the address it has reached.
func answer(l net.Listener) error {
	return serveEach(l, func(c net.Conn) {
		_ = c.SetDeadline(time.Now().Add(time.Second))
		host, _, _ := net.SplitHostPort(c.LocalAddr().String())
		_, err := io.WriteString(c, host)
		// The client ends it, without TIME_WAIT, or asks for more.
		if word := make([]byte, 1); readOne(c, word) && word[0] == flood {
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			for block := make([]byte, 256<<10); err == nil; {
				_, err = c.Write(block)
			}
		}
	})
}

// serveEach has f serve each connection in a goroutine, and closes it then. It returns the error of the listener.
func serveEach(l net.Listener, f func(net.Conn)) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			f(c)
		}()
	}
}

// tryTimeout bounds one try of a connection. A try whose first packet is lost
// would otherwise wait for its repetition, a second later.
const tryTimeout = 25 * time.Millisecond

// ask opens one TCP connection from the calling thread's namespace and returns
// the address that answers. It uses plain blocking system calls: in a process
// that waits for microseconds, the runtime's poller would be measured as well.
func ask(to netip.AddrPort) (netip.Addr, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return netip.Addr{}, err
	}
	defer unix.Close(fd)
	tv := unix.NsecToTimeval(tryTimeout.Nanoseconds())
	for _, opt := range []int{unix.SO_SNDTIMEO, unix.SO_RCVTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, opt, &tv); err != nil {
			return netip.Addr{}, err
		}
	}
	// The close resets the connection: its port is free again at once.
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return netip.Addr{}, err
	}
	if err := retryEINTR(func() error {
		return unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
	}); err != nil {
		return netip.Addr{}, err
	}
	buf := make([]byte, 64)
	n := 0
	if err := retryEINTR(func() (err error) { n, err = unix.Read(fd, buf); return err }); err != nil {
		return netip.Addr{}, err
	}
	return netip.ParseAddr(string(buf[:n]))
}

// retryEINTR repeats a system call that a signal of the runtime has broken off.
func retryEINTR(f func() error) error {
	for range 100 {
		err := f()
		if errors.Is(err, unix.EISCONN) {
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	return unix.EINTR
}

// until asks to again and again, every pause, until good says yes to an answer,
// and returns the time of that answer. It runs on the calling thread.
func until(ctx context.Context, to netip.AddrPort, pause time.Duration, good func(netip.Addr) bool) (time.Time, error) {
	var last error
	for ctx.Err() == nil {
		a, err := ask(to)
		switch {
		case err != nil:
			last = err
		case good(a):
			return time.Now(), nil
		default:
			last = fmt.Errorf("answered by %s", a)
		}
		time.Sleep(pause)
	}
	return time.Time{}, fmt.Errorf("%s: %w (last try: %v)", to, ctx.Err(), last)
}

// backend answers as the one endpoint of a Pod, until it is ended: over UDP with what it
// was sent.
func backend() error {
	c, err := net.ListenPacket("udp", fmt.Sprintf(":%d", backendPort))
	if err != nil {
		return err
	}
	go func() {
		buf := make([]byte, 64)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(buf[:n], from)
		}
	}()
	l, err := net.Listen("tcp", fmt.Sprintf(":%d", backendPort))
	if err != nil {
		return err
	}
	return answer(l)
}
