package pki

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// rotation returns the bundles of a rotation, in order: before it, while both authorities are
// trusted, while the new one signs, and after it.
func rotation(t *testing.T, d *Directory) []*Bundle {
	t.Helper()
	before := d.Bundle()
	both, err := d.Successor()
	if err != nil {
		t.Fatal(err)
	}
	old, next := both.Authorities[0], both.Authorities[1]
	return []*Bundle{before, both, {Authorities: []Authority{next, old}, Cross: both.Cross},
		{Authorities: []Authority{next}, Cross: both.Cross}}
}

var client = Leaf{Name: "client", CommonName: "c"}

// A crash between any two writes, there and back, leaves a directory that opens, with the authority before
// or after the step, whose leaves verify, and in which the step can be repeated.
func TestCrashesOfInstall(t *testing.T) {
	c := &clock{time.Now()}
	crash := errors.New("crash")
	crashes := 0
	for step := 1; step <= 3; step++ {
		for _, back := range []bool{false, true} {
			for writes := 0; ; writes++ {
				dir := filepath.Join(t.TempDir(), "pki")
				d := open(t, dir, c)
				ensure(t, d, client)
				bundles := rotation(t, d)
				from, to := bundles[step-1], bundles[step]
				if back {
					from, to = to, from
				}
				for _, b := range []*Bundle{bundles[1], bundles[2], from} {
					if err := d.Install(b); err != nil {
						t.Fatal(err)
					}
				}
				left := writes
				d.write = func(file string, text []byte, mode os.FileMode) error {
					if left--; left < 0 {
						return crash
					}
					return fileio.Replace(file, text, mode)
				}
				crashed := d.Install(to) != nil
				name := fmt.Sprintf("step %d, back %v, after %d writes", step, back, writes)
				d = open(t, dir, c)
				if text, _ := os.ReadFile(filepath.Join(dir, "ca.key")); strings.Count(string(text), "BEGIN") != len(d.Bundle().Authorities) {
					t.Errorf("%s: ca.key has keys of authorities that are not trusted", name)
				}
				if got := string(d.AuthoritiesPEM()); got != string(from.PEM()) && got != string(to.PEM()) {
					t.Errorf("%s: the authorities are of neither step", name)
				}
				verifies(t, name, ensure(t, d, client), d.Bundle())
				if err := d.Install(to); err != nil {
					t.Errorf("%s: repeated: %v", name, err)
				}
				d = open(t, dir, c)
				if string(d.AuthoritiesPEM()) != string(to.PEM()) || d.Bundle().Signer().Key == nil {
					t.Errorf("%s: not installed", name)
				}
				verifies(t, name, ensure(t, d, client), to)
				if !crashed {
					break
				}
				crashes++
			}
		}
	}
	if crashes < 10 {
		t.Errorf("only %d crashes were tried", crashes)
	}
}

// verifies checks a pair as one does who trusts b.
func verifies(t *testing.T, what string, p *Pair, b *Bundle) {
	t.Helper()
	if _, err := tls.X509KeyPair(p.Cert, p.Key); err != nil {
		t.Errorf("%s: %v", what, err)
	}
	rest := x509.NewCertPool()
	rest.AppendCertsFromPEM(p.Cert)
	opts := x509.VerifyOptions{Roots: b.Pool(), Intermediates: rest, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}
	if _, err := p.Leaf.Verify(opts); err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

// Whoever knows only one of the two authorities verifies what the other one signed, and a directory
// renews what the signing one has not.
func TestCrossCertificates(t *testing.T) {
	d := open(t, filepath.Join(t.TempDir(), "pki"), &clock{time.Now()})
	first := ensure(t, d, server)
	bundles := rotation(t, d)
	for i, b := range bundles {
		if err := d.Install(b); err != nil {
			t.Fatal(err)
		}
		p := ensure(t, d, server)
		if p.Renewed != (i == 2) {
			t.Errorf("bundle %d: renewed is %v", i, p.Renewed)
		}
		verifies(t, fmt.Sprintf("bundle %d by the first authority alone", i), p, bundles[0])
		if i > 1 {
			verifies(t, fmt.Sprintf("bundle %d by the new authority alone", i), p, bundles[3])
		}
	}
	// What the old one has signed is not accepted any more.
	for i, b := range bundles { // with whatever was ever published behind it
		rest := x509.NewCertPool()
		for _, c := range b.Cross {
			rest.AddCert(c)
		}
		if _, err := first.Leaf.Verify(x509.VerifyOptions{Roots: d.Bundle().Pool(), Intermediates: rest}); err == nil {
			t.Errorf("a certificate of the old authority verifies after the end, with bundle %d's", i)
		}
	}
	if strings.Contains(string(ensure(t, d, server).Cert), string(bundles[0].PEM())) {
		t.Error("the chain has the old authority after the end: join tokens with its hash would be taken")
	}
}

// A node takes a new authority only from one that it trusts.
func TestVouched(t *testing.T) {
	c := &clock{time.Now()}
	d := open(t, filepath.Join(t.TempDir(), "pki"), c)
	bundles := rotation(t, d)
	trusted := bundles[0].PEM()
	for i, b := range bundles {
		got, err := Vouched(trusted, b.Published())
		if err != nil || string(got) != string(b.PEM()) {
			t.Errorf("bundle %d: %s, %v", i, got, err)
		}
	}
	stranger := open(t, filepath.Join(t.TempDir(), "pki"), c)
	theirs := rotation(t, stranger)
	forged := theirs[0].Signer()
	forged.Cert = bundles[2].Signer().Cert // of the new authority's name, with another key
	renamed, err := cross(forged, theirs[0].Signer())
	if err != nil {
		t.Fatal(err)
	}
	for name, published := range map[string][]byte{
		"another authority":              theirs[0].Published(),
		"with a valid one":               append(bundles[0].PEM(), theirs[0].PEM()...),
		"cross-signed by itself":         append(theirs[1].Published(), bundles[0].PEM()...),
		"without its cross certificate":  bundles[3].PEM(),
		"cross-signed by another of all": append(bundles[3].PEM(), encodeCert(renamed.Raw)...),
		"nothing":                        nil,
		"no PEM":                         []byte("x"),
	} {
		if got, err := Vouched(trusted, published); err == nil {
			t.Errorf("%s: accepted %s", name, got)
		}
	}
}

// An installer's authority has no successor, and its further certificates do not count.
func TestProvidedAuthority(t *testing.T) {
	c := &clock{time.Now()}
	dir := filepath.Join(t.TempDir(), "pki")
	d := open(t, dir, c)
	if err := os.Remove(filepath.Join(dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	if _, err := open(t, dir, c).Successor(); !errors.Is(err, ErrProvided) {
		t.Errorf("without a key: %v", err)
	}
	a := d.Bundle().Signer()
	theirs := *a.Cert
	theirs.Subject.OrganizationalUnit = nil
	own, err := cross(Authority{&theirs, a.Key}, Authority{&theirs, a.Key})
	if err != nil {
		t.Fatal(err)
	}
	provided := &Bundle{Authorities: []Authority{{own, a.Key}, a}}
	if err := d.Install(provided); err != nil {
		t.Fatal(err)
	}
	d = open(t, dir, c)
	if got := d.Bundle().Authorities; len(got) != 1 || !got[0].Cert.Equal(own) {
		t.Errorf("%d authorities are trusted, want the first alone", len(got))
	}
	if _, err := d.Successor(); !errors.Is(err, ErrProvided) {
		t.Errorf("of another name: %v", err)
	}
}
