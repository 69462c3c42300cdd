package proxied

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/svc"
)

// Routes make a Service the front of a Gateway, or of Ingresses: what each request is for decides where it goes.
type Routes struct {
	Ports map[uint16]*gateway.Port
	// Datagrams are the ports of UDP.
	Datagrams map[uint16]*gateway.Port
	// Targets are the endpoints of what rules lead to.
	Targets map[gateway.Target][]netip.AddrPort
	// Certificates are from the Secrets that listeners name.
	Certificates map[svc.Name]*tls.Certificate
	// Revoked are the Services that a route of connections must no longer reach: it loses the connections that it has there.
	Revoked map[gateway.Revocation]bool
}

// routedProtocols are offered to clients of HTTPS (ALPN).
//
//nolint:gochecknoglobals // constant
var routedProtocols = []string{"h2", "http/1.1"}

var errNoListener = errors.New("no listener is for this name")

// port returns the routes of a port.
func (t *Routes) port(l dialect.Listener) *gateway.Port {
	if l.Protocol == dialect.UDP {
		return t.Datagrams[l.Port]
	}
	return t.Ports[l.Port]
}

// carries reports whether the routes of a port are for a protocol of clients.
func carries(table *gateway.Port, p dialect.Protocol) bool {
	switch p {
	case dialect.HTTP:
		return !table.TLS && !table.Streams
	case dialect.HTTPS: // also for streams of TLS
		return table.TLS
	case dialect.TCP, dialect.UDP:
		return !table.TLS && table.Streams
	}
	return false
}

// give sets what chooses a backend for each request, connection, or client of UDP.
func (t *Routes) give(c *Config, l dialect.Listener, key string, targets map[gateway.Target]*Config) {
	table := t.port(l)
	if c.Protocol.IsHTTP() {
		c.Router = &router{port: table, targets: targets, key: key}
	}
	if table.Streams {
		c.streams = &streams{port: table, targets: targets}
		if c.TLS != nil {
			c.streams.tls = c.TLS.Clone() // with the keys of session tickets
			c.streams.tls.NextProtos = nil
		}
	}
}

// configure sets what differs from a port without routes.
func (t *Routes) configure(c *Config, l dialect.Listener, old *Config) error {
	table, port := t.port(l), l.Port
	if table == nil || !carries(table, c.Protocol) {
		return fmt.Errorf("port %d: there are no routes for %s", port, c.Protocol)
	}
	if !table.TLS {
		return nil
	}
	policy, ok := dialect.TLSPolicyOf(c.Spec.TLSPolicy)
	if !ok {
		return fmt.Errorf("port %d: there is no TLS policy %.100q", port, c.Spec.TLSPolicy)
	}
	c.TLS = &tls.Config{}
	if old != nil && old.TLS != nil {
		c.TLS = old.TLS.Clone() // with the keys of session tickets
	}
	c.TLS.MinVersion, c.TLS.MaxVersion, c.TLS.CipherSuites = policy.Least, policy.Most, policy.Suites
	c.TLS.Certificates, c.TLS.NextProtos = nil, routedProtocols
	c.TLS.GetCertificate = func(h *tls.ClientHelloInfo) (*tls.Certificate, error) { return t.certificate(table, h) }
	return nil
}

// certificate returns the certificate of the listener that a client names.
func (t *Routes) certificate(p *gateway.Port, h *tls.ClientHelloInfo) (*tls.Certificate, error) {
	l := p.ListenerFor(gateway.CanonicalHost(h.ServerName))
	if l == nil {
		return nil, errNoListener
	}
	var first *tls.Certificate
	for _, n := range l.Certificates {
		cert := t.Certificates[n]
		if cert != nil && h.SupportsCertificate(cert) == nil {
			return cert, nil
		}
		if first == nil {
			first = cert
		}
	}
	if first == nil {
		return nil, errNoListener
	}
	return first, nil
}

func targetKey(n svc.Name, t gateway.Target) poolKey {
	t.Timeout = 0
	return poolKey{service: n, target: t, udp: t.Protocol == gateway.UDP}
}

// targeting makes the configurations of the targets of a Service. The caller of its methods holds the Server's mu.
type targeting struct {
	service *Service
	web     Engine
	usage   *usage
	drains  map[poolKey]time.Duration
	pool    func(poolKey) *pods.Pool
}

// all returns a configuration for each target. One that does not change is kept: had is the Service as it was, nil before,
// and before are its targets.
func (m *targeting) all(had *Service, before map[gateway.Target]*Config) map[gateway.Target]*Config {
	v := m.service
	same := had != nil && had.Routes != nil && had.Key == v.Key && reflect.DeepEqual(had.Spec, v.Spec)
	next := make(map[gateway.Target]*Config, len(v.Routes.Targets))
	for t, addrs := range v.Routes.Targets {
		old := before[t]
		if old != nil && same && slices.Equal(had.Routes.Targets[t], addrs) {
			next[t] = old
			continue
		}
		next[t] = m.one(t, addrs, old)
	}
	for t := range before {
		if next[t] == nil && v.Routes.Revoked[gateway.Revocation{Route: t.Route, Service: t.Name}] {
			m.drains[targetKey(v.Name, t)] = 0
		}
	}
	return next
}

// one returns the configuration of a target.
func (m *targeting) one(t gateway.Target, addrs []netip.AddrPort, old *Config) *Config {
	v := m.service
	spec := v.Spec
	if t.Timeout > 0 {
		spec.IdleTimeout = dialect.Duration(t.Timeout)
	}
	c := &Config{
		Service: v.Name, Spec: &spec, Protocol: dialect.HTTP, Backend: dialect.HTTP, owner: logship.OwnerOf(v.Name, v.Key), usage: m.usage,
	}
	health := v.Spec.Health
	switch t.Protocol {
	case gateway.H2C:
		c.Backend = dialect.H2C
	case gateway.TCP:
		c.Protocol, c.Backend = dialect.TCP, dialect.TCP
	case gateway.UDP:
		c.Protocol, c.Backend = dialect.UDP, dialect.UDP
		health = datagramChecks(health)
	case gateway.HTTP1:
	}
	if c.Protocol.IsHTTP() {
		m.web.Configure(c, old)
	}
	key := targetKey(v.Name, t)
	drain := v.Spec.DrainTimeout.Std()
	if !v.Spec.Draining {
		drain = 0
	} else if drain == 0 {
		drain = -1
	}
	m.drains[key] = drain
	c.Pool = m.pool(key)
	o := pods.Options{Balance: v.Spec.Balance, SlowStart: v.Spec.SlowStart.Std(), Checks: pods.Checks{Health: health},
		Eject: v.Spec.Eject}
	if t.Session {
		o.Key = v.Key
	}
	c.Pool.Set(o, addrs, drain)
	return c
}
