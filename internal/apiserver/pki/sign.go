package pki

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/apis/asn1"
)

// User is whom a client certificate is for. UID may be empty; k8s.io/apiserver reads
// it from certificates.
type User struct {
	Name, UID string
	Groups    []string
}

// SignClient signs a client certificate for the key pub, in the name of u. life is at
// most d.Life; zero means d.Life. The result is PEM, the authorities' certificates
// last.
func (d *Directory) SignClient(pub crypto.PublicKey, u User, life time.Duration) ([]byte, error) {
	b := d.Bundle()
	if b.Signer().Key == nil {
		return nil, fmt.Errorf("this server cannot sign certificates: %s is missing", d.file("ca.key"))
	}
	if life <= 0 || life > d.Life {
		life = d.Life
	}
	subject := pkix.Name{CommonName: u.Name, Organization: u.Groups}
	if u.UID != "" {
		subject.ExtraNames = []pkix.AttributeTypeAndValue{{Type: asn1.X509UID(), Value: u.UID}}
	}
	der, err := d.sign(b.Signer(), &x509.Certificate{
		Subject:     subject,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, pub, life)
	if err != nil {
		return nil, err
	}
	return append(encodeCert(der), b.chain()...), nil
}

// sign signs t for the key pub by a, valid for life but not longer than the authority.
// It fills in the rest of t.
func (d *Directory) sign(a Authority, t *x509.Certificate, pub crypto.PublicKey, life time.Duration) (der []byte, err error) {
	if t.SerialNumber, err = newSerial(); err != nil {
		return nil, err
	}
	now := d.now()
	t.NotBefore, t.NotAfter = now.Add(-min(maxBackdate, life/2)), now.Add(life)
	if t.NotAfter.After(a.Cert.NotAfter) {
		t.NotAfter = a.Cert.NotAfter
	}
	t.KeyUsage = x509.KeyUsageDigitalSignature
	return x509.CreateCertificate(rand.Reader, t, a.Cert, pub, a.Key)
}
