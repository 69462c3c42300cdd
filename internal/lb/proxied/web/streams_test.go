package web

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

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

// streamFront is the objects of a Gateway with one port, as text.
type streamFront struct {
	allowed   string // allowedListeners of the Gateway with a comma, "" for the default
	listeners string
	sets      map[svc.Name]*gwv1.ListenerSet
	http      string // HTTPRoute, "" without one
	streams   []*kinds.Stream
	grants    map[svc.Name]*gwv1.ReferenceGrant
	services  map[svc.Name]netip.AddrPort // with their Pod; of UDP if udp
	udp       bool
	cert      *tls.Certificate
	policies  *trust.Policies
	met       map[svc.Name]pods.TLS // how the node meets them
}

// serve makes the Service of a rig that front.
func (r *rig) serve(s *streamFront) {
	r.Helper()
	g := &gwv1.Gateway{}
	r.Must(yaml.UnmarshalStrict([]byte("metadata: {name: g, namespace: default}\nspec: {gatewayClassName: fairlead, "+s.allowed+"listeners: ["+
		strings.ReplaceAll(s.listeners, "PORT", fmt.Sprint(r.At.Port()))+"]}"), g))
	n, cert := svc.NameOf(g), svc.Name{Namespace: "default", Name: "c"}
	o := &gateway.Objects{
		Gateways: map[svc.Name]*gwv1.Gateway{n: g}, Routes: map[svc.Name]*gwv1.HTTPRoute{}, Services: map[svc.Name]*services.Service{},
		Secrets: map[svc.Name]gateway.Secret{cert: {}}, Grants: s.grants, Streams: map[kinds.Route]*kinds.Stream{},
		Sets: s.sets, Policies: s.policies,
	}
	if s.http != "" {
		route := &gwv1.HTTPRoute{}
		r.Must(yaml.UnmarshalStrict([]byte(s.http), route))
		o.Routes[svc.NameOf(route)] = route
	}
	for _, route := range s.streams {
		o.Streams[route.Route()] = route
	}
	for name := range s.services {
		o.Services[name] = &services.Service{Ports: []services.Port{{Number: 80, UDP: s.udp}}}
	}
	f := gateway.BuildGateway(o, n, nil)
	r.service.Routes = &proxied.Routes{
		Ports: f.Table.Ports, Datagrams: f.Table.Datagrams, Targets: map[gateway.Target][]netip.AddrPort{}, Revoked: f.Revoked,
		Certificates: map[svc.Name]*tls.Certificate{cert: s.cert}, Policies: s.met,
	}
	for _, t := range f.Targets {
		r.service.Routes.Targets[t] = []netip.AddrPort{s.services[t.Name]}
	}
	r.service.Spec.Listeners = nil
	for key, protocol := range f.Ports() {
		l := dialect.Listener{Port: key.Number, Protocol: dialect.Protocol(protocol), Backend: dialect.TCP}
		if protocol == "tls" {
			l.Protocol, l.Backend = dialect.HTTPS, dialect.HTTP
		}
		r.service.Spec.Listeners = append(r.service.Spec.Listeners, l)
	}
	r.set()
}

func streamOf[T any](r *rig, read func(*T) *kinds.Stream, text string) *kinds.Stream {
	r.Helper()
	o := new(T)
	r.Must(yaml.UnmarshalStrict([]byte(text), o))
	return read(o)
}

// say sends a line by a connection, and returns the answer or an error.
func say(c net.Conn, err error, line string) string {
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(lbtest.Patience))
	out, err := lbtest.Say(c, line)
	if err != nil {
		return err.Error()
	}
	return out
}

// One port has HTTPS, TLS that is passed on as it is, and TLS that ends here: the name decides. The Pod of the second has the
// certificate, not the load balancer; a name or a client without one reaches nothing.
func TestNamedStreams(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	own, _, _ := lbtest.Certificate(t, "front.example.com")
	inner, _, _ := lbtest.Certificate(t, "pass.example.com")
	secure := r.Pod(func(c net.Conn) {
		t := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{inner}})
		lbtest.Named("secure")(t)
	})
	waits, ended := make(chan struct{}, 1), make(chan struct{}, 1)
	web := r.Web(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/wait" {
			lbtest.Tell(w, q)
			return
		}
		waits <- struct{}{}
		<-q.Context().Done()
		ended <- struct{}{}
	})
	name := func(n string) svc.Name { return svc.Name{Namespace: "default", Name: n} }
	f := &streamFront{
		cert: &own,
		listeners: `{name: a, port: PORT, protocol: HTTPS, hostname: web.example.com, tls: {certificateRefs: [{name: c}]}},
{name: b, port: PORT, protocol: TLS, hostname: "*.example.com", tls: {mode: Passthrough}},
{name: c, port: PORT, protocol: TLS, hostname: end.example.com, tls: {mode: Terminate, certificateRefs: [{name: c}]}}`,
		http: "metadata: {name: r, namespace: default}\nspec: {parentRefs: [{name: g}], rules: [{backendRefs: [{name: web, port: 80}]}]}",
		services: map[svc.Name]netip.AddrPort{
			name("web"): web, name("secure"): secure, name("plain"): r.Pod(lbtest.Named("plain")),
		},
	}
	for host, to := range map[string]string{"pass.example.com": "secure", "end.example.com": "plain", "gone.example.com": "none"} {
		f.streams = append(f.streams, streamOf(r, kinds.StreamOfTLS, "metadata: {name: "+to+", namespace: default}\nspec: "+
			"{parentRefs: [{name: g}], hostnames: ["+host+"], rules: [{backendRefs: [{name: "+to+", port: 80}]}]}"))
	}
	r.serve(f)
	connect := func(name string) (*tls.Conn, error) {
		d := &net.Dialer{Timeout: lbtest.Patience}
		return tls.DialWithDialer(d, "tcp", r.At.String(), &tls.Config{ServerName: name, InsecureSkipVerify: true}) //nolint:gosec // seen below
	}
	for host, want := range map[string][2]string{
		"pass.example.com": {"secure", "pass.example.com"}, "end.example.com": {"plain", "front.example.com"},
	} {
		c, err := connect(host)
		r.Must(err)
		if got := c.ConnectionState().PeerCertificates[0].DNSNames[0]; got != want[1] {
			t.Errorf("%s has the certificate of %s, want %s", host, got, want[1])
		}
		if got := say(c, nil, "x"); !strings.Contains(got, want[0]) {
			t.Errorf("%s: %q, want %s", host, got, want[0])
		}
	}
	r.shows(`fairlead_lb_bytes_total{namespace="default",service="web",to="endpoints"} some`)
	c, err := connect("web.example.com")
	r.Must(err)
	if got := asks(t, c, "/q"); !strings.Contains(got, "/q") {
		t.Errorf("requests: %q", got)
	}
	_, err = io.WriteString(c, "GET /wait HTTP/1.1\r\nHost: web.example.com\r\n\r\n")
	r.Must(err)
	testbed.Receive(t, "the request at the Pod", waits)
	_ = c.Close()
	testbed.Receive(t, "the end of a request whose client has left", ended)
	for _, host := range []string{"other.example.org", "", "x.example.com", "gone.example.com"} {
		if c, err := connect(host); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%q: %v, %v; want a closed connection", host, c, err)
		}
	}
	plain, err := net.Dial("tcp", r.At.String())
	if got := say(plain, err, "GET / HTTP/1.1\r\n\r"); got != io.EOF.Error() && !strings.Contains(got, "reset") {
		t.Errorf("plain text: %q", got)
	}
}

// granted is a front with one route, which leads to Service other/db as a ReferenceGrant allows.
func (r *rig) granted(kind, tlsMode string) *streamFront {
	r.Helper()
	route := "metadata: {name: r, namespace: default}\nspec: {parentRefs: [{name: g}], rules: " +
		"[{backendRefs: [{namespace: other, name: db, port: 80}]}]}"
	f := &streamFront{listeners: "{name: l, port: PORT, protocol: " + kind + "}", udp: kind == "UDP", cert: &tls.Certificate{}}
	switch kind {
	case "TCP":
		f.streams = []*kinds.Stream{streamOf(r, kinds.StreamOfTCP, route)}
	case "UDP":
		f.streams = []*kinds.Stream{streamOf(r, kinds.StreamOfUDP, route)}
	case "TLS":
		route = strings.Replace(route, "spec: {", "spec: {hostnames: [db.example.com], ", 1)
		f.streams = []*kinds.Stream{streamOf(r, kinds.StreamOfTLS, route)}
		f.listeners = "{name: l, port: PORT, protocol: TLS, tls: {mode: " + tlsMode + ", certificateRefs: [{name: c}]}}"
	}
	grant := &gwv1.ReferenceGrant{}
	r.Must(yaml.UnmarshalStrict([]byte("metadata: {name: g, namespace: other}\nspec: {from: [{group: gateway.networking.k8s.io, kind: "+
		kind+"Route, namespace: default}], to: [{group: \"\", kind: Service}]}"), grant))
	f.grants = map[svc.Name]*gwv1.ReferenceGrant{svc.NameOf(grant): grant}
	return f
}

// A connection goes to the backend of the port's route. When the ReferenceGrant for it goes, so do the connections that use it.
func TestStreamsEndWithTheirGrant(t *testing.T) {
	for _, c := range []struct{ kind, tlsMode string }{{"TCP", ""}, {"TLS", "Passthrough"}, {"TLS", "Terminate"}} {
		t.Run(c.kind+c.tlsMode, func(t *testing.T) {
			r := newRig(t, map[string]string{lbProtocol: "http"})
			f := r.granted(c.kind, c.tlsMode)
			cert, _, _ := lbtest.Certificate(t, "db.example.com")
			ended := make(chan struct{}, 1)
			pod := r.Pod(func(conn net.Conn) {
				if c.tlsMode == "Passthrough" {
					conn = tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{cert}})
				}
				lbtest.Named("db")(conn)
				ended <- struct{}{}
			})
			f.cert, f.services = &cert, map[svc.Name]netip.AddrPort{{Namespace: "other", Name: "db"}: pod}
			r.serve(f)
			conn := r.Dial()
			if c.kind == "TLS" {
				conn = tls.Client(conn, &tls.Config{ServerName: "db.example.com", InsecureSkipVerify: true}) //nolint:gosec // of this test
			}
			if got, err := lbtest.Say(conn, "x"); got != "db x\n" {
				t.Fatalf("%q, %v", got, err)
			}
			r.shows(`fairlead_lb_route_connections_total{kind="` + c.kind + `Route",namespace="default",route="` + f.streams[0].Route().String() +
				`",service="web"} 1`)
			f.grants = nil
			r.serve(f)
			testbed.Receive(t, "the end of the connection at the Pod", ended)
			if got, err := lbtest.Say(conn, "y"); err == nil {
				t.Errorf("the grant has gone, and the backend answers %q", got)
			}
		})
	}
}

// A client of UDP goes to the backend of the port's route. When the ReferenceGrant for it goes, the backend gets nothing more.
func TestDatagramsEndWithTheirGrant(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	f := r.granted("UDP", "")
	pod, err := net.ListenPacket("udp", "127.0.0.1:0")
	r.Must(err)
	t.Cleanup(func() { _ = pod.Close() })
	seen := make(chan string, 100)
	go func() {
		buf := make([]byte, 100)
		for {
			n, from, err := pod.ReadFrom(buf)
			if err != nil {
				return
			}
			seen <- string(buf[:n])
			_, _ = pod.WriteTo(buf[:n], from)
		}
	}()
	at := pod.LocalAddr().String()
	f.services = map[svc.Name]netip.AddrPort{{Namespace: "other", Name: "db"}: netip.MustParseAddrPort(at)}
	r.serve(f)
	c, err := net.Dial("udp", r.At.String())
	r.Must(err)
	defer c.Close()
	r.Asks(c, "with the grant")
	r.shows(`fairlead_lb_route_connections_total{kind="UDPRoute",namespace="default",route="` + f.streams[0].Route().String() +
		`",service="web"} 1`)
	f.grants = nil
	r.serve(f)
	testbed.Until(t, "a datagram to be dropped", func() error {
		_, _ = c.Write([]byte("without it"))
		if !strings.Contains(r.Logged.String(), "dropped a datagram, for which there is no route") {
			return errors.New("none is")
		}
		return nil
	})
	direct, err := net.Dial("udp", at)
	r.Must(err)
	defer direct.Close()
	_, err = direct.Write([]byte("the last one"))
	r.Must(err)
	for got := ""; got != "the last one"; {
		if got = testbed.Receive(t, "the last datagram at the Pod", seen); got == "without it" {
			t.Fatal("the grant has gone, and the backend gets a datagram")
		}
	}
}

// When the Gateway no longer allows a ListenerSet, its port is closed. A connection goes on for the time to drain, as one does whose route
// has gone: at once it ends only where the Service does not drain.
func TestConnectionsOfAListenerSetThatIsNoLongerAllowed(t *testing.T) {
	for _, draining := range []string{"true", "false"} {
		r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-draining": draining})
		set := &gwv1.ListenerSet{}
		r.Must(yaml.UnmarshalStrict([]byte("metadata: {name: s, namespace: default}\nspec: {parentRef: {name: g}, listeners: "+
			"[{name: l, port: "+fmt.Sprint(r.At.Port())+", protocol: TCP}]}"), set))
		ended := make(chan struct{}, 1)
		f := &streamFront{
			allowed: "allowedListeners: {namespaces: {from: Same}}, ", sets: map[svc.Name]*gwv1.ListenerSet{svc.NameOf(set): set},
			cert: &tls.Certificate{},
			streams: []*kinds.Stream{streamOf(r, kinds.StreamOfTCP, "metadata: {name: r, namespace: default}\nspec: "+
				"{parentRefs: [{kind: ListenerSet, name: s}], rules: [{backendRefs: [{name: db, port: 80}]}]}")},
			services: map[svc.Name]netip.AddrPort{{Namespace: "default", Name: "db"}: r.Pod(func(c net.Conn) {
				lbtest.Named("db")(c)
				ended <- struct{}{}
			})},
		}
		r.serve(f)
		c := r.Dial()
		if got, err := lbtest.Say(c, "x"); got != "db x\n" {
			t.Fatalf("%q, %v", got, err)
		}
		f.allowed = ""
		r.serve(f)
		if draining == "false" {
			testbed.Receive(t, "the end of the connection at the Pod", ended)
		} else if got, err := lbtest.Say(c, "y"); got != "db y\n" {
			t.Errorf("an open connection has %q, %v", got, err)
		}
		if c, err := net.Dial("tcp", r.At.String()); !testbed.Refused(err) {
			t.Errorf("a new connection: %v, %v, want refused", c, err)
		}
	}
}
