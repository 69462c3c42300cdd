package proxied

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// listener is a socket at which connections are accepted.
type listener struct {
	socket *net.TCPListener
	config atomic.Pointer[config]
	gone   atomic.Bool // closed
}

// close closes the socket. What the kernel has accepted is served before, unless the next process has it.
func (s *Server) close(l *listener, kept bool) {
	l.gone.Store(true)
	if !kept {
		waiting, err := socket.AcceptAll(l.socket)
		if err != nil {
			s.log.Debug("cannot accept the last connections of a listener", "address", l.socket.Addr(), "err", err)
		}
		s.accepting.Add(1)
		s.wg.Go(func() {
			defer s.accepting.Done()
			for _, conn := range waiting {
				s.take(conn, l)
			}
		})
	}
	_ = l.socket.Close()
}

// listen makes a listener at an address have a configuration.
func (s *Server) listen(at netip.AddrPort, c *config) error {
	if l := s.listeners[at]; l != nil {
		l.config.Store(c)
		return nil
	}
	made := s.inherited[at]
	delete(s.inherited, at)
	if made == nil {
		o := socket.Options{AnyAddress: true, Shared: true, KeepAlive: true} // shared with one that drains
		lc := socket.ListenConfig(at, o)
		l, err := lc.Listen(s.ctx, "tcp", at.String())
		if err != nil {
			return fmt.Errorf("cannot listen at %s: %w", at, err)
		}
		made = l.(*net.TCPListener)
		if s.store != nil {
			if err := s.store.Keep(storedName(at), made); err != nil {
				s.log.Warn("cannot keep a listener for the next process; connections may be refused during a restart", "address", at, "err", err)
			}
		}
	}
	l := &listener{socket: made}
	l.config.Store(c)
	s.listeners[at] = l
	s.accepting.Add(1)
	s.wg.Go(func() {
		defer s.accepting.Done()
		s.accept(l)
	})
	return nil
}

// inheritTime is how long a listener of an earlier process waits for its Service to become known.
const inheritTime = 30 * time.Second

// dropInherited closes listeners of an earlier process that nobody has wanted for that long.
func (s *Server) dropInherited(after time.Duration) {
	if time.Since(s.began) < after {
		return
	}
	for at, l := range s.inherited {
		_ = l.Close()
		s.drop(at)
	}
	clear(s.inherited)
}

// drop makes the store forget a listener.
func (s *Server) drop(at netip.AddrPort) {
	if s.store == nil {
		return
	}
	if err := s.store.Drop(storedName(at)); err != nil {
		s.log.Warn("cannot take a listener back from systemd", "address", at, "err", err)
	}
}

// storedName names a listener without colons.
func storedName(at netip.AddrPort) string {
	return fmt.Sprintf("lb-%x-%d", at.Addr().AsSlice(), at.Port())
}

// Listening returns where connections are accepted.
func (s *Server) Listening() []netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Keys(s.listeners), netip.AddrPort.Compare)
}

// acceptPause is how long nothing is accepted after a failure, as of too many open files.
const acceptPause = 50 * time.Millisecond

func (s *Server) accept(l *listener) {
	for {
		conn, err := l.socket.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.log.Warn("cannot accept a connection; retrying", "address", l.socket.Addr(), "err", err)
			select {
			case <-s.ctx.Done():
				return
			case <-time.After(acceptPause):
			}
			continue
		}
		s.take(conn, l)
	}
}

// take serves a connection.
func (s *Server) take(conn net.Conn, l *listener) {
	c := l.config.Load()
	if !s.admit(conn, c) {
		_ = conn.Close()
		return
	}
	s.wg.Go(func() {
		defer func() {
			_ = conn.Close()
			s.forget(conn, c)
		}()
		defer s.panics.recover(c.service)
		s.serve(conn.(*net.TCPConn), l, c)
	})
}
