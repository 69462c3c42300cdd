package front

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ocsp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/web"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// respond returns an OCSP response of an authority.
func respond(a *testbed.Authority, o ocsp.Response) []byte {
	a.Helper()
	der, err := ocsp.CreateResponse(a.Cert, a.Cert, o, a.Key)
	if err != nil {
		a.Fatal(err)
	}
	return der
}

// A Secret's OCSP response is stapled while it is valid and for the certificate, as openssl sees it; otherwise an Event
// tells why it is not, and the certificate goes on without.
func TestOCSPStapling(t *testing.T) {
	a, other, now := testbed.NewAuthority(t), testbed.NewAuthority(t), time.Now()
	leaf, key := a.Issue("web.example.com", 7, false)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	pemOf := func(kind string, der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}) }
	secret := &corev1.Secret{Type: corev1.SecretTypeTLS, Data: map[string][]byte{
		corev1.TLSCertKey: pemOf("CERTIFICATE", leaf.Raw), corev1.TLSPrivateKeyKey: pemOf("PRIVATE KEY", keyDER),
		corev1.ServiceAccountRootCAKey: pemOf("CERTIFICATE", a.Cert.Raw),
	}}
	cert, problem := readTLSSecret(secret)
	if problem != "" {
		t.Fatal(problem)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().(*net.TCPAddr).AddrPort()
	_ = l.Close()
	f := New(Options{NodeName: "n1", Server: proxied.New(proxied.Options{Log: slog.New(slog.DiscardHandler), Engine: web.Start})})
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		f.server.Close(ctx)
	})
	n, named := svc.Name{Namespace: "default", Name: "web"}, svc.Name{Namespace: "default", Name: "web-cert"}
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: n.Namespace, Name: n.Name, Annotations: map[string]string{
		dialect.LBTLSSecrets: named.Name}}}
	o.Spec.Type, o.Spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Name: "tls", Port: int32(at.Port())}}
	o.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	mode := corev1.LoadBalancerIPModeProxy
	o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: at.Addr().String(), IPMode: &mode}}
	f.SetClaim(at.Addr(), []svc.Name{n})
	f.SetService(o)
	v, s := f.services[n], &namedSecret{}
	v.listed = true
	f.secrets[secretKey{named, forTLS}] = s
	status := func() string {
		t.Helper()
		if failed := f.server.Set([]*proxied.Service{build(f, n, v)}); len(failed) > 0 {
			t.Fatal(failed)
		}
		cmd := exec.CommandContext(t.Context(), "openssl", "s_client", "-connect", at.String(), "-status", "-servername", "web.example.com")
		cmd.Stdin = strings.NewReader("Q\n")
		out, _ := cmd.CombinedOutput()
		_, text, _ := strings.Cut(string(out), "OCSP response: ")
		first, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
		switch {
		case strings.HasPrefix(first, "no response sent"):
			return "none"
		case strings.Contains(text, "OCSP Response Status: successful") && strings.Contains(text, "Cert Status: good"):
			return "good"
		}
		return string(out)
	}
	good := ocsp.Response{Status: ocsp.Good, SerialNumber: leaf.SerialNumber, ThisUpdate: now.Add(-time.Hour), NextUpdate: now.Add(time.Hour)}
	with := func(change func(*ocsp.Response)) ocsp.Response {
		r := good
		change(&r)
		return r
	}
	for _, c := range []struct {
		what, want, says string
		response         []byte
	}{
		{"none", "none", "", nil},
		{"a good one", "good", "", respond(a, good)},
		{"revoked", "none", "it does not report the certificate as good", respond(a, with(func(r *ocsp.Response) {
			r.Status, r.RevokedAt = ocsp.Revoked, now.Add(-time.Hour)
		}))},
		{"of another certificate", "none", "it is not a response for this certificate", respond(a, with(func(r *ocsp.Response) {
			r.SerialNumber = big.NewInt(8)
		}))},
		{"of another authority", "none", "its issuer did not sign it", respond(other, good)},
		{"without an end", "none", "it has no nextUpdate", respond(a, with(func(r *ocsp.Response) { r.NextUpdate = time.Time{} }))},
		{"expired", "none", "it has expired", respond(a, with(func(r *ocsp.Response) { r.NextUpdate = now.Add(-time.Second) }))},
		{"of the future", "none", "it is not valid yet", respond(a, with(func(r *ocsp.Response) { r.ThisUpdate = now.Add(30 * time.Minute) }))},
		{"garbage", "none", "it is not a response", []byte("x")},
		{"huge", "none", "more than 16384 bytes", make([]byte, maxStaple+1)},
	} {
		if c.response != nil {
			secret.Data[stapleEntry] = c.response
		}
		s.cert = cert
		s.staple, s.stapleProblem = readStaple(secret, cert.Certificate, now)
		if got := status(); got != c.want {
			t.Errorf("%s: %s, want %s", c.what, got, c.want)
		}
		if got := f.inputsLocked(time.Now()).secretProblem(n, v); (got == "") != (c.says == "") || !strings.Contains(got, c.says) {
			t.Errorf("%s: %q, want %q", c.what, got, c.says)
		}
	}
	delete(secret.Data, corev1.ServiceAccountRootCAKey)
	secret.Data[stapleEntry] = respond(a, good)
	if _, problem := readStaple(secret, cert.Certificate, now); !strings.Contains(problem, "the issuer's certificate is neither in") {
		t.Errorf("without the issuer: %q", problem)
	}
	chain := append(cert.Certificate[:1:1], a.Cert.Raw)
	s.staple, s.stapleProblem = readStaple(secret, chain, now)
	if got := status(); got != "good" {
		t.Errorf("with the issuer in the chain: %s", got)
	}
	f.expireStaples(good.NextUpdate.Add(-time.Minute))
	if got := f.inputsLocked(time.Now()).secretProblem(n, v); got != "" {
		t.Errorf("before its end: %q", got)
	}
	f.expireStaples(good.NextUpdate.Add(-time.Second))
	if got := status(); got != "none" ||
		!strings.Contains(f.inputsLocked(time.Now()).secretProblem(n, v), "it has expired; it is not stapled") {
		t.Errorf("at its end: %s, %q", got, f.inputsLocked(time.Now()).secretProblem(n, v))
	}
}
