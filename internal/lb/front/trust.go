package front

import (
	"crypto/x509"
	"slices"
	"strings"
	"sync"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/svc"
)

// systemRoots returns the authorities of the operating system, none if it has none.
//
//nolint:gochecknoglobals // read once: it does not change while a process runs
var systemRoots = sync.OnceValue(func() *x509.CertPool {
	roots, err := x509.SystemCertPool()
	if err != nil {
		return x509.NewCertPool()
	}
	return roots
})

// pools are the authorities of objects, together. The same authorities keep their pointer: another one ends connections.
type pools map[string]pool

type pool struct {
	certs []*x509.Certificate
	roots *x509.CertPool
}

// of returns the authorities of some objects, nil if there are none. next gets what is kept for later.
func (p pools) of(refs []trust.Ref, from *watch.State, next pools) *x509.CertPool {
	var key strings.Builder
	var certs []*x509.Certificate
	for _, r := range refs {
		key.WriteString(r.String() + "\n")
		certs = append(certs, from.Authorities[r]...)
	}
	if len(certs) == 0 {
		return nil
	}
	have, known := p[key.String()]
	if !known || !slices.Equal(have.certs, certs) {
		have = pool{certs, x509.NewCertPool()}
		for _, c := range certs {
			have.roots.AddCert(c)
		}
	}
	next[key.String()] = have
	return have.roots
}

// verification returns how TLS to the backends of each policy of a front begins. A policy is missing if there is nothing to verify
// backends by, or nothing to show them: its backends are not spoken to.
func verification(f *gateway.Front, from *watch.State, had, next pools) map[svc.Name]pods.TLS {
	out := map[svc.Name]pods.TLS{}
	if f == nil { // of Ingresses
		return out
	}
	for n, p := range f.Policies {
		t := pods.TLS{Name: p.Hostname, Names: pods.JoinNames(p.Names)}
		if t.Roots = systemRoots(); !p.System {
			t.Roots = had.of(p.Authorities, from, next)
		}
		if f.ClientCertificate != (svc.Name{}) {
			t.Cert = from.Certificates[f.ClientCertificate]
		}
		if t.Roots != nil && (t.Cert != nil || f.ClientCertificate == svc.Name{}) {
			out[n] = t
		}
	}
	return out
}

// clientsOf returns how clients are verified at the ports that ask for it. A port without an authority verifies none of them.
func clientsOf(t *gateway.Table, from *watch.State, had, next pools) map[uint16]proxied.Clients {
	out := map[uint16]proxied.Clients{}
	for number, p := range t.Ports {
		if p.Clients == nil {
			continue
		}
		roots := had.of(p.Clients.Authorities, from, next)
		if roots == nil {
			roots = x509.NewCertPool()
		}
		out[number] = proxied.Clients{Roots: roots, Insecure: p.Clients.Insecure}
	}
	return out
}
