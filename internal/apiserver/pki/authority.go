package pki

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"
)

// Authority is a certificate authority. Key is nil where the installer keeps it elsewhere.
type Authority struct {
	Cert *x509.Certificate
	Key  crypto.Signer
}

// Bundle is what a Directory signs with and trusts. It must not be changed.
type Bundle struct {
	// Authorities are trusted; the first one signs.
	Authorities []Authority
	// Cross are certificates of an authority's key that another authority has signed.
	Cross []*x509.Certificate
}

// Signer returns the authority that signs.
func (b *Bundle) Signer() Authority { return b.Authorities[0] }

// Made reports whether this package made the authority that signs: there is no other one between it and what it signs.
func (b *Bundle) Made() bool { return made(b.Signer().Cert) }

// PEM returns the certificates of the authorities, the signing one first.
func (b *Bundle) PEM() (out []byte) {
	for _, a := range b.Authorities {
		out = append(out, encodeCert(a.Cert.Raw)...)
	}
	return out
}

// Published returns the certificates of the authorities, the signing one first, and the cross
// certificates, by which Vouched accepts them.
func (b *Bundle) Published() []byte { return append(b.PEM(), b.crossPEM()...) }

func (b *Bundle) crossPEM() (out []byte) {
	for _, c := range b.Cross {
		out = append(out, encodeCert(c.Raw)...)
	}
	return out
}

// chain returns what follows a leaf that the bundle has signed: the cross certificates, by which
// clients that trust another authority verify it, and the authorities, by whose hashes new nodes
// find theirs.
func (b *Bundle) chain() []byte {
	return append(b.crossPEM(), b.PEM()...)
}

// Trusts reports whether an authority of the bundle has a hash of Hash.
func (b *Bundle) Trusts(hash string) bool {
	return slices.ContainsFunc(b.Authorities, func(a Authority) bool { return Hash(a.Cert) == hash })
}

// Hashes returns the Hash of each authority, the signing one's first.
func (b *Bundle) Hashes() (out []string) {
	for _, a := range b.Authorities {
		out = append(out, Hash(a.Cert))
	}
	return out
}

// Pool returns the authorities to verify with.
func (b *Bundle) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	for _, a := range b.Authorities {
		pool.AddCert(a.Cert)
	}
	return pool
}

// made reports whether this package made a certificate.
func made(c *x509.Certificate) bool { return slices.Contains(c.Subject.OrganizationalUnit, Marker) }

// Provided reports whether an installer has provided the authority that signs.
func (d *Directory) Provided() bool { return !made(d.Authority()) }

// ErrProvided is the error of Successor for an authority that this package did not make, or
// cannot sign with.
var ErrProvided = errors.New("the authority was provided by an installer, or its key is not here")

// Successor returns a bundle of the authority that signs and of a new one, with the certificate of
// the new one by the old one, for clients that only know the old one. There is none the other way
// round: with it a client that only trusts the new one would verify whatever the old one has signed,
// for as long as the old one is valid, since verifiers take such certificates from the other side.
func (d *Directory) Successor() (*Bundle, error) {
	old := d.Bundle().Signer()
	if old.Key == nil || d.Provided() {
		return nil, ErrProvided
	}
	next, err := newAuthority(d.now())
	if err != nil {
		return nil, err
	}
	// Earlier ones stay: whoever has followed none of several rotations verifies by all of them.
	out := &Bundle{Authorities: []Authority{old, next}, Cross: slices.Clone(d.Bundle().Cross)}
	out.Cross = slices.DeleteFunc(out.Cross, func(c *x509.Certificate) bool { return d.now().After(c.NotAfter) })
	c, err := cross(next, old)
	if err != nil {
		return nil, err
	}
	out.Cross = append(out.Cross, c)
	return out, nil
}

// newAuthority returns a new authority, valid from now on.
func newAuthority(now time.Time) (Authority, error) {
	key, _, err := NewKey()
	if err != nil {
		return Authority{}, err
	}
	serial, err := newSerial()
	if err != nil {
		return Authority{}, err
	}
	t := &x509.Certificate{
		SerialNumber: serial,
		// The name tells it from other authorities of the cluster.
		Subject:               pkix.Name{CommonName: fmt.Sprintf("fairlead-ca@%d-%x", now.Unix(), serial), OrganizationalUnit: []string{Marker}},
		NotBefore:             now.Add(-maxBackdate),
		NotAfter:              now.Add(AuthorityLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return Authority{}, err
	}
	cert, err := x509.ParseCertificate(der)
	return Authority{cert, key}, err
}

// cross returns a certificate of the key of one authority that another one has signed.
func cross(of, by Authority) (*x509.Certificate, error) {
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{
		SerialNumber: serial, Subject: of.Cert.Subject, SubjectKeyId: of.Cert.SubjectKeyId,
		NotBefore: of.Cert.NotBefore, NotAfter: of.Cert.NotAfter,
		KeyUsage: of.Cert.KeyUsage, BasicConstraintsValid: true, IsCA: true,
	}
	if by.Cert.NotBefore.After(t.NotBefore) {
		t.NotBefore = by.Cert.NotBefore
	}
	if by.Cert.NotAfter.Before(t.NotAfter) {
		t.NotAfter = by.Cert.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, t, by.Cert, of.Cert.PublicKey, by.Key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// Vouched returns the authorities in published, PEM of Published, for one who trusts the authorities in trusted:
// each must be one of them, or one of them must have signed a certificate of its key.
func Vouched(trusted, published []byte) ([]byte, error) {
	known, given := certs(trusted), certs(published)
	var out []byte
	for _, c := range given {
		if !bytes.Equal(c.RawIssuer, c.RawSubject) {
			continue // a cross certificate
		}
		vouched := slices.ContainsFunc(known, c.Equal) || slices.ContainsFunc(given, func(x *x509.Certificate) bool {
			return x.IsCA && bytes.Equal(x.RawSubject, c.RawSubject) && bytes.Equal(x.RawSubjectPublicKeyInfo, c.RawSubjectPublicKeyInfo) &&
				slices.ContainsFunc(known, func(k *x509.Certificate) bool { return x.CheckSignatureFrom(k) == nil })
		})
		if !vouched {
			return nil, fmt.Errorf("no authority that this machine trusts has signed the authority %s", c.Subject.CommonName)
		}
		out = append(out, encodeCert(c.Raw)...)
	}
	if len(out) == 0 {
		return nil, errors.New("no authority is published")
	}
	return out, nil
}

// HasHash reports whether a certificate in PEM text has a hash of Hash.
func HasHash(text []byte, hash string) bool {
	return slices.ContainsFunc(certs(text), func(c *x509.Certificate) bool { return Hash(c) == hash })
}

// SignedByFirst reports whether leaf is signed by the first of the authorities in PEM text.
func SignedByFirst(authorities []byte, leaf *x509.Certificate) bool {
	all := certs(authorities)
	return len(all) > 0 && leaf.CheckSignatureFrom(all[0]) == nil
}

// certs returns the certificates in PEM text that can be read.
func certs(text []byte) (out []*x509.Certificate) {
	for {
		var b *pem.Block
		if b, text = pem.Decode(text); b == nil {
			return out
		}
		if c, err := x509.ParseCertificate(b.Bytes); err == nil && b.Type == "CERTIFICATE" {
			out = append(out, c)
		}
	}
}

// keysPEM returns the keys of all authorities that have one, the signing one's first.
func (b *Bundle) keysPEM() (out []byte, err error) {
	for _, a := range b.Authorities {
		if a.Key == nil {
			continue
		}
		der, err := x509.MarshalPKCS8PrivateKey(a.Key)
		if err != nil {
			return nil, err
		}
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})...)
	}
	return out, nil
}

// ParseKey reads a private key in PKCS #8.
func ParseKey(der []byte) (crypto.Signer, error) {
	key, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, err
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, errors.New("the key cannot sign")
	}
	return signer, nil
}

// keys returns the private keys in PEM text.
func keys(text []byte) (out []crypto.Signer, err error) {
	for {
		var b *pem.Block
		if b, text = pem.Decode(text); b == nil {
			return out, err
		}
		var key any
		var bad error
		switch b.Type {
		case "EC PRIVATE KEY":
			key, bad = x509.ParseECPrivateKey(b.Bytes)
		case "RSA PRIVATE KEY":
			key, bad = x509.ParsePKCS1PrivateKey(b.Bytes)
		case "PRIVATE KEY":
			key, bad = x509.ParsePKCS8PrivateKey(b.Bytes)
		default:
			continue // EC PARAMETERS, as openssl writes them
		}
		if signer, ok := key.(crypto.Signer); ok && bad == nil {
			out = append(out, signer)
		} else {
			err = errors.Join(err, bad)
		}
	}
}

// Install makes b what the directory signs with and trusts, in its files, too. It can be repeated after
// a crash at any moment: the first certificate in ca.crt always has its key in ca.key.
func (d *Directory) Install(b *Bundle) error {
	both := &Bundle{Authorities: slices.Clone(b.Authorities)}
	for _, a := range d.Bundle().Authorities {
		if !b.Trusts(Hash(a.Cert)) {
			both.Authorities = append(both.Authorities, a)
		}
	}
	for _, step := range []struct {
		file string
		text func() ([]byte, error)
	}{
		{"ca.key", both.keysPEM},
		{"ca-cross.crt", func() ([]byte, error) { return b.crossPEM(), nil }},
		{"ca.crt", func() ([]byte, error) { return b.PEM(), nil }},
		{"ca.key", b.keysPEM},
	} {
		text, err := step.text()
		if err != nil {
			return err
		}
		if old, err := os.ReadFile(d.file(step.file)); err == nil && bytes.Equal(old, text) || len(text) == 0 && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := d.write(d.file(step.file), text, 0o600); err != nil {
			return err
		}
	}
	d.bundle.Store(b)
	return nil
}

// loadAuthority reads the files of Install, or an installer's.
func (d *Directory) loadAuthority() error {
	file := d.file("ca.crt")
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	ca, err := firstCert(data)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if !ca.IsCA {
		return fmt.Errorf("%s is not a certificate authority: put a CA certificate there", file)
	}
	if err := d.checkTime(file, ca); err != nil {
		return err
	}
	b := &Bundle{Authorities: []Authority{{Cert: ca}}}
	for _, c := range certs(data) {
		// An installer's further certificates, such as those above an intermediate authority, count for nothing.
		if made(ca) && made(c) && c.IsCA && !c.Equal(ca) {
			b.Authorities = append(b.Authorities, Authority{Cert: c})
		}
	}
	keys, err := d.loadKeys(b)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(d.file("ca-cross.crt"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	b.Cross = certs(text)
	d.bundle.Store(b)
	if made(ca) && keys > len(b.Authorities) {
		return d.Install(b) // a crash has left the key of an authority that is not trusted, or not yet
	}
	return nil
}

// loadKeys adds the keys in ca.key to their authorities, and returns how many there are.
func (d *Directory) loadKeys(b *Bundle) (int, error) {
	text, err := os.ReadFile(d.file("ca.key"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	all, err := keys(text)
	for _, key := range all {
		for i := range b.Authorities {
			if pub, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool }); ok && pub.Equal(b.Authorities[i].Cert.PublicKey) {
				b.Authorities[i].Key = key
			}
		}
	}
	if b.Signer().Key == nil {
		if err == nil {
			err = errors.New("it is another authority's key, or none")
		}
		return 0, fmt.Errorf("%s does not belong to %s: %w", d.file("ca.key"), d.file("ca.crt"), err)
	}
	return len(all), nil
}
