package pki

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"time"
)

// SignClient signs a client certificate for the key pub, in the name of a user
// with groups. life is at most LeafLife; zero means LeafLife. The result is
// PEM, the authority's certificate last.
func (d *Directory) SignClient(pub crypto.PublicKey, name string, groups []string, life time.Duration) ([]byte, error) {
	if d.caKey == nil {
		return nil, fmt.Errorf("this server cannot sign certificates: %s is missing", d.file("ca.key"))
	}
	if life <= 0 || life > LeafLife {
		life = LeafLife
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	now := d.now()
	t := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name, Organization: groups},
		NotBefore:    now.Add(-backdate),
		NotAfter:     now.Add(life),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if t.NotAfter.After(d.ca.NotAfter) {
		t.NotAfter = d.ca.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, t, d.ca, pub, d.caKey)
	if err != nil {
		return nil, err
	}
	return append(encodeCert(der), d.caPEM...), nil
}
