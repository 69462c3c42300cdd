package acme

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/svc"
)

const (
	day  = 24 * time.Hour
	life = 47 * day
	base = "https://authority.test/"
)

// outage is a time in which an authority answers nothing but this.
type outage struct {
	from, to time.Duration
	status   int // 0: connections are refused
}

// memory is an authority in memory, for tests of time: pebble has that of the machine. Its authorizations are valid at once.
type memory struct {
	t       *testing.T
	began   time.Time
	renewal bool // it has renewal information
	outages []outage
	key     *ecdsa.PrivateKey
	root    *x509.Certificate

	mu       sync.Mutex
	serial   int64
	orders   []*memoryOrder
	certs    map[string]*x509.Certificate // by their IDs
	replaced map[string]bool
	refused  int
}

type memoryOrder struct {
	hosts []string
	chain []byte
}

func newMemory(t *testing.T, renewal bool, outages ...outage) *memory {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := &memory{t: t, began: time.Now(), renewal: renewal, outages: outages, key: key,
		certs: map[string]*x509.Certificate{}, replaced: map[string]bool{}}
	a.root = a.sign(&x509.Certificate{
		IsCA: true, BasicConstraintsValid: true, NotBefore: a.began.Add(-day), NotAfter: a.began.Add(1000 * day),
	}, nil, key.Public())
	return a
}

// sign returns a certificate by the authority.
func (a *memory) sign(template, parent *x509.Certificate, key any) *x509.Certificate {
	a.serial++
	template.SerialNumber, template.Subject = big.NewInt(0x7ffe+a.serial), pkix.Name{CommonName: "authority"}
	if parent == nil {
		parent = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key, a.key)
	if err != nil {
		a.t.Error(err)
		return nil
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Error(err)
	}
	return cert
}

// RoundTrip is of http.RoundTripper.
func (a *memory) RoundTrip(r *http.Request) (*http.Response, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	header := http.Header{"Replay-Nonce": {strconv.FormatInt(time.Now().UnixNano(), 10)}}
	var status int
	var body any
	now := time.Since(a.began)
	i := slices.IndexFunc(a.outages, func(o outage) bool { return now >= o.from && now < o.to })
	switch {
	case i >= 0 && a.outages[i].status == 0:
		a.refused++
		return nil, errors.New("connection refused")
	case i >= 0:
		a.refused++
		status, body = a.outages[i].status, map[string]string{"type": errorType + "rateLimited"}
		header.Set("Retry-After", "7200")
	default:
		status, body = a.answer(r, header)
	}
	text, ok := body.([]byte)
	if !ok && body != nil {
		text, _ = json.Marshal(body)
	}
	return &http.Response{
		StatusCode: status, Status: http.StatusText(status), Header: header, Body: io.NopCloser(bytes.NewReader(text)), Request: r,
	}, nil
}

func (a *memory) answer(r *http.Request, header http.Header) (status int, body any) {
	kind, name, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	n, _ := strconv.Atoi(name)
	switch kind {
	case "directory":
		d := map[string]string{"newNonce": base + "nonce", "newAccount": base + "account", "newOrder": base + "orders"}
		if a.renewal {
			d["renewalInfo"] = base + "renewal"
		}
		return http.StatusOK, d
	case "account":
		header.Set("Location", base+"account/1")
		return http.StatusCreated, map[string]string{"status": "valid"}
	case "renewal":
		cert := a.certs[name]
		if cert == nil {
			return http.StatusNotFound, map[string]string{"type": errorType + "malformed"}
		}
		header.Set("Retry-After", "21600")
		from, to := a.window(cert)
		return http.StatusOK, map[string]any{"suggestedWindow": map[string]time.Time{"start": from, "end": to}}
	case "orders":
		return a.newOrder(r, header)
	case "authorization":
		return http.StatusOK, map[string]any{"status": "valid", "identifier": map[string]string{"type": "dns", "value": a.orders[n].hosts[0]}}
	case "finalize":
		var p struct{ CSR string }
		if err := json.Unmarshal(payload(a.t, r), &p); err != nil {
			a.t.Error(err)
		}
		a.issue(a.orders[n], p.CSR)
		header.Set("Location", fmt.Sprint(base, "order/", n))
		return http.StatusOK, a.order(n)
	case "order":
		return http.StatusOK, a.order(n)
	case "certificate":
		return http.StatusOK, a.orders[n].chain
	}
	return http.StatusOK, nil // a nonce
}

// window is when a certificate is to be renewed: a day from the half of its life on.
func (a *memory) window(cert *x509.Certificate) (from, to time.Time) {
	from = cert.NotBefore.Add(life / 2)
	return from, from.Add(day)
}

func (a *memory) newOrder(r *http.Request, header http.Header) (status int, body any) {
	var p struct {
		Identifiers []struct{ Value string }
		Replaces    string
	}
	if err := json.Unmarshal(payload(a.t, r), &p); err != nil {
		a.t.Error(err)
	}
	if p.Replaces != "" {
		if a.replaced[p.Replaces] {
			return http.StatusConflict, map[string]string{"type": errorType + "alreadyReplaced"}
		}
		a.replaced[p.Replaces] = true
		if from, _ := a.window(a.certs[p.Replaces]); time.Now().Before(from) {
			a.t.Errorf("a certificate is replaced %v before its window", time.Until(from))
		}
	}
	o := &memoryOrder{}
	for _, id := range p.Identifiers {
		o.hosts = append(o.hosts, id.Value)
	}
	a.orders = append(a.orders, o)
	header.Set("Location", fmt.Sprint(base, "order/", len(a.orders)-1))
	return http.StatusCreated, a.order(len(a.orders) - 1)
}

func (a *memory) order(n int) map[string]any {
	out := map[string]any{
		"status": "ready", "authorizations": []string{fmt.Sprint(base, "authorization/", n)}, "finalize": fmt.Sprint(base, "finalize/", n),
	}
	if a.orders[n].chain != nil {
		out["status"], out["certificate"] = "valid", fmt.Sprint(base, "certificate/", n)
	}
	return out
}

func (a *memory) issue(o *memoryOrder, request string) {
	der, err := base64.RawURLEncoding.DecodeString(request)
	if err != nil {
		a.t.Error(err)
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		a.t.Error(err)
		return
	}
	cert := a.sign(&x509.Certificate{
		NotBefore: time.Now(), NotAfter: time.Now().Add(life), DNSNames: csr.DNSNames, AuthorityKeyId: a.root.SubjectKeyId,
	}, a.root, csr.PublicKey)
	a.certs[certificateID(cert)] = cert
	o.chain = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
}

// payload returns what a signed request has; pebble checks the signatures.
func payload(t *testing.T, r *http.Request) []byte {
	t.Helper()
	var signed struct{ Payload string }
	text, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(text, &signed)
	}
	out, err2 := base64.RawURLEncoding.DecodeString(signed.Payload)
	if err != nil || err2 != nil {
		t.Errorf("%q: %v, %v", text, err, err2)
	}
	return out
}

// ordering is a Manager that orders for Services from an authority in memory.
type ordering struct {
	client kubernetes.Interface
	mu     sync.Mutex
	events []string
}

func startOrdering(ctx context.Context, running *sync.WaitGroup, a *memory, o Options, services ...*corev1.Service) *ordering {
	r := &ordering{client: fake.NewClientset()}
	for _, s := range services {
		if _, err := r.client.CoreV1().Services(s.Namespace).Create(ctx, s, metav1.CreateOptions{}); err != nil {
			a.t.Fatal(err)
		}
	}
	o.Client, o.Log, o.Directory = r.client, slog.New(slog.DiscardHandler), base+"directory"
	o.Account = svc.Name{Namespace: "kube-system", Name: svc.ACMEAccountSecret}
	o.Domains = []Domain{{Name: "shop.example"}}
	o.Wanted = func(s *corev1.Service) Want { return Want{Hosts: []string{s.Name + ".shop.example"}, Secret: s.Name} }
	o.Event = func(of runtime.Object, _, reason, text string) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.events = append(r.events, of.(*corev1.Service).Name+" "+reason+": "+text)
	}
	m := New(o)
	m.transport = a
	running.Go(func() { m.Run(ctx) })
	return r
}

// greet returns how TLS with a Service that has its Secret begins.
func (r *ordering) greet(ctx context.Context, roots *x509.CertPool, s *corev1.Service) error {
	secret, err := r.client.CoreV1().Secrets(s.Namespace).Get(ctx, s.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	cert, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return err
	}
	client, server := net.Pipe()
	defer client.Close()
	defer server.Close()
	served := make(chan error, 1)
	go func() {
		served <- tls.Server(server, &tls.Config{Certificates: []tls.Certificate{cert}}).HandshakeContext(ctx)
	}()
	c := tls.Client(client, &tls.Config{RootCAs: roots, ServerName: s.Name + ".shop.example", Time: time.Now,
		CurvePreferences: []tls.CurveID{tls.X25519}})
	err = c.HandshakeContext(ctx)
	_ = client.Close()
	<-served
	return err
}

func aService(namespace, name string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
}

// In a year of certificates of 47 days, with three outages of the authority that begin before certificates are renewed, no client gets
// one that has ended: with renewal information (RFC 9773), which also no order is made against, and without.
func TestAYear(t *testing.T) {
	for _, renewal := range []bool{true, false} {
		t.Run(fmt.Sprintf("renewal=%v", renewal), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				defer running.Wait()
				defer cancel()
				// Certificates are renewed after 23.5 days, or 31.3: both are within the first outage at least.
				a := newMemory(t, renewal, outage{20 * day, 34 * day, 0}, outage{150 * day, 164 * day, http.StatusInternalServerError},
					outage{240 * day, 254 * day, http.StatusTooManyRequests})
				services := []*corev1.Service{aService("one", "a")}
				r := startOrdering(ctx, &running, a, Options{Limits: DefaultLimits()}, services...)
				roots := x509.NewCertPool()
				roots.AddCert(a.root)
				time.Sleep(time.Hour)
				greetings := 0
				for time.Since(a.began) < 365*day {
					for _, s := range services {
						if err := r.greet(ctx, roots, s); err != nil {
							t.Errorf("after %v: %v", time.Since(a.began), err)
						}
						greetings++
					}
					time.Sleep(12 * time.Hour)
				}
				a.mu.Lock()
				defer a.mu.Unlock()
				least, replaced := 10, 10 // every 33 days at least
				if !renewal {
					replaced = 0
				}
				if len(a.orders) < least || len(a.orders) > 25 || len(a.replaced) < replaced || !renewal && len(a.replaced) > 0 || a.refused < 6 {
					t.Errorf("%d orders, of which %d replace a certificate; %d questions had no answer", len(a.orders), len(a.replaced), a.refused)
				}
				t.Logf("%d greetings, %d orders, %d replace a certificate", greetings, len(a.orders), len(a.replaced))
			})
		})
	}
}

// A namespace that has its part of what all may have is told when it goes on, and goes on then; another one does not wait.
func TestHeldBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		defer running.Wait()
		defer cancel()
		a := newMemory(t, false)
		r := startOrdering(ctx, &running, a, Options{Limits: Limits{DomainOrders: 2}}, aService("greedy", "a"), aService("greedy", "b"))
		time.Sleep(time.Minute)
		if _, err := r.client.CoreV1().Services("other").Create(ctx, aService("other", "c"), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(8 * day)
		r.mu.Lock()
		defer r.mu.Unlock()
		issued := 0
		for _, e := range r.events {
			if strings.Contains(e, "ACMECertificateIssued") {
				issued++
			}
		}
		until := a.began.Add(42 * time.Hour).UTC().Format("2006-01-02T15:04")
		if len(r.events) < 4 || issued != 3 || !strings.Contains(r.events[1], "ACMEOrderDelayed: no certificate is ordered before "+until) ||
			!strings.HasPrefix(r.events[2], "c ACMECertificateIssued") ||
			!strings.Contains(r.events[1], "2 certificates below shop.example in 7 days (--lb-acme-limits)") {
			t.Errorf("%d certificates; want one delayed until %s:\n%s", issued, until, strings.Join(r.events, "\n"))
		}
	})
}
