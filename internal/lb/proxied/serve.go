package proxied

import (
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"slices"
	"time"
)

// How long a client has for what it must send first, and a Pod to accept a connection.
const (
	greetingTimeout = 10 * time.Second
	dialTimeout     = 5 * time.Second
	// maxDials bounds how many Pods are tried for one connection.
	maxDials = 3
)

// serve handles a connection to its end, or until it must be parked. The caller closes it.
func (s *Server) serve(socket *net.TCPConn, l *listener, c *config) parked {
	began := time.Now()
	var conn stream = socket
	if c.spec.BandwidthMbps > 0 {
		conn = &limitedConn{TCPConn: socket, limit: &c.usage.bandwidth, ended: s.ctx.Done()}
	}
	peer := addrPort(conn.RemoteAddr())
	_ = conn.SetDeadline(time.Now().Add(greetingTimeout))
	client, at := peer, addrPort(conn.LocalAddr())
	if contains(c.spec.TrustedFronts, peer.Addr()) {
		from, to, is, err := readHeader(conn)
		if err != nil {
			s.log.Debug("closed a connection of a trusted front", "service", c.service, "peer", peer, "err", err)
			return nil
		}
		if is {
			client, at = from, to
		}
	}
	// The ranges are for clients: behind a trusted front, for the clients that it names.
	if !c.admits(client.Addr()) {
		return nil
	}
	if c.protocol.IsHTTP() {
		return s.web.serve(conn, l, c, client, at)
	}
	front, protocol := conn, ""
	line := entry{client: client, during: -1, after: -1}
	defer func() { c.record(line) }()
	if c.tls != nil {
		t := tls.Server(conn, c.tls)
		if err := t.HandshakeContext(s.ctx); err != nil {
			s.log.Debug("no TLS with a client", "service", c.service, "client", client, "err", err)
			return nil
		}
		if t.ConnectionState().NegotiatedProtocol == acmeProtocol { // an authority has seen what it wanted
			return nil
		}
		front, protocol = t, t.ConnectionState().NegotiatedProtocol
		line.tls(t.ConnectionState())
	}
	m, pod, k := s.connect(socket, c, client, at, protocol)
	if pod == nil {
		line.before = -1
		return nil
	}
	line.pod, line.before = m.addr, time.Since(began)
	defer pod.Close()
	defer c.pool.remove(m, k)
	back := pod
	_ = conn.SetDeadline(time.Time{})
	line.sent, line.received = s.join(c.service, front, back, c.spec.IdleTimeout.Std())
	return nil
}

// connect returns a connection to a Pod that is ready for the bytes of the client at a socket, nil if there is none.
// The Pod's pool has it as a link.
func (s *Server) connect(socket net.Conn, c *config, client, at netip.AddrPort, protocol string) (*member, stream, *link) {
	var tried []*member
	for len(tried) < maxDials {
		m, err := c.pool.pick(client.Addr(), tried)
		if err != nil {
			s.log.Debug("closed a connection", "service", c.service, "client", client, "err", err)
			return nil, nil, nil
		}
		pod, err := s.dial(c, m, client, at, protocol)
		if err == nil {
			k := &link{func() {
				_ = socket.Close()
				closeNow(pod)
			}}
			if c.pool.add(m, k) {
				return m, pod, k
			}
			_ = pod.Close() // the Pod has just left, and is not picked again
			continue
		}
		tried = append(tried, m)
		s.log.Debug("cannot connect to an endpoint; trying another one", "service", c.service, "endpoint", m.addr, "err", err)
	}
	return nil, nil, nil
}

// dial connects to a Pod, and sends what comes before the client's bytes. protocol is what was agreed on
// with the client by ALPN, empty if nothing was.
func (s *Server) dial(c *config, m *member, client, at netip.AddrPort, protocol string) (stream, error) {
	ctx, cancel := context.WithTimeout(s.ctx, dialTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", m.addr.String())
	if err != nil {
		return nil, err
	}
	if v := c.spec.ProxyProtocol; v != 0 {
		_ = conn.SetWriteDeadline(time.Now().Add(dialTimeout))
		if _, err := conn.Write(header(v, client, at)); err != nil {
			_ = conn.Close()
			return nil, err
		}
	}
	if !c.backend.IsTLS() {
		return conn.(*net.TCPConn), nil
	}
	var protocols []string
	if protocol != "" {
		protocols = []string{protocol}
	}
	t := tls.Client(conn, c.pods.config(protocols...))
	if err := t.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return t, nil
}

func addrPort(a net.Addr) netip.AddrPort {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	p := t.AddrPort()
	return netip.AddrPortFrom(p.Addr().Unmap().WithZone(""), p.Port())
}

func contains(list []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}
