package proxied

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/basic"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
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
	// Users are from the Secrets with names and passwords that rules name.
	Users map[basic.Source]*basic.Users
	// Revoked are the Services that a route of connections must no longer reach: it loses the connections that it has there.
	Revoked map[gateway.Revocation]bool
	// Policies are how TLS begins to the backends of BackendTLSPolicies.
	Policies map[svc.Name]pods.TLS
	// Clients are how clients of HTTPS are verified at the ports that ask for certificates.
	Clients map[uint16]Clients
	// Tokens are the answers to an authority that asks by HTTP-01, by hosts and tokens.
	Tokens map[string]map[string]string
	// Subjects has backends get the subjects of clients' certificates (gateway.Table).
	Subjects bool
}

// Clients is how clients are verified. A change of the roots is seen by the pointer.
type Clients struct {
	Roots *x509.CertPool
	// Insecure is true if clients without a certificate, or with one that is not verified, get in, too.
	Insecure bool
}

// ask has TLS ask clients for certificates. A ticket of a session belongs to what clients were asked for when they got it.
func (t *Routes) ask(port *gateway.Port, old *tls.Config) *tls.Config {
	roots, auth := (*x509.CertPool)(nil), tls.NoClientCert
	if port.Clients != nil {
		k := t.Clients[port.Number]
		if roots, auth = k.Roots, tls.RequireAndVerifyClientCert; roots == nil {
			roots = x509.NewCertPool() // nobody is verified
		}
		if k.Insecure {
			auth = tls.RequestClientCert
		}
	}
	out := &tls.Config{}
	if old != nil && old.ClientCAs == roots && old.ClientAuth == auth {
		out = old.Clone() // with the keys of session tickets
	}
	out.ClientCAs, out.ClientAuth = roots, auth
	return out
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
	if table == nil { // of ACMEListener
		return
	}
	if c.Protocol.IsHTTP() {
		c.Router = &router{
			port: table, targets: targets, users: t.Users, key: key, usage: c.usage, counts: traffic.Routes{Service: c.usage.traffic},
		}
	}
	if table.Streams {
		c.streams = &streams{port: table, targets: targets, counts: traffic.Routes{Service: c.usage.traffic}}
		if c.TLS != nil {
			c.streams.tls = c.TLS.Clone() // with the keys of session tickets
			c.streams.tls.NextProtos = nil
			c.streams.tls.ClientCAs, c.streams.tls.ClientAuth = nil, tls.NoClientCert // only HTTPS asks for certificates
		}
	}
}

// configure sets what differs from a port without routes.
func (t *Routes) configure(c *Config, l dialect.Listener, old *Config, challenges map[string]*tls.Certificate) error {
	table, port := t.port(l), l.Port
	if l.Name == ACMEListener {
		return nil
	}
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
	var had *tls.Config
	if old != nil {
		had = old.TLS
	}
	c.TLS = t.ask(table, had)
	c.TLS.MinVersion, c.TLS.MaxVersion, c.TLS.CipherSuites = policy.Least, policy.Most, policy.Suites
	c.TLS.Certificates, c.TLS.NextProtos = nil, routedProtocols
	c.TLS.GetCertificate = func(h *tls.ClientHelloInfo) (*tls.Certificate, error) { return t.certificate(table, h) }
	c.TLS = answerACME(c.TLS, challenges)
	return nil
}

// certificate returns the certificate of the listener that a client names.
func (t *Routes) certificate(p *gateway.Port, h *tls.ClientHelloInfo) (*tls.Certificate, error) {
	l := p.ListenerFor(hostpath.Host(h.ServerName))
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
	same := had != nil && had.Routes != nil && had.Key == v.Key && reflect.DeepEqual(had.Spec, v.Spec) &&
		had.Routes.Subjects == v.Routes.Subjects
	next := make(map[gateway.Target]*Config, len(v.Routes.Targets))
	for t, addrs := range v.Routes.Targets {
		if _, verified := v.Routes.Policies[t.Policy]; t.Policy != (svc.Name{}) && !verified {
			continue // nothing tells whom to trust
		}
		old := before[t]
		if old != nil && same && slices.Equal(had.Routes.Targets[t], addrs) && had.Routes.Policies[t.Policy] == v.Routes.Policies[t.Policy] {
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
	switch {
	case t.Timeout > 0:
		spec.IdleTimeout, spec.RequestTimeout = dialect.Duration(t.Timeout), dialect.Duration(t.Timeout)
	case t.Timeout == policy.NoTimeout:
		spec.RequestTimeout = 0
	}
	if v.Routes.Subjects {
		spec.Headers.ClientCertificate = dialect.DefaultClientField
	}
	c := &Config{
		Service: v.Name, Spec: &spec, Protocol: dialect.HTTP, Backend: dialect.HTTP, owner: logship.OwnerOf(v.Name, v.Key), usage: m.usage,
		backend: t.Name,
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
	case gateway.HTTPS, gateway.H2:
		c.Backend, c.Pods.Second = dialect.HTTPS, t.Protocol == gateway.H2
	case gateway.HTTP1:
	}
	if t.Policy != (svc.Name{}) {
		c.encrypt(v.Routes.Policies[t.Policy])
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
	o := pods.Options{Balance: v.Spec.Balance, SlowStart: v.Spec.SlowStart.Std(), Checks: pods.Checks{Health: health, TLS: c.Pods},
		Eject: v.Spec.Eject}
	if t.Session {
		o.Key = v.Key
	}
	c.Pool.Set(o, addrs, drain)
	return c
}

// encrypt has Pods spoken to by TLS.
func (c *Config) encrypt(t pods.TLS) {
	c.Pods = t
	switch c.Backend {
	case dialect.TCP:
		c.Backend = dialect.TLS
	case dialect.H2C:
		c.Backend, c.Pods.Second = dialect.HTTPS, true
	default:
		c.Backend = dialect.HTTPS
	}
}
