package pods

import (
	"crypto/tls"
	"crypto/x509"
)

// TLS is how TLS to Pods is begun, for comparison with ==.
type TLS struct {
	Roots *x509.CertPool // nil if Pods are not verified
	Name  string         // that their certificates must be for
	Cert  *tls.Certificate
}

// Config returns the configuration for a connection that offers protocols. Without roots a Pod's certificate is not
// verified, as by AWS's load balancers without a policy for backend authentication: nothing tells by whom it is.
func (t TLS) Config(protocols ...string) *tls.Config {
	c := &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: protocols, RootCAs: t.Roots, ServerName: t.Name,
		InsecureSkipVerify: t.Roots == nil, //nolint:gosec // see above
	}
	if t.Cert != nil {
		c.Certificates = []tls.Certificate{*t.Cert}
	}
	return c
}
