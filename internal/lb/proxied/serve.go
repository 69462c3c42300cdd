package proxied

import (
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/proxied/accesslog"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/proxyproto"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
)

// greetingTimeout is how long a client has for what it must send first.
const greetingTimeout = 10 * time.Second

// serve handles a connection to its end, or until it must be parked. The caller closes it.
func (s *Server) serve(socket *net.TCPConn, l *Listener, c *Config) Parked {
	began := time.Now()
	var conn stream.Conn = socket
	if c.Spec.BandwidthMbps > 0 {
		conn = stream.NewLimited(socket, &c.usage.bandwidth, s.ctx.Done())
	}
	peer := addrPort(conn.RemoteAddr())
	_ = conn.SetDeadline(time.Now().Add(greetingTimeout))
	client, at := peer, addrPort(conn.LocalAddr())
	if contains(c.Spec.TrustedFronts, peer.Addr()) {
		from, to, is, err := proxyproto.Read(conn)
		if err != nil {
			s.log.Debug("closed a connection of a trusted front", "service", c.Service, "peer", peer, "err", err)
			return nil
		}
		if is {
			client, at = from, to
		}
	}
	// The ranges are for clients: behind a trusted front, for the clients that it names.
	if !c.Admits(client.Addr()) {
		c.usage.traffic.Rejected(traffic.OutOfRange)
		return nil
	}
	if !s.admission.enter(socket, c, client.Addr()) {
		return nil
	}
	if c.streams != nil && c.Protocol.IsTLS() {
		return serveNamed(s, socket, conn, l, c, client, at)
	}
	if c.Protocol.IsHTTP() {
		return s.web.Serve(conn, l, c, client, at)
	}
	front, protocol := conn, ""
	line := accesslog.Entry{Client: client, During: -1, After: -1}
	defer func() { c.Record(line) }()
	if c.TLS != nil {
		t := tls.Server(conn, c.TLS)
		if err := t.HandshakeContext(s.ctx); err != nil {
			c.NoTLS(err)
			s.log.Debug("no TLS with a client", "service", c.Service, "client", client, "err", err)
			return nil
		}
		if t.ConnectionState().NegotiatedProtocol == ACMEProtocol { // an authority has seen what it wanted
			return nil
		}
		front, protocol = t, t.ConnectionState().NegotiatedProtocol
		line.TLS(t.ConnectionState())
	}
	to, route := c.target()
	if to == nil {
		line.Before = -1
		return nil
	}
	m, pod, k := s.connect(socket, to, client, at, protocol)
	if pod == nil {
		line.Before = -1
		return nil
	}
	route.Opened()
	line.Pod, line.Before = m.Addr(), time.Since(began)
	defer pod.Close()
	defer to.Pool.Remove(m, k)
	back := pod
	_ = conn.SetDeadline(time.Time{})
	line.Sent, line.Received = stream.Join(s.panics, c.Service, front, back, c.Spec.IdleTimeout.Std())
	c.usage.traffic.Carried(line.Received, line.Sent)
	to.Pool.Carried(m, line.Received, line.Sent)
	return nil
}

// connect returns a connection to a Pod that is ready for the bytes of the client at a socket, nil if there is none.
// The Pod's pool has it as a link.
func (s *Server) connect(socket net.Conn, c *Config, client, at netip.AddrPort, protocol string) (*pods.Member, stream.Conn, *pods.Link) {
	var tried []*pods.Member
	for len(tried) < pods.MaxDials {
		m, err := c.Pool.Pick(client.Addr(), tried)
		if err != nil {
			s.log.Debug("closed a connection", "service", c.Service, "client", client, "err", err)
			return nil, nil, nil
		}
		if n := len(tried); n > 0 {
			c.usage.traffic.Retried()
			tried[n-1].Traffic().Retried()
		}
		pod, err := s.dial(c, m, client, at, protocol)
		if err == nil {
			c.Pool.Reached(m)
			k := &pods.Link{Close: func() {
				_ = socket.Close()
				stream.CloseNow(pod)
			}}
			if c.Pool.Add(m, k) {
				return m, pod, k
			}
			_ = pod.Close() // the Pod has just left, and is not picked again
			continue
		}
		tried = append(tried, m)
		c.Pool.Failed(m, err)
		s.log.Debug("cannot connect to an endpoint; trying another one", "service", c.Service, "endpoint", m.Addr(), "err", err)
	}
	return nil, nil, nil
}

// dial connects to a Pod, and sends what comes before the client's bytes. protocol is what was agreed on
// with the client by ALPN, empty if nothing was.
func (s *Server) dial(c *Config, m *pods.Member, client, at netip.AddrPort, protocol string) (stream.Conn, error) {
	ctx, cancel := context.WithTimeout(s.ctx, pods.DialTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", m.Addr().String())
	if err != nil {
		return nil, err
	}
	_ = socket.SetUserTimeout(conn.(*net.TCPConn), socket.UserTimeoutOf(c.Spec.IdleTimeout.Std())) // without it the system has its own
	if v := c.Spec.ProxyProtocol; v != 0 {
		_ = conn.SetWriteDeadline(time.Now().Add(pods.DialTimeout))
		if _, err := conn.Write(proxyproto.Header(v, client, at)); err != nil {
			_ = conn.Close()
			return nil, err
		}
	}
	if !c.Backend.IsTLS() {
		return conn.(*net.TCPConn), nil
	}
	var protocols []string
	if protocol != "" {
		protocols = []string{protocol}
	}
	t := tls.Client(conn, c.Pods.Config(protocols...))
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
