package pods

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"net/url"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/trust"
)

// issued returns a certificate of an authority with some names, and the authority.
func issued(t *testing.T, hosts []string, uris ...string) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, key.Public(), key)
	must(err)
	root, err := x509.ParseCertificate(der)
	must(err)
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), NotAfter: time.Now().Add(time.Hour), DNSNames: hosts}
	for _, text := range uris {
		u, err := url.Parse(text)
		must(err)
		leaf.URIs = append(leaf.URIs, u)
	}
	der, err = x509.CreateCertificate(rand.Reader, leaf, root, key.Public(), key)
	must(err)
	pool := x509.NewCertPool()
	pool.AddCert(root)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

// shakes begins TLS to a Pod with a certificate, and returns the name that the Pod was asked for.
func shakes(t *testing.T, with TLS, cert tls.Certificate) (asked string, err error) {
	t.Helper()
	front, back := net.Pipe()
	defer back.Close()
	_ = front.SetDeadline(time.Now().Add(30 * time.Second))
	_ = back.SetDeadline(time.Now().Add(30 * time.Second))
	done := make(chan string, 1)
	go func() {
		name := ""
		c := tls.Server(back, &tls.Config{GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
			name = h.ServerName
			return &cert, nil
		}})
		_ = c.HandshakeContext(t.Context())
		done <- name
	}()
	err = tls.Client(front, with.Config()).HandshakeContext(t.Context())
	_ = front.Close()
	return <-done, err
}

// A Pod is asked for the hostname of its policy, and shows a certificate for it. If the policy has other names, the certificate is for
// one of these: only the hostname is not enough (BackendTLSPolicyValidation of the Gateway API).
func TestNamesOfPods(t *testing.T) {
	const spiffe = "spiffe://cluster.local/ns/a/sa/web"
	host := func(v string) trust.Name { return trust.Name{Value: v} }
	uri := func(v string) trust.Name { return trust.Name{URI: true, Value: v} }
	cert, pool := issued(t, []string{"web.example.com", "*.shop.example.com"}, spiffe)
	_, other := issued(t, nil)
	for what, c := range map[string]struct {
		roots *x509.CertPool
		name  string
		names []trust.Name
		works bool
	}{
		"the hostname":                      {pool, "web.example.com", nil, true},
		"another hostname":                  {pool, "other.example.com", nil, false},
		"another authority":                 {other, "web.example.com", nil, false},
		"no authority":                      {x509.NewCertPool(), "web.example.com", nil, false},
		"a name, whatever the hostname is":  {pool, "other.example.com", []trust.Name{host("web.example.com")}, true},
		"no name, whatever the hostname is": {pool, "web.example.com", []trust.Name{host("other.example.com")}, false},
		"the second name":                   {pool, "x.example.com", []trust.Name{host("other.example.com"), uri(spiffe)}, true},
		"a URI":                             {pool, "x.example.com", []trust.Name{uri(spiffe)}, true},
		"a part of a URI":                   {pool, "x.example.com", []trust.Name{uri("spiffe://cluster.local/ns/a")}, false},
		"a URI as a hostname":               {pool, "x.example.com", []trust.Name{host(spiffe)}, false},
		"a wildcard of the certificate":     {pool, "x.example.com", []trust.Name{host("a.shop.example.com")}, true},
		"two labels for a wildcard":         {pool, "x.example.com", []trust.Name{host("a.b.shop.example.com")}, false},
		"a wildcard of the policy":          {pool, "x.example.com", []trust.Name{host("*.example.com")}, true},
		"the same wildcard":                 {pool, "x.example.com", []trust.Name{host("*.shop.example.com")}, true},
		"another wildcard":                  {pool, "x.example.com", []trust.Name{host("*.com")}, false},
		"a name of another authority":       {other, "x.example.com", []trust.Name{host("web.example.com")}, false},
		"a name without an authority":       {x509.NewCertPool(), "x.example.com", []trust.Name{host("web.example.com")}, false},
	} {
		asked, err := shakes(t, TLS{Roots: c.roots, Name: c.name, Names: JoinNames(c.names)}, cert)
		if (err == nil) != c.works || asked != c.name {
			t.Errorf("%s: %v, asked for %q", what, err, asked)
		}
	}
}
