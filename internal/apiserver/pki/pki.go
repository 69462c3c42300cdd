// Package pki keeps the certificates of a server in one directory: the
// cluster's authority (ca.crt, ca.key) and what it signed.
//
// Existing files are used, so an installer may provide its own; missing ones are
// made, mode 0600. A certificate that this package made carries the Marker in its
// subject and is renewed when less than a third of its life (at most RenewBefore) is
// left or when it lacks a wanted name; others are only checked.
package pki

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// Lifetimes of what is made, and when the leaves are renewed.
const (
	AuthorityLife = 10 * 365 * 24 * time.Hour
	LeafLife      = 365 * 24 * time.Hour
	RenewBefore   = 30 * 24 * time.Hour
	// maxBackdate lets machines whose clocks lag a little use a new certificate.
	maxBackdate = time.Hour
)

// Marker is the organizational unit in the subject of every leaf made here.
const Marker = "made by fairlead"

// Directory is a directory of certificates with a cluster's authority.
type Directory struct {
	// Life is how long the leaves made here are valid; Open sets it to LeafLife.
	// It may be changed before the first leaf is made.
	Life time.Duration

	path   string
	now    func() time.Time
	write  func(file string, text []byte, mode os.FileMode) error // fileio.Replace, but in tests
	bundle atomic.Pointer[Bundle]
}

// Leaf describes a certificate to be kept: its file name without extension,
// its identity, and for a serving certificate the names it is valid for.
type Leaf struct {
	Name       string
	CommonName string
	Groups     []string
	DNSNames   []string
	IPs        []net.IP
	// Peer is set for a serving certificate that is presented to servers, too.
	Peer bool
}

// Pair is a certificate with its key, both as PEM. Cert ends with the
// authorities' certificates, so that a client which knows only an authority's
// hash can find it in the chain.
type Pair struct {
	Cert, Key []byte
	Leaf      *x509.Certificate
	// Renewed is set when the pair was made or renewed just now.
	Renewed bool

	whole bool // both are in one file
}

// Open opens the directory at path, making it (mode 0700) and the authority
// when they are missing. now is the clock, usually time.Now.
func Open(path string, now func() time.Time) (*Directory, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("cannot make the certificate directory: %w", err)
	}
	d := &Directory{Life: LeafLife, path: path, now: now, write: fileio.Replace}
	_, err := os.Stat(d.file("ca.crt"))
	if errors.Is(err, fs.ErrNotExist) {
		err = d.makeAuthority()
	}
	if err != nil {
		return nil, fmt.Errorf("cannot make the authority in %s: %w", path, err)
	}
	return d, d.loadAuthority()
}

// Bundle returns what the directory signs with and trusts.
func (d *Directory) Bundle() *Bundle { return d.bundle.Load() }

// AuthoritiesPEM returns the certificates of the trusted authorities as PEM, the signing one first.
func (d *Directory) AuthoritiesPEM() []byte { return d.Bundle().PEM() }

// Authority returns the certificate of the authority that signs. It is shared: do not change it.
func (d *Directory) Authority() *x509.Certificate { return d.Bundle().Signer().Cert }

// Hash returns the SHA-256 of a certificate's DER form, in hex.
func Hash(c *x509.Certificate) string {
	sum := sha256.Sum256(c.Raw)
	return hex.EncodeToString(sum[:])
}

// Ensure returns the certificate l, which it makes if it is missing, and renews if
// this package made it and it is about to expire, was made while the clock was ahead, or does not fit l.
func (d *Directory) Ensure(l Leaf) (*Pair, error) {
	p, err := d.load(l.Name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return d.issue(l)
	case err != nil:
		return nil, err
	}
	signer := d.Bundle().Signer()
	now := d.now()
	if made(p.Leaf) && signer.Key != nil &&
		(now.Before(p.Leaf.NotBefore) || now.Add(d.margin()).After(p.Leaf.NotAfter) ||
			!covers(p.Leaf, l) || p.Leaf.CheckSignatureFrom(signer.Cert) != nil) {
		return d.issue(l)
	}
	file := d.file(l.Name + ".crt")
	if err := d.checkTime(file, p.Leaf); err != nil {
		return nil, err
	}
	if err := d.signed(p.Leaf); err != nil {
		return nil, fmt.Errorf("%s is not signed by %s (%w): put the matching pair there, or remove %s and %s.key to have them made",
			file, d.file("ca.crt"), err, file, d.file(l.Name))
	}
	if made(p.Leaf) && !p.whole { // by an earlier version
		return p, d.put(l.Name, p)
	}
	return p, nil
}

// Renew makes the certificate l new, if this package made it or it is missing.
func (d *Directory) Renew(l Leaf) error {
	p, err := d.load(l.Name)
	if err == nil && !made(p.Leaf) {
		return fmt.Errorf("%s was provided by an installer: replace it there", d.file(l.Name+".crt"))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	_, err = d.issue(l)
	return err
}

// margin is the time before its end at which a leaf is renewed.
func (d *Directory) margin() time.Duration { return min(RenewBefore, d.Life/3) }

func (d *Directory) file(name string) string { return filepath.Join(d.path, name) }

func (d *Directory) makeAuthority() error {
	a, err := newAuthority(d.now())
	if err != nil {
		return err
	}
	b := &Bundle{Authorities: []Authority{a}}
	d.bundle.Store(b)
	return d.Install(b)
}

// load reads the pair called name. The error is fs.ErrNotExist if there is no
// certificate.
func (d *Directory) load(name string) (*Pair, error) {
	certFile := d.file(name + ".crt")
	cert, certErr := os.ReadFile(certFile)
	if errors.Is(certErr, fs.ErrNotExist) {
		return nil, certErr
	}
	keyFile := KeyFile(certFile)
	key, keyErr := os.ReadFile(keyFile)
	switch {
	case errors.Is(keyErr, fs.ErrNotExist):
		return nil, fmt.Errorf("%s is there but %s is missing: provide both or remove both", certFile, keyFile)
	case certErr != nil:
		return nil, certErr
	case keyErr != nil:
		return nil, keyErr
	}
	leaf, err := firstCert(cert)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", certFile, err)
	}
	if _, err := tls.X509KeyPair(cert, key); err != nil {
		return nil, fmt.Errorf("%s does not belong to %s: %w", keyFile, certFile, err)
	}
	return &Pair{Cert: d.withAuthority(cert), Key: keyIn(key), Leaf: leaf, whole: keyFile == certFile}, nil
}

// KeyFile returns the file with the key of a certificate: the certificate's own, so that both are replaced at
// once, or, of one by an installer or an earlier version, that with the ending .key.
func KeyFile(certFile string) string {
	text, err := os.ReadFile(certFile)
	if err == nil && keyIn(text) != nil {
		return certFile
	}
	return strings.TrimSuffix(certFile, ".crt") + ".key"
}

// keyIn returns the first private key in PEM text, in PEM.
func keyIn(text []byte) []byte {
	for {
		var b *pem.Block
		if b, text = pem.Decode(text); b == nil {
			return nil
		}
		if strings.HasSuffix(b.Type, "PRIVATE KEY") {
			return pem.EncodeToMemory(b)
		}
	}
}

// put writes a pair. At no time is there no certificate, or one beside a key that is not its own: clients and
// etcd read the files while they are renewed. A separate file has the key, too, for programs that look for it there.
func (d *Directory) put(name string, p *Pair) error {
	if err := d.write(d.file(name+".crt"), slices.Concat(p.Cert, p.Key), 0o600); err != nil {
		return err
	}
	return d.write(d.file(name+".key"), p.Key, 0o600)
}

// withAuthority returns the leaf of a chain, the certificates between it and an installer's
// authority, and the bundle's.
func (d *Directory) withAuthority(chain []byte) (out []byte) {
	for i, c := range certs(chain) {
		if i == 0 || !made(c) && !bytes.Equal(c.Raw, d.Authority().Raw) {
			out = append(out, encodeCert(c.Raw)...)
		}
	}
	return append(out, d.Bundle().chain()...)
}

func (d *Directory) issue(l Leaf) (*Pair, error) {
	b := d.Bundle()
	if b.Signer().Key == nil {
		return nil, fmt.Errorf("%s cannot be made because %s is missing: provide the authority's key, or the pair %s.crt and %s.key",
			d.file(l.Name+".crt"), d.file("ca.key"), l.Name, l.Name)
	}
	key, keyPEM, err := NewKey()
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{
		Subject:     pkix.Name{CommonName: l.CommonName, Organization: l.Groups, OrganizationalUnit: []string{Marker}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		DNSNames:    l.DNSNames,
		IPAddresses: l.IPs,
	}
	if len(l.DNSNames)+len(l.IPs) > 0 {
		t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	}
	if l.Peer {
		t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	}
	der, err := d.sign(b.Signer(), t, key.Public(), d.Life)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	p := &Pair{Cert: append(encodeCert(der), b.chain()...), Key: keyPEM, Leaf: leaf, Renewed: true}
	return p, d.put(l.Name, p)
}

// signed returns nil if an authority of the bundle has signed leaf.
func (d *Directory) signed(leaf *x509.Certificate) (err error) {
	for _, a := range d.Bundle().Authorities {
		if err = leaf.CheckSignatureFrom(a.Cert); err == nil {
			return nil
		}
	}
	return err
}

// checkTime reports a certificate that is not valid now, naming the file and
// the clock: a wrong clock is the usual cause on small machines.
func (d *Directory) checkTime(file string, c *x509.Certificate) error {
	now := d.now()
	switch {
	case now.Before(c.NotBefore):
		return fmt.Errorf("%s is valid only from %s and this machine's clock says %s: set the clock, or replace the file",
			file, stamp(c.NotBefore), stamp(now))
	case now.After(c.NotAfter):
		return fmt.Errorf("%s expired at %s and this machine's clock says %s: replace the file, or set the clock",
			file, stamp(c.NotAfter), stamp(now))
	}
	return nil
}

// covers reports whether c has the identity and all the names of l.
func covers(c *x509.Certificate, l Leaf) bool {
	if c.Subject.CommonName != l.CommonName || !sameSet(c.Subject.Organization, l.Groups) {
		return false
	}
	for _, n := range l.DNSNames {
		if !slices.Contains(c.DNSNames, n) {
			return false
		}
	}
	for _, ip := range l.IPs {
		if !slices.ContainsFunc(c.IPAddresses, ip.Equal) {
			return false
		}
	}
	return true
}

func sameSet(a, b []string) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// NewKey returns a new ECDSA key, and its PEM form.
func NewKey() (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	return key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

func newSerial() (*big.Int, error) {
	// 63 random bits: positive, and unique enough for one authority.
	return rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 63))
}

func encodeCert(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func firstCert(data []byte) (*x509.Certificate, error) {
	for {
		var b *pem.Block
		if b, data = pem.Decode(data); b == nil {
			return nil, errors.New("holds no PEM certificate")
		}
		if b.Type == "CERTIFICATE" {
			return x509.ParseCertificate(b.Bytes)
		}
	}
}
