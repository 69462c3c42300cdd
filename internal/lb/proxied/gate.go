package proxied

import (
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/kernel/relay"
)

// relays reports whether nothing is done with the bytes of a connection, so that the relay's threads can carry it.
func (c *config) relays() bool {
	return c.protocol == dialect.TCP && !c.backend.IsTLS() && c.spec.BandwidthMbps == 0 && len(c.spec.TrustedFronts) == 0
}

// podKeepAlive is how often the peer of a silent connection to a Pod is probed, as by package net.
const podKeepAlive = 15 * time.Second

// gate is the relay.Gate of a listener.
type gate struct {
	server   *Server
	listener *listener
}

// Accept begins a connection of a client.
func (g *gate) Accept(conn *relay.Conn, client netip.AddrPort) (relay.Session, time.Duration) {
	c := g.listener.relays.Load()
	defer g.server.panics.recover(c.service) // the relay's threads have other connections
	if !c.admits(client.Addr()) || !g.server.admit(conn, c) {
		return nil, 0
	}
	r := &relayed{server: g.server, config: c, conn: conn, client: client, at: g.listener.at, began: time.Now()}
	return r, c.spec.IdleTimeout.Std()
}

// relayed is a connection that the relay carries: a relay.Session.
type relayed struct {
	server     *Server
	config     *config
	conn       *relay.Conn
	client, at netip.AddrPort
	began      time.Time
	before     time.Duration // until a Pod had it

	tried  []*member
	member *member // the one picked last
	link   *link   // nil without a Pod
}

// Pick chooses a Pod.
func (r *relayed) Pick() netip.AddrPort {
	defer r.server.panics.recover(r.config.service)
	if len(r.tried) == maxDials {
		return netip.AddrPort{}
	}
	m, err := r.config.pool.pick(r.client.Addr(), r.tried)
	if err != nil {
		r.server.log.Debug("closed a connection", "service", r.config.service, "client", r.client, "err", err)
		return netip.AddrPort{}
	}
	r.member = m
	return m.addr
}

// Failed has another Pod be picked.
func (r *relayed) Failed(err error) {
	r.tried = append(r.tried, r.member)
	r.server.log.Debug("cannot connect to an endpoint; trying another one", "service", r.config.service, "endpoint", r.member.addr, "err", err)
}

// Answered gives the connection to the Pod, unless that has left.
func (r *relayed) Answered() (first []byte, ok bool) {
	defer r.server.panics.recover(r.config.service, r.conn)
	k := &link{func() { _ = r.conn.Close() }}
	if !r.config.pool.add(r.member, k) {
		return nil, false
	}
	r.link, r.before = k, time.Since(r.began)
	if v := r.config.spec.ProxyProtocol; v != 0 {
		first = header(v, r.client, r.at)
	}
	return first, true
}

// Ended gives back what the connection has, and writes its line.
func (r *relayed) Ended(toPod, toClient int64) {
	c := r.config
	defer r.server.panics.recover(c.service)
	line := entry{client: r.client, before: -1, during: -1, after: -1}
	if r.link != nil {
		c.pool.remove(r.member, r.link)
		line.pod, line.before, line.received, line.sent = r.member.addr, r.before, toPod, toClient
	}
	if c.logs != nil {
		r.server.wg.Go(func() { // a disk may be slow
			defer r.server.panics.recover(c.service)
			defer r.server.forget(r.conn, c)
			c.record(line)
		})
		return
	}
	r.server.forget(r.conn, c)
}

// relay has the relay accept the connections of a listener. The caller holds mu.
func (s *Server) relay(l *listener, c *config) error {
	l.relays.Store(c)
	if l.relay != nil {
		return nil
	}
	if s.engine == nil {
		var err error
		// Of the four files for each connection that is admitted two are its own, one is for a pipe, and one for all else.
		config := relay.Config{ConnectTimeout: dialTimeout, KeepAlive: podKeepAlive, MaxFiles: max(3*s.most, 8)}
		if s.engine, err = relay.Start(config); err != nil {
			return err
		}
	}
	made, err := s.engine.Serve(l.socket, &gate{s, l})
	if err != nil {
		return err
	}
	_ = l.socket.Close() // ends accept
	l.relay, l.socket = made, nil
	return nil
}

// unrelay has goroutines serve the connections of a listener again. The caller holds mu.
func (s *Server) unrelay(l *listener) error {
	socket, err := l.relay.Socket()
	if err != nil {
		return err
	}
	l.relay.Release()
	l.relay, l.socket = nil, socket
	s.serveAt(l)
	return nil
}
