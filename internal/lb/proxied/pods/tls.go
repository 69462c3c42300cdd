package pods

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"strings"

	"github.com/fairlead/fairlead/internal/gateway/trust"
)

// TLS is how TLS to Pods is begun, for comparison with ==.
type TLS struct {
	Roots *x509.CertPool // nil if Pods are not verified
	// Name is the one that is asked for (SNI). The Pods' certificates must be for it unless there are Names.
	Name string
	// Names, by JoinNames, are the ones of which a certificate must have one.
	Names string
	Cert  *tls.Certificate
	// Second is true if Pods must agree on HTTP/2.
	Second bool
}

// The kinds of names in TLS.Names.
const (
	hostName = "host:"
	uriName  = "uri:"
)

// JoinNames returns names as TLS has them. A name has no line break.
func JoinNames(names []trust.Name) string {
	var out []string
	for _, n := range names {
		kind := hostName
		if n.URI {
			kind = uriName
		}
		out = append(out, kind+n.Value)
	}
	return strings.Join(out, "\n")
}

// Config returns the configuration for a connection that offers protocols. Without roots a Pod's certificate is not
// verified, as by AWS's load balancers without a policy for backend authentication: nothing tells by whom it is.
func (t TLS) Config(protocols ...string) *tls.Config {
	c := &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: protocols, RootCAs: t.Roots, ServerName: t.Name,
		InsecureSkipVerify: t.Roots == nil || t.Names != "", //nolint:gosec // see above, and verify
	}
	if t.Roots != nil && t.Names != "" {
		c.VerifyConnection = t.verify
	}
	if t.Cert != nil {
		c.Certificates = []tls.Certificate{*t.Cert}
	}
	return c
}

var (
	errNoCertificate = errors.New("the endpoint shows no certificate")
	errNoName        = errors.New("the endpoint's certificate has none of the subject alternative names")
)

// verify verifies the certificate of a Pod by its names.
func (t TLS) verify(s tls.ConnectionState) error {
	if len(s.PeerCertificates) == 0 {
		return errNoCertificate
	}
	leaf, between := s.PeerCertificates[0], x509.NewCertPool()
	for _, c := range s.PeerCertificates[1:] {
		between.AddCert(c)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: t.Roots, Intermediates: between}); err != nil {
		return &tls.CertificateVerificationError{UnverifiedCertificates: s.PeerCertificates, Err: err}
	}
	for want := range strings.SplitSeq(t.Names, "\n") {
		if isFor(leaf, want) {
			return nil
		}
	}
	return &tls.CertificateVerificationError{UnverifiedCertificates: s.PeerCertificates, Err: errNoName}
}

// isFor reports whether a certificate has a name. A wildcard that is wanted stands for one label, as one of a certificate does.
func isFor(c *x509.Certificate, want string) bool {
	if uri, is := strings.CutPrefix(want, uriName); is {
		for _, u := range c.URIs {
			if u.String() == uri {
				return true
			}
		}
		return false
	}
	host := strings.TrimPrefix(want, hostName)
	if rest, wild := strings.CutPrefix(host, "*."); wild {
		for _, name := range c.DNSNames {
			if _, below, ok := strings.Cut(strings.ToLower(name), "."); ok && below == rest {
				return true
			}
		}
		return false
	}
	return c.VerifyHostname(host) == nil
}
