package apiserver

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

// listen listens on port at every address. Port 0 finds one that is free on
// all of them.
func listen(addrs []netip.Addr, port uint16) (*multiListener, error) {
	for try := 0; ; try++ {
		l, err := listenOnce(addrs, port)
		if err == nil {
			return l, nil
		}
		if port != 0 || len(addrs) == 1 || try == portTries || !errors.Is(err, syscall.EADDRINUSE) {
			return nil, err
		}
	}
}

func listenOnce(addrs []netip.Addr, port uint16) (*multiListener, error) {
	m := &multiListener{}
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
		return fmt.Errorf("cannot listen on %s: this machine does not have the address (%w); give one of its own with --bind-address",
			at, syscall.EADDRNOTAVAIL)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("cannot listen on %s: ports below 1024 need root (%w); choose another with --secure-port", at, syscall.EACCES)
	}
	return fmt.Errorf("cannot listen on %s: %w", at, err)
}

// multiListener accepts from several listeners as if they were one. Its
// address is that of the first. Before the first Accept, Close only closes the
// listeners.
type multiListener struct {
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
	from *multiListener
}

// Close closes the connection.
func (c accepted) Close() error {
	c.forget()
	return c.gatherer.Close()
}

func (c accepted) forget() {
	c.from.open.CompareAndDelete(connKey(c.RemoteAddr().String(), c.LocalAddr()), c)
}

func connKey(remote string, local net.Addr) string { return remote + " " + local.String() }

// reset ends a connection at once, whatever is still to be sent.
func (m *multiListener) reset(remote string, local net.Addr) {
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
func (m *multiListener) Port() uint16 { return m.listeners[0].Addr().(*net.TCPAddr).AddrPort().Port() }

func (m *multiListener) Addr() net.Addr { return m.listeners[0].Addr() }

func (m *multiListener) Accept() (net.Conn, error) {
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
func (m *multiListener) accept() {
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

func (m *multiListener) Close() error {
	m.stop.Do(func() {
		m.start.Do(func() { m.conns, m.done = make(chan acceptResult), make(chan struct{}) })
		close(m.done)
		m.closeAll()
		m.wg.Wait()
	})
	return nil
}

func (m *multiListener) closeAll() {
	for _, l := range m.listeners {
		l.Close()
	}
}
