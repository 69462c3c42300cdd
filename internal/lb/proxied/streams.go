package proxied

import (
	"crypto/tls"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/lb/proxied/accesslog"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
)

// streams chooses where each connection of a port of a front goes as a whole, or the datagrams of a client. It does not change.
type streams struct {
	port    *gateway.Port
	targets map[gateway.Target]*Config
	tls     *tls.Config // of listeners that end TLS
	counts  traffic.Routes
}

// pick chooses a backend of a rule by the weights, and returns it with the counters of the rule's route. It returns nil if there is none:
// then the connection is rejected.
func (o *streams) pick(rule *gateway.Rule) (*Config, *traffic.Route) {
	if rule == nil {
		return nil, nil
	}
	w := rule.Pick(rand.Uint64())
	if w == nil || !w.Valid {
		return nil, nil
	}
	to := o.targets[rule.Target(w)]
	if to == nil {
		return nil, nil
	}
	return to, o.counts.Of(rule, routeName(rule))
}

// whole chooses a backend for a connection, or a client of UDP, that sends no name first.
func (o *streams) whole() (*Config, *traffic.Route) {
	_, rule := o.port.Connection("")
	return o.pick(rule)
}

// target returns what has the Pods for a connection of TCP, or for a client of UDP: c itself without routes. nil means that
// it is rejected. The caller counts the connection for the route, which may be nil, when a backend has it.
func (c *Config) target() (*Config, *traffic.Route) {
	if c.streams == nil {
		return c, nil
	}
	return c.streams.whole()
}

// serveNamed handles a connection of a port at which the name with that TLS begins decides. The caller has set a deadline for what
// the client sends first. A connection that leads nowhere is closed without an alert, as the specification of TLSRoute asks.
func serveNamed(s *Server, socket *net.TCPConn, conn stream.Conn, l *Listener, c *Config, client, at netip.AddrPort) Parked {
	began := time.Now()
	name, first, err := readName(conn)
	if err != nil {
		s.log.Debug("no TLS with a client", "service", c.Service, "client", client, "err", err)
		return nil
	}
	listener, rule := c.streams.port.Connection(hostpath.Host(name))
	if listener != nil && listener.Mode == gateway.Requests {
		return s.web.Serve(&replayed{conn, first}, l, c, client, at)
	}
	line := accesslog.Entry{Client: client, Before: -1, During: -1, After: -1}
	defer func() { c.Record(line) }()
	if listener == nil || rule == nil {
		s.log.Debug("no route for a client", "service", c.Service, "client", client, "name", name)
		return nil
	}
	to, route := c.streams.pick(rule)
	if to == nil {
		s.log.Debug("no backend for a client", "service", c.Service, "client", client, "name", name)
		return nil
	}
	front := conn
	if listener.Mode == gateway.Terminated {
		t := tls.Server(&replayed{conn, first}, c.streams.tls)
		if err := t.HandshakeContext(s.ctx); err != nil {
			s.log.Debug("no TLS with a client", "service", c.Service, "client", client, "err", err)
			return nil
		}
		front, first = t, nil
		line.TLS(t.ConnectionState())
	}
	m, pod, k := s.connect(socket, to, client, at, "")
	if pod == nil {
		return nil
	}
	route.Opened()
	line.Pod, line.Before = m.Addr(), time.Since(began)
	defer pod.Close()
	defer to.Pool.Remove(m, k)
	_ = pod.SetWriteDeadline(time.Now().Add(pods.DialTimeout))
	if _, err := pod.Write(first); err != nil {
		return nil
	}
	_ = pod.SetWriteDeadline(time.Time{})
	_ = conn.SetDeadline(time.Time{})
	line.Sent, line.Received = stream.Join(s.panics, c.Service, front, pod, to.Spec.IdleTimeout.Std())
	line.Received += int64(len(first))
	c.usage.traffic.Carried(line.Received, line.Sent)
	to.Pool.Carried(m, line.Received, line.Sent)
	return nil
}

// maxHello bounds the bytes of a client before its name is known: browsers send less than 2 KiB.
const maxHello = 16 << 10

var (
	errHelloRead = errors.New("the first message has been read")
	errHelloSize = errors.New("the first message is too large")
)

// readName returns the name with which a client begins TLS, "" if it sends none, and what was read. Package tls reads the message,
// which may come in any number of parts, and refuses one that other servers could read in another way: two names, or an
// extension twice. Nothing is sent.
func readName(conn net.Conn) (name string, read []byte, err error) {
	h := &hello{Conn: conn}
	config := &tls.Config{GetConfigForClient: func(i *tls.ClientHelloInfo) (*tls.Config, error) {
		name = i.ServerName
		return nil, errHelloRead
	}}
	if err := tls.Server(h, config).Handshake(); !errors.Is(err, errHelloRead) { //nolint:noctx // the caller has set a deadline
		return "", nil, err
	}
	return name, h.read, nil
}

// hello is a connection of which only the first message is read.
type hello struct {
	net.Conn
	read []byte
}

func (h *hello) Read(p []byte) (int, error) {
	room := maxHello - len(h.read)
	if room == 0 {
		return 0, errHelloSize
	}
	n, err := h.Conn.Read(p[:min(len(p), room)])
	h.read = append(h.read, p[:n]...)
	return n, err
}

// Write drops the alert with which package tls ends.
func (h *hello) Write(p []byte) (int, error) { return len(p), nil }

// replayed is a connection whose first bytes have been read.
type replayed struct {
	stream.Conn
	first []byte
}

// Unwrap returns the connection that was read.
func (r *replayed) Unwrap() stream.Conn { return r.Conn }

func (r *replayed) Read(p []byte) (int, error) {
	if len(r.first) == 0 {
		return r.Conn.Read(p)
	}
	n := copy(p, r.first)
	if r.first = r.first[n:]; len(r.first) == 0 {
		r.first = nil
	}
	return n, nil
}
