package certs

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/authentication/authenticator"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

// counted counts the verifications of an authenticator.
type counted struct {
	authenticator.Request
	n int
}

func (c *counted) AuthenticateRequest(r *http.Request) (*authenticator.Response, bool, error) {
	c.n++
	return c.Request.AuthenticateRequest(r)
}

// A certificate is verified once for a connection and set of authorities, once a minute, and not beyond its end. Nothing is remembered of a
// certificate that is not verified, of one by an authority that goes, and of one that nobody has any more.
func TestVerifiedOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // with a clock of its own: its sleeps take no time
		d := directory(t)
		cas := &ClientCAs{}
		cas.set(d.Bundle())
		r := cas.Authenticator().(*remembering)
		count := &counted{Request: r.verify}
		r.verify = count
		verified := func(what string, with *x509.Certificate, user string, want int) {
			t.Helper()
			count.n = 0
			for range 3 {
				req := &http.Request{TLS: &tls.ConnectionState{PeerCertificates: []*x509.Certificate{with}}}
				response, ok, err := r.AuthenticateRequest(req.WithContext(t.Context()))
				if ok != (user != "") || ok && response.User.GetName() != user {
					t.Fatalf("%s: %v, %t, %v; want user %q", what, response, ok, err, user)
				}
			}
			if count.n != want {
				t.Errorf("%s: %d verifications, want %d", what, count.n, want)
			}
		}
		anna, ben, brief := client(t, d, "anna", 0), client(t, d, "ben", 0), client(t, d, "brief", 30*time.Second)
		verified("the first one", anna, "anna", 1)
		verified("the same", anna, "anna", 0)
		verified("another one", ben, "ben", 1)
		verified("a short one", brief, "brief", 1)
		time.Sleep(31 * time.Second)
		verified("after its end", brief, "", 3)
		verified("within a minute", anna, "anna", 0)
		time.Sleep(30 * time.Second)
		verified("after a minute", anna, "anna", 1)
		other := directory(t)
		verified("of a foreign authority", client(t, other, "anna", 0), "", 3)
		cas.set(other.Bundle())
		verified("without its authority", anna, "", 3)
		both := &pki.Bundle{Authorities: []pki.Authority{other.Bundle().Signer(), d.Bundle().Signer()}}
		cas.set(both)
		verified("of an authority that goes", anna, "anna", 3)
		cas.set(d.Bundle())
		verified("with its authority again", anna, "anna", 1)
		if _, ok, err := r.AuthenticateRequest(&http.Request{}); ok || err != nil {
			t.Errorf("a request without TLS: %t, %v", ok, err)
		}
		runtime.KeepAlive([]*x509.Certificate{anna, ben, brief})
	})
}

// What is remembered of a certificate goes with it.
func TestForgottenWithTheCertificate(t *testing.T) {
	t.Parallel()
	d := directory(t)
	cas := &ClientCAs{}
	cas.set(d.Bundle())
	r := cas.Authenticator().(*remembering)
	for range 10 {
		req := &http.Request{TLS: &tls.ConnectionState{PeerCertificates: []*x509.Certificate{client(t, d, "anna", 0)}}}
		if _, ok, err := r.AuthenticateRequest(req); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	for deadline := time.Now().Add(time.Minute); ; {
		runtime.GC()
		left := 0
		r.known.Range(func(any, any) bool { left++; return true })
		if left == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d are remembered, and nobody has them", left)
		}
		runtime.Gosched()
	}
}

// directory returns a new authority.
func directory(t *testing.T) *pki.Directory {
	t.Helper()
	d, err := pki.Open(t.TempDir(), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// client returns a certificate for a user, valid for so long, 0 for the longest.
func client(t *testing.T, d *pki.Directory, user string, life time.Duration) *x509.Certificate {
	t.Helper()
	key, _, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	text, err := d.SignClient(key.Public(), pki.User{Name: user}, life)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}
