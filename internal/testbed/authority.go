package testbed

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"testing"
	"time"
)

// Authority issues certificates that are valid for a day.
type Authority struct {
	*testing.T
	Cert *x509.Certificate
	Key  *ecdsa.PrivateKey
}

// NewAuthority returns an authority with a certificate that it has signed itself.
func NewAuthority(t *testing.T) *Authority {
	t.Helper()
	a := &Authority{T: t}
	a.Cert, a.Key = a.Issue("authority", 1, true)
	return a
}

// Issue returns a certificate for a host name, and its key.
func (a *Authority) Issue(name string, serial int64, isCA bool) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, IsCA: isCA,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), BasicConstraintsValid: true,
	}
	parent, signer := template, key
	if a.Cert != nil {
		parent, signer = a.Cert, a.Key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		a.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.Fatal(err)
	}
	return cert, key
}
