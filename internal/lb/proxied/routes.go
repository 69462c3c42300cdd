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
	// Targets are the endpoints of what rules lead to.
	Targets map[gateway.Target][]netip.AddrPort
	// Certificates are from the Secrets that listeners name.
	Certificates map[svc.Name]*tls.Certificate
}

// routedProtocols are offered to clients of HTTPS (ALPN).
//
//nolint:gochecknoglobals // constant
var routedProtocols = []string{"h2", "http/1.1"}

var errNoListener = errors.New("no listener is for this name")

// configure sets what differs from a port without routes.
func (t *Routes) configure(c *Config, port uint16, old *Config) error {
	table := t.Ports[port]
	if table == nil || !c.Protocol.IsHTTP() || table.TLS != c.Protocol.IsTLS() {
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

func targetKey(n svc.Name, b gateway.Backend) poolKey { return poolKey{service: n, target: b} }

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
	if t.Protocol == gateway.H2C {
		c.Backend = dialect.H2C
	}
	m.web.Configure(c, old)
	key := targetKey(v.Name, t.Backend)
	drain := v.Spec.DrainTimeout.Std()
	if !v.Spec.Draining {
		drain = 0
	} else if drain == 0 {
		drain = -1
	}
	m.drains[key] = drain
	c.Pool = m.pool(key)
	o := pods.Options{Balance: v.Spec.Balance, SlowStart: v.Spec.SlowStart.Std(), Checks: pods.Checks{Health: v.Spec.Health},
		Eject: v.Spec.Eject}
	c.Pool.Set(o, addrs, drain)
	return c
}
