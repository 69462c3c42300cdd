package front

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"time"

	"golang.org/x/crypto/ocsp"
	corev1 "k8s.io/api/core/v1"
)

// stapleEntry is the entry of a TLS Secret with an OCSP response in DER, as other software that terminates TLS names it
// (https://gateway.envoyproxy.io/latest/api/extension_types/). The issuer of the certificate writes it: nodes do not query
// a responder.
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

// valid reports whether clients still accept it.
func (s staple) valid(now time.Time) bool { return len(s.der) > 0 && now.Before(s.until) }

// readStaple returns the OCSP response of a TLS Secret for its certificate, or why it cannot be used. A response that a
// client would reject is not sent.
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
		return staple{}, "it is not a response for this certificate, or its issuer did not sign it"
	case r.Status != ocsp.Good:
		return staple{}, "it does not report the certificate as good"
	case r.NextUpdate.IsZero():
		return staple{}, "it has no nextUpdate, the end of its validity"
	case r.ThisUpdate.After(now.Add(stapleSkew)):
		return staple{}, "it is not valid yet"
	}
	out = staple{der, r.NextUpdate.Add(-retryPeriod)} // how often expireStaples is called
	if !out.valid(now) {
		return staple{}, "it has expired"
	}
	return out, ""
}

// issuerOf returns the certificate of a chain, or of authorities in PEM, that signed leaf, nil if neither has it.
func issuerOf(leaf *x509.Certificate, chain [][]byte, authorities []byte) *x509.Certificate {
	candidates := chain // a self-signed one is its own issuer
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

// expireStaples stops stapling responses that have expired.
func (f *Front) expireStaples(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, t := range f.secrets {
		if len(t.staple.der) > 0 && !t.staple.valid(now) {
			t.staple, t.stapleProblem = staple{}, "it has expired"
			f.rebuildLocked(key)
		}
	}
}
