package proxied

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/relay"
	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// Listener is a socket at which connections are accepted: by a goroutine, which has one for each, or by the relay.
type Listener struct {
	at     netip.AddrPort
	bound  netip.AddrPort   // of the socket: at, or inside
	socket *net.TCPListener // nil if the relay has it
	relay  *relay.Listener  // nil if it does not
	config atomic.Pointer[Config]
	relays atomic.Pointer[Config] // the last one for the relay
	gone   atomic.Bool            // closed
	kept   bool                   // by the store, for the next process
}

// Config returns what counts for a new connection, and for the next request of a kept one.
func (l *Listener) Config() *Config { return l.config.Load() }

// Gone reports whether it is closed: its connections end with their requests.
func (l *Listener) Gone() bool { return l.gone.Load() }

// close closes the socket. Connections that the kernel has accepted are served, unless they wait for the next process.
// The caller holds mu.
func (s *Server) close(l *Listener, waits bool) {
	l.gone.Store(true)
	if r := l.relay; r != nil {
		if waits {
			r.Release()
		} else {
			r.Close()
		}
		r.Wait()
		return
	}
	if !waits {
		waiting, err := socket.AcceptAll(l.socket)
		if err != nil {
			s.log.Debug("cannot accept the last connections of a listener", "address", l.at, "err", err)
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

// listen gives the listener at an address a configuration. The caller holds mu.
func (s *Server) listen(at netip.AddrPort, c *Config) error {
	l := s.listeners[at]
	came := l == nil
	if came {
		made, kept, err := s.socketAt(at, c.clusterIP)
		if err != nil {
			return fmt.Errorf("port %d is not served: cannot listen at %s, TCP: %w", at.Port(), at, err)
		}
		l = &Listener{at: at, bound: addrPort(made.Addr()), socket: made, kept: kept}
		s.listeners[at] = l
	}
	l.config.Store(c)
	switch {
	case c.relays():
		return s.relay(l, c)
	case l.relay != nil:
		return s.unrelay(l)
	case came:
		s.serveAt(l)
	}
	return nil
}

// socketAt returns a socket at an address, that of an earlier process if there is one, and whether the store keeps it. The
// caller holds mu.
func (s *Server) socketAt(at netip.AddrPort, clusterIP bool) (made *net.TCPListener, kept bool, err error) {
	if inherited := s.inherited[at]; inherited != nil {
		delete(s.inherited, at)
		return inherited, true, nil
	}
	if made, err = s.insides.listenTCP(s.ctx, at); err != nil {
		return nil, false, err
	}
	if s.store != nil {
		err := s.store.Keep(storedName(at, clusterIP), made)
		if kept = err == nil; err != nil {
			s.log.Warn("cannot keep a listener for the next process; connections may be refused during a restart", "address", at, "err", err)
		}
	}
	return made, kept, nil
}

// serveAt has a goroutine accept connections.
func (s *Server) serveAt(l *Listener) {
	from := l.socket
	s.accepting.Add(1)
	s.wg.Go(func() {
		defer s.accepting.Done()
		s.accept(l, from)
	})
}

// inheritTime is how long a listener of an earlier process waits for its Service to become known.
const inheritTime = 30 * time.Second

// dropInherited closes listeners of an earlier process that no Service has asked for since. The caller holds mu.
func (s *Server) dropInherited(after time.Duration) {
	if time.Since(s.began) < after {
		return
	}
	for at, l := range s.inherited {
		s.drop(inheritedDoor(s.store, at, l))
		_ = l.Close()
	}
	clear(s.inherited)
}

// drop makes the store forget a listener.
func (s *Server) drop(d Door) {
	if s.store == nil {
		return
	}
	if err := s.store.Drop(storedName(d.At, d.ClusterIP)); err != nil {
		s.log.Warn("cannot remove a listener from systemd's store", "address", d.At, "err", err)
	}
}

// acceptPause is how long nothing is accepted after a failure, as of too many open files.
const acceptPause = 50 * time.Millisecond

func (s *Server) accept(l *Listener, from *net.TCPListener) {
	for {
		conn, err := from.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.log.Warn("cannot accept a connection; retrying", "address", l.at, "err", err)
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
func (s *Server) take(conn net.Conn, l *Listener) {
	c := l.config.Load()
	if !s.admission.admit(conn, c) {
		_ = conn.Close()
		return
	}
	tcp := conn.(*net.TCPConn)
	s.workers.run(func() { s.hold(tcp, c, func() Parked { return s.serve(tcp, l, c) }) })
}

// hold serves a connection until it ends, or is parked: then another goroutine goes on when there is something to be read.
func (s *Server) hold(conn *net.TCPConn, c *Config, serve func() Parked) {
	var p Parked
	end := func() {
		_ = conn.Close()
		s.admission.forget(conn, c)
	}
	defer func() {
		if p == nil || !s.web.Park(conn, p, func(readable bool) {
			if !readable {
				end()
				return
			}
			s.workers.run(func() { s.hold(conn, c, p.Resume) })
		}) {
			end()
		}
	}()
	defer s.panics.Recover(c.Service)
	p = serve()
}
