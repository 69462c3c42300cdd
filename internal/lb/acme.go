package lb

import (
	"crypto/x509"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/acme"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// ACME is the authority that certificates are ordered from, and who may have them.
type ACME struct {
	// Directory is the URL of its directory, Email who it may write to, and Roots the authorities of its own certificate.
	Directory, Email string
	Roots            *x509.CertPool
	Domains          []acme.Domain

	propagation time.Duration // of acme.Options
}

// acmeAccount is the Secret with the key of the account.
var acmeAccount = svc.Name{Namespace: Namespace, Name: "fairlead-lb-acme"}

// newACME returns what orders certificates.
func (c *controller) newACME() *acme.Manager {
	return acme.New(acme.Options{
		Client: c.client, Log: c.log, Directory: c.o.ACME.Directory, Email: c.o.ACME.Email, Roots: c.o.ACME.Roots, Domains: c.o.ACME.Domains,
		Propagation: c.o.ACME.propagation, Account: acmeAccount, Wanted: c.acmeWanted,
		Event: func(of *corev1.Service, eventType, reason, text string) { c.events.Event(of, eventType, reason, text) },
	})
}

// acmeWanted returns for which hosts a Service that nodes serve wants a certificate, and in which Secret.
func (c *controller) acmeWanted(o *corev1.Service) (hosts []string, secret string) {
	if o.Annotations[dialect.LBACMEHosts] == "" || o.DeletionTimestamp != nil {
		return nil, ""
	}
	c.mu.Lock()
	ours := c.isOurs(o)
	c.mu.Unlock()
	if !ours {
		return nil, ""
	}
	r := Read(o)
	if !v1.Proxied(o) || r.Invalid() || r.Way != dialect.Proxied || len(r.Spec.Certificates) == 0 {
		return nil, ""
	}
	return r.Spec.ACMEHosts, r.Spec.Certificates[0]
}
