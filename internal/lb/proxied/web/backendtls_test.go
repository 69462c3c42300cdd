package web

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// door is a Gateway with one route, to the Service web.
type door struct {
	tls      string // of the Gateway
	protocol string // of its listener
	app      string // of the Service's port
	// policed is true if a BackendTLSPolicy targets the Service, and policy is how its node meets it, nil if it cannot.
	policed bool
	policy  *pods.TLS
	clients *proxied.Clients
	cert    *tls.Certificate // of the listener
	pod     netip.AddrPort
}

// routes returns what a node has of the Gateway, at a port.
func (d *door) routes(r *rig, port uint16) *proxied.Routes {
	r.Helper()
	g, route, p := &gwv1.Gateway{}, &gwv1.HTTPRoute{}, &gwv1.BackendTLSPolicy{}
	r.Must(yaml.UnmarshalStrict(fmt.Appendf(nil, "metadata: {name: g, namespace: default}\nspec:\n  gatewayClassName: fairlead\n  tls: {%s}\n"+
		"  listeners: [{name: l, port: %d, protocol: %s, tls: {certificateRefs: [{name: c}]}}]", d.tls, port, d.protocol), g))
	r.Must(yaml.UnmarshalStrict([]byte("metadata: {name: r, namespace: default}\nspec: {parentRefs: [{name: g}], "+
		"rules: [{backendRefs: [{name: web, port: 80}]}]}"), route))
	r.Must(yaml.UnmarshalStrict([]byte("metadata: {name: p, namespace: default}\nspec:\n"+
		"  targetRefs: [{group: '', kind: Service, name: web}]\n  validation: {hostname: web.example.com, wellKnownCACertificates: System}"), p))
	n, cert, web := svc.NameOf(g), svc.Name{Namespace: "default", Name: "c"}, svc.Name{Namespace: "default", Name: "web"}
	ca := trust.Ref{Kind: trust.ConfigMap, Name: svc.Name{Namespace: "default", Name: "ca"}}
	o := &gateway.Objects{
		Gateways: map[svc.Name]*gwv1.Gateway{n: g}, Routes: map[svc.Name]*gwv1.HTTPRoute{svc.NameOf(route): route},
		Secrets: map[svc.Name]gateway.Secret{cert: {}}, Policies: trust.NewPolicies(), Authorities: map[trust.Ref]string{ca: ""},
		Services: map[svc.Name]*services.Service{web: {Ports: []services.Port{{Number: 80, Protocol: d.app}}}},
	}
	if d.policed {
		o.Policies.Set(svc.NameOf(p), p)
	}
	f := gateway.BuildGateway(o, n, nil)
	out := &proxied.Routes{
		Ports: f.Table.Ports, Targets: map[gateway.Target][]netip.AddrPort{}, Certificates: map[svc.Name]*tls.Certificate{cert: d.cert},
		Policies: map[svc.Name]pods.TLS{}, Clients: map[uint16]proxied.Clients{}, Subjects: f.Table.Subjects,
	}
	for _, t := range f.Targets {
		out.Targets[t] = []netip.AddrPort{d.pod}
	}
	if d.policy != nil {
		out.Policies[svc.NameOf(p)] = *d.policy
	}
	if d.clients != nil {
		out.Clients[port] = *d.clients
	}
	return out
}

// opens makes the Service of a rig the front of the Gateway.
func (r *rig) opens(d *door) {
	r.Helper()
	r.service.Routes = d.routes(r, r.At.Port())
	r.service.Spec.Listeners[0].Protocol = map[string]dialect.Protocol{"HTTP": dialect.HTTP, "HTTPS": dialect.HTTPS}[d.protocol]
	r.set()
}

// begun counts connections by how they begin.
type begun struct {
	net.Listener
	tls, plain atomic.Int32
}

func (b *begun) Accept() (net.Conn, error) {
	c, err := b.Listener.Accept()
	return &beginning{Conn: c, of: b}, err
}

type beginning struct {
	net.Conn
	of   *begun
	once sync.Once
}

func (c *beginning) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.once.Do(func() {
			if p[0] == 0x16 { // a record of a handshake
				c.of.tls.Add(1)
			} else {
				c.of.plain.Add(1)
			}
		})
	}
	return n, err
}

// policedPod is a Pod with TLS that answers with the version, and with the subject of the client.
func (r *rig) policedPod(c *tls.Config, second bool) (netip.AddrPort, *begun) {
	r.Helper()
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		text := q.Proto
		if q.TLS != nil && len(q.TLS.PeerCertificates) > 0 {
			text += " " + q.TLS.PeerCertificates[0].Subject.CommonName
		}
		_, _ = io.WriteString(w, text)
	}))
	b := &begun{Listener: s.Listener}
	s.Listener, s.TLS, s.EnableHTTP2 = b, c, second
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	r.Cleanup(s.Close)
	return netip.MustParseAddrPort(s.Listener.Addr().String()), b
}

// gets asks for /, and returns the status and the body.
func (r *rig) gets(c *http.Client, url string) string {
	q, err := http.NewRequest(http.MethodGet, url, nil)
	r.Must(err)
	q.Header.Set("X-Client-Subject", "CN=admin") // who reads it must not have it of a client
	answer, err := c.Do(q)
	if err != nil {
		return "none"
	}
	defer answer.Body.Close()
	body, _ := io.ReadAll(answer.Body)
	return strings.TrimSpace(fmt.Sprintf("%d %s", answer.StatusCode, body))
}

// A backend gets TLS as its policy asks for, in the protocol of its port, and is not spoken to if the policy cannot be met: never
// without TLS.
func TestBackendsWithPolicies(t *testing.T) {
	cert, certPEM, _ := lbtest.Certificate(t, "web.example.com")
	_, otherPEM, _ := lbtest.Certificate(t, "web.example.com")
	right := &pods.TLS{Roots: lbtest.Pool(certPEM), Name: "web.example.com"}
	for what, c := range map[string]struct {
		app    string
		policy *pods.TLS
		second bool // the Pod speaks HTTP/2, too
		want   string
	}{
		"met":                 {"", right, true, "200 HTTP/1.1"},
		"https":               {"https", right, true, "200 HTTP/1.1"},
		"h2c":                 {"kubernetes.io/h2c", right, true, "200 HTTP/2.0"},
		"h2c without HTTP/2":  {"kubernetes.io/h2c", right, false, "502 502 Bad Gateway"},
		"another name":        {"", &pods.TLS{Roots: right.Roots, Name: "other.example.com"}, true, "502 502 Bad Gateway"},
		"another authority":   {"", &pods.TLS{Roots: lbtest.Pool(otherPEM), Name: right.Name}, true, "502 502 Bad Gateway"},
		"no authority":        {"", &pods.TLS{Roots: x509.NewCertPool(), Name: right.Name}, true, "502 502 Bad Gateway"},
		"not met":             {"", nil, true, "503 503 Service Unavailable"},
		"not met, with https": {"https", nil, true, "503 503 Service Unavailable"},
	} {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		pod, conns := r.policedPod(&tls.Config{Certificates: []tls.Certificate{cert}}, c.second)
		r.opens(&door{protocol: "HTTP", app: c.app, policed: true, policy: c.policy, pod: pod})
		if got := r.gets(r.Client(), "http://"+r.At.String()); got != c.want {
			t.Errorf("%s: %s, want %s", what, got, c.want)
		}
		if n := conns.plain.Load(); n > 0 {
			t.Errorf("%s: %d connections without TLS", what, n)
		}
		if n := conns.tls.Load(); c.policy == nil && n > 0 {
			t.Errorf("%s: %d connections", what, n)
		}
	}
}

// A connection whose TLS has ended here goes on by TLS to a backend with a policy, and nowhere while that cannot be met. One that is
// passed on is left as it is.
func TestStreamsWithAPolicy(t *testing.T) {
	own, _, _ := lbtest.Certificate(t, "front.example.com")
	inner, innerPEM, _ := lbtest.Certificate(t, "vault.example.com")
	r := newRig(t, map[string]string{lbProtocol: "http"})
	conns := &begun{Listener: r.Listener()}
	pod := r.PodAt(conns, func(c net.Conn) {
		lbtest.Named("vault")(tls.Server(c, &tls.Config{Certificates: []tls.Certificate{inner}}))
	})
	vault, p := svc.Name{Namespace: "default", Name: "vault"}, &gwv1.BackendTLSPolicy{}
	r.Must(yaml.UnmarshalStrict([]byte("metadata: {name: p, namespace: default}\nspec:\n"+
		"  targetRefs: [{group: '', kind: Service, name: vault}]\n"+
		"  validation: {hostname: vault.example.com, wellKnownCACertificates: System}"), p))
	f := &streamFront{
		cert: &own, policies: trust.NewPolicies(), services: map[svc.Name]netip.AddrPort{vault: pod},
		listeners: `{name: b, port: PORT, protocol: TLS, hostname: pass.example.com, tls: {mode: Passthrough}},
{name: c, port: PORT, protocol: TLS, hostname: end.example.com, tls: {mode: Terminate, certificateRefs: [{name: c}]}}`,
		streams: []*kinds.Stream{streamOf(r, kinds.StreamOfTLS, "metadata: {name: r, namespace: default}\nspec: {parentRefs: [{name: g}], "+
			"hostnames: [pass.example.com, end.example.com], rules: [{backendRefs: [{name: vault, port: 80}]}]}")},
	}
	f.policies.Set(svc.NameOf(p), p)
	met := map[svc.Name]pods.TLS{svc.NameOf(p): {Roots: lbtest.Pool(innerPEM), Name: "vault.example.com"}}
	wrong := map[svc.Name]pods.TLS{svc.NameOf(p): {Roots: lbtest.Pool(innerPEM), Name: "other.example.com"}}
	for what, c := range map[string]struct {
		met  map[svc.Name]pods.TLS
		ends string
	}{"met": {met, "vault x"}, "another name": {wrong, "EOF"}, "not met": {nil, "EOF"}} {
		f.met = c.met
		r.serve(f)
		for host, want := range map[string]string{"pass.example.com": "vault x", "end.example.com": c.ends} {
			d := &net.Dialer{Timeout: lbtest.Patience}
			config := &tls.Config{ServerName: host, InsecureSkipVerify: true} //nolint:gosec // of this test
			conn, err := tls.DialWithDialer(d, "tcp", r.At.String(), config)
			got := fmt.Sprint(err)
			if err == nil {
				got = say(conn, nil, "x")
			}
			if !strings.Contains(got, want) && (want != "EOF" || !strings.Contains(got, "reset")) {
				t.Errorf("%s: %s: %q, want %s", what, host, got, want)
			}
		}
	}
	if n := conns.plain.Load(); n > 0 {
		t.Errorf("%d connections without TLS", n)
	}
}

// Calls of gRPC go on by TLS and HTTP/2, with their errors and streams.
func TestGRPCWithAPolicy(t *testing.T) {
	cert, certPEM, _ := lbtest.Certificate(t, "web.example.com")
	r := newRig(t, map[string]string{lbProtocol: "http"})
	server, l := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{cert}}))), r.Listener()
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	r.opens(&door{protocol: "HTTP", app: "kubernetes.io/h2c", policed: true, pod: netip.MustParseAddrPort(l.Addr().String()),
		policy: &pods.TLS{Roots: lbtest.Pool(certPEM), Name: "web.example.com"}})
	conn, err := grpc.NewClient("passthrough:///"+r.At.String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	r.Must(err)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), lbtest.Patience)
	defer cancel()
	asks := grpc_health_v1.NewHealthClient(conn)
	const serving = grpc_health_v1.HealthCheckResponse_SERVING
	if got, err := asks.Check(ctx, &grpc_health_v1.HealthCheckRequest{}); err != nil || got.Status != serving {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := asks.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: "x"}); !strings.Contains(fmt.Sprint(err), "NotFound") {
		t.Errorf("an error of the Pod's is %v", err)
	}
	stream, err := asks.Watch(ctx, &grpc_health_v1.HealthCheckRequest{})
	r.Must(err)
	if got, err := stream.Recv(); err != nil || got.Status != serving {
		t.Errorf("a stream: %v, %v", got, err)
	}
}

// While the authorities change from one to another no request fails, and kept connections do not outlive what they were verified by:
// not another authority, nor the loss of the policy.
func TestPoliciesChangeUnderLoad(t *testing.T) {
	first, firstPEM, _ := lbtest.Certificate(t, "web.example.com")
	second, secondPEM, _ := lbtest.Certificate(t, "web.example.com")
	r := newRig(t, map[string]string{lbProtocol: "http"})
	var shown atomic.Pointer[tls.Certificate]
	shown.Store(&first)
	show := func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return shown.Load(), nil }
	pod, conns := r.policedPod(&tls.Config{GetCertificate: show}, true)
	d := &door{protocol: "HTTP", policed: true, pod: pod}
	trusts := func(pem ...[]byte) {
		all := []byte(nil)
		for _, p := range pem {
			all = append(all, p...)
		}
		d.policy = &pods.TLS{Roots: lbtest.Pool(all), Name: "web.example.com"}
		r.opens(d)
	}
	trusts(firstPEM)
	url := "http://" + r.At.String()
	var clients sync.WaitGroup
	var asked [3]atomic.Int32
	var failed atomic.Int32
	stop := make(chan struct{})
	for i := range asked {
		client := r.Client()
		clients.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if got := r.gets(client, url); got != "200 HTTP/1.1" {
					failed.Add(1)
				}
				asked[i].Add(1)
			}
		})
	}
	more := func() { // each client begins and ends some requests
		r.Helper()
		for i := range asked {
			until := asked[i].Load() + 5
			testbed.Until(r, "further requests", func() error {
				if n := asked[i].Load(); n < until {
					return fmt.Errorf("%d requests", n)
				}
				return nil
			})
		}
	}
	more()
	trusts(firstPEM, secondPEM)
	more()
	shown.Store(&second)
	more()
	trusts(secondPEM)
	more()
	close(stop)
	clients.Wait()
	if failed.Load() > 0 {
		t.Errorf("%d requests failed", failed.Load())
	}
	kept := r.Client()
	if got := r.gets(kept, url); got != "200 HTTP/1.1" {
		t.Error(got)
	}
	trusts(firstPEM)
	if got := r.gets(kept, url); got != "502 502 Bad Gateway" {
		t.Errorf("by the former authority: %s", got)
	}
	trusts(secondPEM)
	if got := r.gets(kept, url); got != "200 HTTP/1.1" {
		t.Error(got)
	}
	d.policy = nil
	if r.opens(d); r.gets(kept, url) != "503 503 Service Unavailable" {
		t.Error("a backend whose policy cannot be met is spoken to")
	}
	if n := conns.plain.Load(); n > 0 {
		t.Errorf("%d connections without TLS", n)
	}
	d.policed = false
	if r.opens(d); r.gets(kept, url) == "200 HTTP/1.1" || conns.plain.Load() == 0 {
		t.Errorf("without a policy a kept connection goes on; %d connections without TLS", conns.plain.Load())
	}
}

// Two Gateways with different certificates for backends do not share connections to a Pod, nor does one after a change of its own.
func TestCertificatesOfGateways(t *testing.T) {
	cert, certPEM, _ := lbtest.Certificate(t, "web.example.com")
	a, aPEM, _ := lbtest.Certificate(t, "gateway-a")
	b, bPEM, _ := lbtest.Certificate(t, "gateway-b")
	r := newRig(t, map[string]string{lbProtocol: "http"})
	pod, _ := r.policedPod(&tls.Config{
		Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: lbtest.Pool(append(aPEM, bPEM...)),
	}, true)
	roots := lbtest.Pool(certPEM)
	door := &door{protocol: "HTTP", policed: true, pod: pod}
	other := r.Free()
	set := func(one, two *tls.Certificate) {
		r.Helper()
		services := []*proxied.Service{new(r.service), new(r.service)}
		services[1].Name.Name, services[1].Addrs = "second", []netip.Addr{other.Addr()}
		services[1].Spec.Listeners = []dialect.Listener{services[0].Spec.Listeners[0]}
		services[1].Spec.Listeners[0].Port = other.Port()
		for i, cert := range []*tls.Certificate{one, two} {
			door.policy = &pods.TLS{Roots: roots, Name: "web.example.com", Cert: cert}
			services[i].Routes = door.routes(r, services[i].Spec.Listeners[0].Port)
		}
		if failed := r.server.Set(services); len(failed) > 0 {
			r.Fatal(failed)
		}
	}
	client := &http.Client{Transport: &http.Transport{}, Timeout: lbtest.Patience}
	t.Cleanup(client.CloseIdleConnections)
	for i, want := range [][2]string{{"gateway-a", "gateway-b"}, {"gateway-b", "gateway-a"}, {"", "gateway-a"}} {
		set([]*tls.Certificate{&a, &b, nil}[i], []*tls.Certificate{&b, &a, &a}[i])
		for range 5 {
			for j, at := range []netip.AddrPort{r.At, other} {
				expected := "200 HTTP/1.1 " + want[j]
				if want[j] == "" {
					expected = "502 502 Bad Gateway"
				}
				if got := r.gets(client, "http://"+at.String()); got != expected {
					t.Errorf("%d: by %s: %s, want %s", i, at, got, expected)
				}
			}
		}
	}
}

// Clients of a Gateway have the certificate that it asks for. A session that began under other authorities is not taken up again, and
// a kept connection does not go on.
func TestClientsOfAGateway(t *testing.T) {
	server, _, _ := lbtest.Certificate(t, "web.example.com")
	good, goodPEM, _ := lbtest.Certificate(t, "alice")
	bad, badPEM, _ := lbtest.Certificate(t, "mallory")
	r := newRig(t, map[string]string{lbProtocol: "http"})
	const asks = `frontend: {default: {validation: {caCertificateRefs: [{group: "", kind: ConfigMap, name: ca}]}}}`
	d := &door{tls: asks, protocol: "HTTPS", cert: &server}
	d.pod = r.Web(func(w http.ResponseWriter, q *http.Request) {
		_, _ = fmt.Fprint(w, q.Header.Values("X-Client-Subject"))
	})
	url := "https://" + r.At.String()
	with := func(certs ...tls.Certificate) *http.Client {
		c := r.Client()
		c.Transport.(*http.Transport).TLSClientConfig = &tls.Config{
			InsecureSkipVerify: true, ServerName: "web.example.com", //nolint:gosec // of this test
			ClientSessionCache: tls.NewLRUClientSessionCache(4),
			GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { // whatever the server trusts
				if len(certs) == 0 {
					return &tls.Certificate{}, nil
				}
				return &certs[0], nil
			},
		}
		return c
	}
	goods, bads := lbtest.Pool(goodPEM), lbtest.Pool(badPEM)
	for what, c := range map[string]struct {
		clients           *proxied.Clients
		none, good, wrong string
	}{
		"valid ones":        {&proxied.Clients{Roots: goods}, "none", "200 [CN=alice]", "none"},
		"nothing to verify": {nil, "none", "none", "none"},
		"no authority":      {&proxied.Clients{Roots: x509.NewCertPool()}, "none", "none", "none"},
		"insecure":          {&proxied.Clients{Roots: goods, Insecure: true}, "200 []", "200 []", "200 []"},
	} {
		d.clients = c.clients
		r.opens(d)
		for client, want := range map[*http.Client]string{with(): c.none, with(good): c.good, with(bad): c.wrong} {
			if got := r.gets(client, url); got != want {
				t.Errorf("%s: %s, want %s", what, got, want)
			}
		}
	}
	d.protocol, d.clients = "HTTP", nil // nor is a client believed at a port without TLS
	r.opens(d)
	if got := r.gets(r.Client(), "http://"+r.At.String()); got != "200 []" {
		t.Errorf("without TLS: %s", got)
	}
	d.protocol = "HTTPS"
	for _, before := range []*proxied.Clients{{Roots: goods}, {Roots: goods, Insecure: true}} {
		d.clients = before
		r.opens(d)
		kept := with(good)
		if got := r.gets(kept, url); !strings.HasPrefix(got, "200 ") {
			t.Error(got)
		}
		d.clients = &proxied.Clients{Roots: bads}
		r.opens(d)
		if got := r.gets(kept, url); got != "421 421 Misdirected Request" {
			t.Errorf("a kept connection: %s", got)
		}
		kept.CloseIdleConnections()
		if got := r.gets(kept, url); got != "none" {
			t.Errorf("a session: %s", got)
		}
	}
}
