package lb

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	core "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// pebble is Let's Encrypt's authority for tests, which asks a DNS server of the test for addresses, and connects to port 443.
type pebble struct {
	directory string
	roots     *x509.CertPool // of its own certificate
	issuer    *x509.CertPool // of those that it issues
}

func startPebble(t *testing.T, hosts map[string]netip.Addr) *pebble {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	program := filepath.Join(dir, "pebble")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "github.com/letsencrypt/pebble/v2/cmd/pebble")
	build.Dir = "../../test/pebble"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build in %s: %v\n%s", build.Dir, err, out)
	}
	socket, err := net.Listen("tcp", "127.0.0.1:0") // pebble does not ask by UDP
	must(err)
	names := dns.Server{Listener: socket, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(q)
		question := m.Question[0]
		if a, ok := hosts[strings.TrimSuffix(strings.ToLower(question.Name), ".")]; ok && question.Qtype == dns.TypeA {
			m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: question.Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: a.AsSlice()})
		}
		_ = w.WriteMsg(m)
	})}
	var running sync.WaitGroup
	running.Go(func() { _ = names.ActivateAndServe() })
	t.Cleanup(func() { _ = socket.Close(); running.Wait() })

	a := newAuthority(t)
	leaf, key := a.issue("localhost", 2, false)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	must(err)
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		must(os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	free := func() string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(err)
		defer l.Close()
		_, port, _ := net.SplitHostPort(l.Addr().String())
		return port
	}
	port, management := free(), free()
	config, err := json.Marshal(map[string]any{"pebble": map[string]any{
		"listenAddress": "127.0.0.1:" + port, "managementListenAddress": "127.0.0.1:" + management,
		"certificate": write("cert.pem", "CERTIFICATE", leaf.Raw), "privateKey": write("key.pem", "PRIVATE KEY", keyDER),
		"httpPort": 1, "tlsPort": 443, "retryAfter": map[string]int{"authz": 1, "order": 1},
		"profiles": map[string]any{"default": map[string]any{"description": "default", "validityPeriod": 7776000}},
	}})
	must(err)
	must(os.WriteFile(filepath.Join(dir, "config.json"), config, 0o600))
	cmd := exec.CommandContext(t.Context(), program, "-config", filepath.Join(dir, "config.json"), "-strict",
		"-dnsserver", socket.Addr().String())
	cmd.Env = append(os.Environ(), "PEBBLE_VA_NOSLEEP=1", "PEBBLE_AUTHZREUSE=0")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	must(cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(out.String())
		}
	})
	p := &pebble{directory: "https://localhost:" + port + "/dir", roots: x509.NewCertPool(), issuer: x509.NewCertPool()}
	p.roots.AddCert(a.cert)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: p.roots}, DisableKeepAlives: true}
	client := &http.Client{Timeout: testbed.Patience, Transport: transport}
	testbed.Until(t, "pebble", func() error {
		answer, err := client.Get("https://localhost:" + management + "/roots/0")
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err == nil && !p.issuer.AppendCertsFromPEM(text) {
			err = fmt.Errorf("%q", text)
		}
		return err
	})
	return p
}

// A Service has a certificate ordered from a real authority, which the node that has the address answers: it is kept in the
// Secret that the Service names; a host of another namespace and a Secret that was not made for that are not used
// (RFC 8555, RFC 8737).
func TestACME(t *testing.T) {
	vip := netip.MustParseAddr("127.77.1.1")
	if l, err := net.Listen("tcp", netip.AddrPortFrom(vip, 443).String()); errors.Is(err, os.ErrPermission) {
		t.Skip("port 443 cannot be used")
	} else if err == nil {
		_ = l.Close()
	}
	authority := startPebble(t, map[string]netip.Addr{
		"a.shop.example": vip, "b.shop.example": vip, "c.shop.example": netip.MustParseAddr("127.77.1.2"),
	})
	r := newRig(t)
	log := slog.New(slog.DiscardHandler)
	services := r.client.CoreV1().Services("default")
	balancer := func(name, hosts, secret string, at netip.Addr) *corev1.Service {
		t.Helper()
		o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Annotations: map[string]string{
			dialect.LBACMEHosts: hosts, dialect.LBTLSSecrets: secret}}}
		o.Spec.Type, o.Spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Name: "tls", Port: 443}}
		o, err := services.Create(t.Context(), o, metav1.CreateOptions{})
		r.must(err)
		mode := corev1.LoadBalancerIPModeProxy
		o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: at.String(), IPMode: &mode}}
		o, err = services.UpdateStatus(t.Context(), o, metav1.UpdateOptions{})
		r.must(err)
		return o
	}
	_, err := r.client.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "database"},
		Data: map[string][]byte{"password": []byte("x")}}, metav1.CreateOptions{})
	r.must(err)
	o := balancer("web", "b.shop.example,a.shop.example", "web-cert", vip)
	balancer("thief", "www.bank.example", "thief-cert", netip.MustParseAddr("127.77.1.3"))
	balancer("grabber", "a.shop.example", "database", netip.MustParseAddr("127.77.1.4"))
	balancer("silent", "c.shop.example", "silent-cert", netip.MustParseAddr("127.77.1.2"))

	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	// The node, with what it does of a Secret; nothing makes the address one of its own here.
	p := newProxying(SpeakerOptions{NodeName: "n1", Log: log}, r.client)
	n := svc.Name{Namespace: "default", Name: "web"}
	p.setClaim(vip, []svc.Name{n})
	p.setService(o)
	p.services[n].listed = true
	p.events = events.NewRecorder(r.client, corev1.EventSource{Component: "fairlead-lb-speaker"}, log)
	running.Go(func() {
		defer p.server.Close(ctx)
		for {
			select {
			case <-ctx.Done():
				return
			case <-p.wake:
			}
			p.followSecrets(ctx, &running)
			p.mu.Lock()
			built := p.build(n, p.services[n])
			p.mu.Unlock()
			if built != nil {
				if failed := p.server.Set([]*proxied.Service{built}); len(failed) > 0 {
					t.Errorf("%v", failed)
				}
			}
		}
	})
	own := kubernetes.NewForConfigOrDie(r.own)
	recorder := events.NewRecorder(own, corev1.EventSource{Component: "fairlead-lb"}, log)
	stop := recorder.Start()
	w := &controller{Controller: &Controller{client: own, o: ControllerOptions{Default: true, ACME: &ACME{
		Directory: authority.directory, Email: "ops@shop.example", Roots: authority.roots,
		Domains:     []acme.Domain{{Name: "shop.example", Namespaces: []string{"default"}}, {Name: "bank.example", Namespaces: []string{"bank"}}},
		propagation: time.Second,
	}}}, log: log, events: recorder}
	running.Go(func() { w.newACME().Run(ctx) })

	serial := func() (string, error) {
		d := tls.Dialer{Config: &tls.Config{RootCAs: authority.issuer, ServerName: "b.shop.example"}}
		conn, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(vip, 443).String())
		if err != nil {
			return "", err
		}
		defer conn.Close()
		return conn.(*tls.Conn).ConnectionState().PeerCertificates[0].SerialNumber.String(), nil
	}
	first := ""
	testbed.Until(t, "a certificate that clients trust", func() (err error) { first, err = serial(); return err })
	secret, err := r.client.CoreV1().Secrets("default").Get(ctx, "web-cert", metav1.GetOptions{})
	r.must(err)
	if len(secret.Data) != 2 || secret.Type != corev1.SecretTypeTLS {
		t.Errorf("the Secret is of type %s, with %d entries", secret.Type, len(secret.Data))
	}
	reasons := func() (out []string) {
		list, err := r.client.CoreV1().Events("default").List(ctx, metav1.ListOptions{})
		r.must(err)
		for _, e := range list.Items {
			out = append(out, e.InvolvedObject.Name+" "+e.Reason)
			if strings.Contains(e.Message, "PRIVATE KEY") {
				t.Errorf("%s", e.Message)
			}
		}
		slices.Sort(out)
		return out
	}
	want := []string{"grabber ACMESecretTaken", "silent ACMEOrderFailed", "thief ACMEHostNotAllowed", "web ACMECertificateIssued"}
	testbed.Until(t, "the Events", func() error {
		if got := slices.Compact(reasons()); !slices.Equal(got, want) {
			return fmt.Errorf("%q", got)
		}
		return nil
	})
	failed, err := r.client.CoreV1().Secrets("default").Get(ctx, "silent-cert", metav1.GetOptions{})
	r.must(err)
	if failed.Annotations["fairlead.dev/acme-failures"] != "1" || len(failed.Data) != 2 {
		t.Errorf("%v, %d entries", failed.Annotations, len(failed.Data))
	}
	// Another process goes on with what there is; a certificate that is near its end is replaced, without an end of service.
	again := core.Secret("web-cert", "default").WithType(corev1.SecretTypeTLS).WithData(secret.Data).WithLabels(secret.Labels).
		WithAnnotations(map[string]string{"fairlead.dev/acme-issued": "false"})
	_, err = r.client.CoreV1().Secrets("default").Apply(ctx, again, metav1.ApplyOptions{FieldManager: "fairlead-lb-acme"})
	r.must(err)
	running.Go(func() { w.newACME().Run(ctx) })
	testbed.Until(t, "another certificate", func() error {
		second, err := serial()
		if err != nil {
			t.Errorf("while it is replaced: %v", err)
		} else if second == first {
			err = errors.New("the first one")
		}
		return err
	})
	stop()
	cancel()
	running.Wait()
}
