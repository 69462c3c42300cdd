package proxied

import (
	"crypto/tls"
	"crypto/x509"
)

// podTLS is how TLS to Pods is begun, for comparison with ==.
type podTLS struct {
	roots *x509.CertPool // nil if Pods are not verified
	name  string         // that their certificates must be for
	cert  *tls.Certificate
}

// podTLSOf returns what a Service asks for.
func podTLSOf(v *Service) podTLS {
	t := podTLS{roots: v.PodRoots, cert: v.PodCertificate}
	if t.roots == nil {
		return t
	}
	if t.name = v.Spec.BackendTLS.ServerName; t.name == "" {
		t.name = v.Name.Name + "." + v.Name.Namespace + ".svc"
	}
	return t
}

// config returns the configuration for a connection that offers protocols. Without roots a Pod's certificate is not
// verified, as by AWS's load balancers without a policy for backend authentication: nothing tells by whom it is.
func (t podTLS) config(protocols ...string) *tls.Config {
	c := &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: protocols, RootCAs: t.roots, ServerName: t.name,
		InsecureSkipVerify: t.roots == nil, //nolint:gosec // see above
	}
	if t.cert != nil {
		c.Certificates = []tls.Certificate{*t.cert}
	}
	return c
}
