// Package listen accepts the connections of a server, from several addresses as from one. What is written to a
// connection goes out together.
package listen

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
)

// portTries bounds the search for a port that is free on every address.
const portTries = 20

// On listens on port at every address. Port 0 finds one that is free on
// all of them.
func On(addrs []netip.Addr, port uint16) (*Listener, error) {
	for try := 0; ; try++ {
		l, err := once(addrs, port)
		if err == nil {
			return l, nil
		}
		if port != 0 || len(addrs) == 1 || try == portTries || !errors.Is(err, syscall.EADDRINUSE) {
			return nil, err
		}
	}
}

func once(addrs []netip.Addr, port uint16) (*Listener, error) {
	m := &Listener{}
	for _, a := range addrs {
		at := netip.AddrPortFrom(a, port)
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		if err != nil {
			m.closeAll()
			return nil, listenError(at, err)
		}
		m.listeners = append(m.listeners, l)
		port = l.Addr().(*net.TCPAddr).AddrPort().Port()
	}
	return m, nil
}

func listenError(at netip.AddrPort, err error) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("cannot listen on %s: the port is taken (%w); stop the program that has it, or choose another with --secure-port",
			at, syscall.EADDRINUSE)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("cannot listen on %s: this machine does not have the address (%w); pass an address of this machine with --bind-address",
			at, syscall.EADDRNOTAVAIL)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("cannot listen on %s: ports below 1024 need root (%w); choose another with --secure-port", at, syscall.EACCES)
	}
	return fmt.Errorf("cannot listen on %s: %w", at, err)
}

// Listener accepts from several listeners as if they were one. Its
// address is that of the first. Before the first Accept, Close only closes the
// listeners.
type Listener struct {
	listeners []*net.TCPListener

	start sync.Once
	conns chan acceptResult
	done  chan struct{}
	stop  sync.Once
	wg    sync.WaitGroup
	open  sync.Map // accepted, by connKey
}

// accepted is a connection that the listener can find again.
type accepted struct {
	*gatherer
	tcp  *net.TCPConn
	from *Listener
}

// Add adds listeners, before the first Accept.
func (m *Listener) Add(more ...*net.TCPListener) { m.listeners = append(m.listeners, more...) }

// Close closes the connection.
func (c accepted) Close() error {
	c.forget()
	return c.gatherer.Close()
}

func (c accepted) forget() {
	c.from.open.CompareAndDelete(connKey(c.RemoteAddr().String(), c.LocalAddr()), c)
}

func connKey(remote string, local net.Addr) string { return remote + " " + local.String() }

// Reset ends a connection at once, whatever is still to be sent.
func (m *Listener) Reset(remote string, local net.Addr) {
	if c, ok := m.open.Load(connKey(remote, local)); ok {
		c := c.(accepted)
		c.forget()
		_ = c.tcp.SetLinger(0) // the connection is closed in any case
		c.tcp.Close()
	}
}

type acceptResult struct {
	conn *net.TCPConn
	err  error
}

// Port is the port of all listeners.
func (m *Listener) Port() uint16 { return m.listeners[0].Addr().(*net.TCPAddr).AddrPort().Port() }

// Addr returns the first address.
func (m *Listener) Addr() net.Addr { return m.listeners[0].Addr() }

// Accept returns the next connection to any of the addresses, and net.ErrClosed after Close.
func (m *Listener) Accept() (net.Conn, error) {
	m.start.Do(m.accept)
	select {
	case r := <-m.conns:
		if r.err != nil {
			return nil, r.err
		}
		c := accepted{gathered(r.conn), r.conn, m}
		m.open.Store(connKey(c.RemoteAddr().String(), c.LocalAddr()), c)
		return c, nil
	case <-m.done:
		return nil, net.ErrClosed
	}
}

// accept starts one goroutine per listener; Close ends them and waits.
func (m *Listener) accept() {
	m.conns, m.done = make(chan acceptResult), make(chan struct{})
	for _, l := range m.listeners {
		m.wg.Go(func() {
			for {
				c, err := l.AcceptTCP()
				select {
				case m.conns <- acceptResult{c, err}:
				case <-m.done:
					if err == nil {
						c.Close()
					}
					return
				}
				if errors.Is(err, net.ErrClosed) {
					return
				}
			}
		})
	}
}

// Close closes all listeners and waits for their goroutines.
func (m *Listener) Close() error {
	m.stop.Do(func() {
		m.start.Do(func() { m.conns, m.done = make(chan acceptResult), make(chan struct{}) })
		close(m.done)
		m.closeAll()
		m.wg.Wait()
	})
	return nil
}

func (m *Listener) closeAll() {
	for _, l := range m.listeners {
		l.Close()
	}
}
