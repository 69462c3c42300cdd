package lb

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"time"

	"golang.org/x/crypto/ocsp"
	corev1 "k8s.io/api/core/v1"
)

// stapleEntry is the entry of a TLS Secret that has an OCSP response, in DER, as other software that ends TLS names it
// (https://gateway.envoyproxy.io/latest/api/extension_types/). Whoever issues or renews the certificate puts it there:
// nodes ask no responder.
const stapleEntry = "tls.ocsp-staple"

const (
	// maxStaple bounds a response: each handshake carries it.
	maxStaple = 16 << 10
	// stapleSkew is how much clocks may differ.
	stapleSkew = 5 * time.Minute
)

// staple is an OCSP response that proves that a certificate is not revoked.
type staple struct {
	der   []byte
	until time.Time
}

// valid reports whether clients still take it.
func (s staple) valid(now time.Time) bool { return len(s.der) > 0 && now.Before(s.until) }

// readStaple returns the OCSP response of a TLS Secret for its certificate, or why there is none that can be used. It is
// verified: what a client would reject is not sent.
func readStaple(s *corev1.Secret, chain [][]byte, now time.Time) (out staple, problem string) {
	der, has := s.Data[stapleEntry]
	if !has {
		return staple{}, ""
	}
	if len(der) > maxStaple {
		return staple{}, fmt.Sprintf("it has more than %d bytes", maxStaple)
	}
	leaf, err := x509.ParseCertificate(chain[0])
	if err != nil {
		return staple{}, "its certificate cannot be parsed"
	}
	issuer := issuerOf(leaf, chain, s.Data[corev1.ServiceAccountRootCAKey])
	if issuer == nil {
		return staple{}, fmt.Sprintf("the issuer's certificate is neither in %s nor in %s", corev1.TLSCertKey, corev1.ServiceAccountRootCAKey)
	}
	r, err := ocsp.ParseResponseForCert(der, leaf, issuer)
	switch {
	case err != nil:
		return staple{}, "it is no response for this certificate, or not signed by its issuer"
	case r.Status != ocsp.Good:
		return staple{}, "it does not tell that the certificate is good"
	case r.NextUpdate.IsZero():
		return staple{}, "it does not tell until when it is valid"
	case r.ThisUpdate.After(now.Add(stapleSkew)):
		return staple{}, "it is of the future"
	}
	out = staple{der, r.NextUpdate.Add(-retryPeriod)} // expireStaples comes as often as that
	if !out.valid(now) {
		return staple{}, "it has expired"
	}
	return out, ""
}

// issuerOf returns who has signed a certificate, of a chain or of authorities in PEM, nil if neither has it.
func issuerOf(leaf *x509.Certificate, chain [][]byte, authorities []byte) *x509.Certificate {
	candidates := chain // itself if it is self-signed
	for {
		var block *pem.Block
		if block, authorities = pem.Decode(authorities); block == nil {
			break
		}
		candidates = append(candidates[:len(candidates):len(candidates)], block.Bytes)
	}
	for _, der := range candidates {
		if c, err := x509.ParseCertificate(der); err == nil && leaf.CheckSignatureFrom(c) == nil {
			return c
		}
	}
	return nil
}

// expireStaples stops stapling responses that are not valid any more.
func (p *proxying) expireStaples(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, t := range p.secrets {
		if len(t.staple.der) > 0 && !t.staple.valid(now) {
			t.staple, t.stapleProblem = staple{}, "it has expired"
			p.rebuild(key)
		}
	}
}
