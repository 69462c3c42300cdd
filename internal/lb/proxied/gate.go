package proxied

import (
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/kernel/relay"
	"github.com/fairlead/fairlead/internal/lb/proxied/accesslog"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/proxyproto"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
)

// relays reports whether nothing is done with the bytes of a connection, so that the relay's threads can carry it.
func (c *Config) relays() bool {
	return c.Protocol == dialect.TCP && !c.Backend.IsTLS() && c.Spec.BandwidthMbps == 0 && len(c.Spec.TrustedFronts) == 0
}

// podKeepAlive is how often the peer of a silent connection to a Pod is probed, as by package net.
const podKeepAlive = 15 * time.Second

// gate is the relay.Gate of a listener.
type gate struct {
	server   *Server
	listener *Listener
}

// Accept begins a connection of a client.
func (g *gate) Accept(conn *relay.Conn, client netip.AddrPort) (relay.Session, time.Duration) {
	c := g.listener.relays.Load()
	defer g.server.panics.Recover(c.Service) // the relay's threads have other connections
	to, route := c.target()
	if to == nil {
		return nil, 0
	}
	if !c.Admits(client.Addr()) {
		c.usage.traffic.Rejected(traffic.OutOfRange)
		return nil, 0
	}
	if !g.server.admission.admit(conn, c) {
		return nil, 0
	}
	if !g.server.admission.enter(conn, c, client.Addr()) {
		g.server.admission.forget(conn, c)
		return nil, 0
	}
	r := &relayed{server: g.server, config: c, pool: to.Pool, route: route, conn: conn, client: client, at: g.listener.at, began: time.Now()}
	return r, c.Spec.IdleTimeout.Std()
}

// relayed is a connection that the relay carries: a relay.Session.
type relayed struct {
	server     *Server
	config     *Config
	pool       *pods.Pool
	route      *traffic.Route // may be nil
	conn       *relay.Conn
	client, at netip.AddrPort
	began      time.Time
	before     time.Duration // until a Pod had it

	tried  []*pods.Member
	member *pods.Member // the one picked last
	link   *pods.Link   // nil without a Pod
}

// Pick chooses a Pod.
func (r *relayed) Pick() netip.AddrPort {
	defer r.server.panics.Recover(r.config.Service)
	if len(r.tried) == pods.MaxDials {
		return netip.AddrPort{}
	}
	m, err := r.pool.Pick(r.client.Addr(), r.tried)
	if err != nil {
		r.server.log.Debug("closed a connection", "service", r.config.Service, "client", r.client, "err", err)
		return netip.AddrPort{}
	}
	if len(r.tried) > 0 {
		r.config.usage.traffic.Retried()
		r.member.Traffic().Retried()
	}
	r.member = m
	return m.Addr()
}

// Failed has another Pod be picked.
func (r *relayed) Failed(err error) {
	r.tried = append(r.tried, r.member)
	r.pool.Failed(r.member, err)
	r.server.log.Debug("cannot connect to an endpoint; trying another one",
		"service", r.config.Service, "endpoint", r.member.Addr(), "err", err)
}

// Answered gives the connection to the Pod, unless that has left.
func (r *relayed) Answered() (first []byte, ok bool) {
	defer r.server.panics.Recover(r.config.Service, r.conn)
	k := &pods.Link{Close: func() { _ = r.conn.Close() }}
	if !r.pool.Add(r.member, k) {
		return nil, false
	}
	r.pool.Reached(r.member)
	r.route.Opened()
	r.link, r.before = k, time.Since(r.began)
	if v := r.config.Spec.ProxyProtocol; v != 0 {
		first = proxyproto.Header(v, r.client, r.at)
	}
	return first, true
}

// Ended gives back what the connection has, and writes its line.
func (r *relayed) Ended(toPod, toClient int64) {
	c := r.config
	defer r.server.panics.Recover(c.Service)
	line := accesslog.Entry{Client: r.client, Before: -1, During: -1, After: -1}
	if r.link != nil {
		r.pool.Remove(r.member, r.link)
		line.Pod, line.Before, line.Received, line.Sent = r.member.Addr(), r.before, toPod, toClient
		c.usage.traffic.Carried(toPod, toClient)
		r.pool.Carried(r.member, toPod, toClient)
	}
	if c.logs != nil {
		r.server.wg.Go(func() { // a disk may be slow
			defer r.server.panics.Recover(c.Service)
			defer r.server.admission.forget(r.conn, c)
			c.Record(line)
		})
		return
	}
	r.server.admission.forget(r.conn, c)
}

// relay has the relay accept the connections of a listener. The caller holds mu.
func (s *Server) relay(l *Listener, c *Config) error {
	l.relays.Store(c)
	if l.relay != nil {
		return nil
	}
	if s.engine == nil {
		var err error
		// Of the four files for each connection that is admitted two are its own, one is for a pipe, and one for all else.
		config := relay.Config{ConnectTimeout: pods.DialTimeout, KeepAlive: podKeepAlive, MaxFiles: max(3*s.admission.most, 8)}
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
func (s *Server) unrelay(l *Listener) error {
	socket, err := l.relay.Socket()
	if err != nil {
		return err
	}
	l.relay.Release()
	l.relay, l.socket = nil, socket
	s.serveAt(l)
	return nil
}
