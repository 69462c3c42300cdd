package pki

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// clock is a clock that tests set.
type clock struct{ t time.Time }

func (c *clock) now() time.Time { return c.t }

func open(t *testing.T, dir string, c *clock) *Directory {
	t.Helper()
	d, err := Open(dir, c.now)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func ensure(t *testing.T, d *Directory, l Leaf) *Pair {
	t.Helper()
	p, err := d.Ensure(l)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

var server = Leaf{Name: "server", CommonName: "s", DNSNames: []string{"localhost"}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}}

func TestMadeAtFirstAndUsedAfterwards(t *testing.T) {
	dir, c := filepath.Join(t.TempDir(), "pki"), &clock{time.Now()}
	first := ensure(t, open(t, dir, c), server)
	if !first.Renewed {
		t.Error("not new")
	}
	d := open(t, dir, c)
	second := ensure(t, d, server)
	if second.Renewed || string(second.Cert) != string(first.Cert) {
		t.Error("the second start made another certificate")
	}
	roots := x509.NewCertPool()
	roots.AddCert(d.Authority())
	if _, err := second.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: "localhost"}); err != nil {
		t.Error(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 4 {
		t.Fatalf("%d files, %v", len(entries), err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v, want 0600", e.Name(), info.Mode())
		}
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("directory has mode %v, want 0700", info.Mode())
	}
	// The chain carries the authority, by whose hash new nodes know the server.
	var found bool
	for rest := second.Cert; ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			break
		}
		found = found || string(b.Bytes) == string(d.Authority().Raw)
	}
	if !found {
		t.Error("the chain lacks the authority")
	}
}

func TestRenewal(t *testing.T) {
	dir, c := filepath.Join(t.TempDir(), "pki"), &clock{time.Now()}
	first := ensure(t, open(t, dir, c), server)
	c.t = c.t.Add(LeafLife - RenewBefore - time.Hour)
	if p := ensure(t, open(t, dir, c), server); p.Renewed {
		t.Error("renewed with more than RenewBefore left")
	}
	c.t = c.t.Add(2 * time.Hour)
	second := ensure(t, open(t, dir, c), server)
	if !second.Renewed || second.Leaf.SerialNumber.Cmp(first.Leaf.SerialNumber) == 0 {
		t.Error("not renewed with less than RenewBefore left")
	}
	// Long after the end, when even the old one is no longer valid.
	c.t = c.t.Add(3 * LeafLife)
	if p := ensure(t, open(t, dir, c), server); !p.Renewed {
		t.Error("not renewed after its end")
	}
	more := server
	more.IPs = append(more.IPs, net.IPv4(192, 0, 2, 1))
	p := ensure(t, open(t, dir, c), more)
	if err := p.Leaf.VerifyHostname("192.0.2.1"); err != nil || !p.Renewed {
		t.Errorf("a further address: %v", err)
	}
}

// Certificates provided by the installer are used as they are, and their defects
// reported.
func TestBroughtAlong(t *testing.T) {
	dir, c := filepath.Join(t.TempDir(), "pki"), &clock{time.Now()}
	d := open(t, dir, c)
	ensure(t, d, server)
	foreign := func(notBefore, notAfter time.Time) {
		key, keyPEM, err := NewKey()
		if err != nil {
			t.Fatal(err)
		}
		tmpl := *ensure(t, d, server).Leaf
		tmpl.Subject.OrganizationalUnit, tmpl.NotBefore, tmpl.NotAfter = nil, notBefore, notAfter
		tmpl.RawSubject, tmpl.Subject.Names = nil, nil
		der, err := x509.CreateCertificate(rand.Reader, &tmpl, d.Authority(), key.Public(), d.Bundle().Signer().Key)
		if err != nil {
			t.Fatal(err)
		}
		for name, data := range map[string][]byte{"server.crt": encodeCert(der), "server.key": keyPEM} {
			if err := fileio.Replace(filepath.Join(dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	now := c.t
	foreign(now.Add(-time.Hour), now.Add(24*time.Hour))
	if p := ensure(t, open(t, dir, c), server); p.Renewed {
		t.Error("a provided certificate was replaced")
	} else if _, err := tls.X509KeyPair(p.Cert, p.Key); err != nil {
		t.Error(err)
	}
	refused := func(what, want string) {
		t.Helper()
		_, err := open(t, dir, c).Ensure(server)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %v, want one line with %q", what, err, want)
		}
	}
	c.t = now.Add(25 * time.Hour)
	refused("expired", "server.crt expired at")
	c.t = now.Add(-30 * time.Minute)
	os.Remove(filepath.Join(dir, "server.crt"))
	ensure(t, open(t, dir, c), server)
	foreign(now.Add(time.Hour), now.Add(2*time.Hour))
	refused("not yet valid", "set the clock")
	os.Remove(filepath.Join(dir, "server.key"))
	refused("key missing", "is missing: provide both or remove both")
}

func TestWrongAuthority(t *testing.T) {
	c := &clock{time.Now()}
	dir := filepath.Join(t.TempDir(), "pki")
	ensure(t, open(t, dir, c), server)
	other := filepath.Join(t.TempDir(), "pki")
	open(t, other, c)
	// Another authority's certificate beside the first one's key.
	copyFile(t, other, dir, "ca.crt")
	if _, err := Open(dir, c.now); err == nil || !strings.Contains(err.Error(), "ca.key does not belong to") {
		t.Errorf("got %v", err)
	}
	// Both from the other: what the first one signed is renewed.
	copyFile(t, other, dir, "ca.key")
	if p := ensure(t, open(t, dir, c), server); !p.Renewed {
		t.Error("a certificate of another authority was kept")
	}
	// Without the key nothing can be made.
	os.Remove(filepath.Join(dir, "ca.key"))
	d := open(t, dir, c)
	if p := ensure(t, d, server); p.Renewed {
		t.Error("renewed without a key")
	}
	if _, err := d.Ensure(Leaf{Name: "new", CommonName: "n"}); err == nil || !strings.Contains(err.Error(), "ca.key is missing") {
		t.Errorf("got %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.crt"), []byte("rubbish"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, c.now); err == nil || !strings.Contains(err.Error(), "holds no PEM certificate") {
		t.Errorf("got %v", err)
	}
}

func copyFile(t *testing.T, from, to, name string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(from, name))
	if err == nil {
		err = fileio.Replace(filepath.Join(to, name), data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A certificate that was renewed while the clock was ahead is made again once the clock is back.
func TestClockReturns(t *testing.T) {
	c := &clock{time.Now()}
	d := open(t, filepath.Join(t.TempDir(), "pki"), c)
	ensure(t, d, client)
	right := c.t
	c.t = right.AddDate(2, 0, 0)
	ahead := ensure(t, d, client)
	c.t = right
	if !ahead.Leaf.NotBefore.After(right) {
		t.Fatalf("valid from %v already: the clock was not ahead", ahead.Leaf.NotBefore)
	}
	if p := ensure(t, d, client); p.Leaf.NotBefore.After(right) {
		t.Errorf("valid only from %v", p.Leaf.NotBefore)
	}
}

// Clients and etcd read a certificate with its key while it is renewed, without a word to who renews.
func TestReadersWhileRenewed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	d := open(t, dir, &clock{time.Now()})
	ensure(t, d, server)
	file := filepath.Join(dir, "server.crt")
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	read := 0
	wg.Go(func() {
		for ; ctx.Err() == nil; read++ {
			text, err := os.ReadFile(file)
			if err == nil {
				_, err = tls.X509KeyPair(text, text)
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	for range 50 {
		if err := d.Renew(server); err != nil {
			t.Error(err)
		}
	}
	cancel()
	wg.Wait()
	if read < 50 {
		t.Errorf("read %d times", read)
	}
}

// A pair of an earlier version, with the key beside the certificate alone, is used, and brought into one file.
func TestKeyBesideItsCertificate(t *testing.T) {
	dir, c := filepath.Join(t.TempDir(), "pki"), &clock{time.Now()}
	before := ensure(t, open(t, dir, c), server)
	file := filepath.Join(dir, "server.crt")
	if err := os.WriteFile(file, before.Cert, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := KeyFile(file); got != filepath.Join(dir, "server.key") {
		t.Errorf("the key is in %s", got)
	}
	if after := ensure(t, open(t, dir, c), server); !bytes.Equal(after.Cert, before.Cert) || !bytes.Equal(after.Key, before.Key) {
		t.Error("another pair")
	}
	if got := KeyFile(file); got != file {
		t.Errorf("the key is in %s alone", got)
	}
}
