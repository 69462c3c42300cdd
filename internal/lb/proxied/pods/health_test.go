package pods

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/lb/proxied/proxyproto"
)

func (c Checks) at(t *testing.T, addr string) error {
	t.Helper()
	c.Timeout = dialect.Duration(lbtest.Patience)
	return c.Probe(t.Context(), netip.MustParseAddrPort(addr))
}

// A check asks as its protocol does, and takes the statuses that are health (behaviours 131 to 134, 146).
func TestProbes(t *testing.T) {
	var status atomic.Int32
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host == "web.example" && r.Method == http.MethodHead {
			w.WriteHeader(http.StatusTeapot)
			return
		}
		if r.RequestURI != "/ready?x=1" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set("Location", "http://192.0.2.1/") // is not followed
		w.WriteHeader(int(status.Load()))
	})
	plain, secure := httptest.NewServer(handler), httptest.NewTLSServer(handler)
	t.Cleanup(plain.Close)
	t.Cleanup(secure.Close)
	for protocol, l := range map[dialect.Protocol]net.Listener{dialect.HTTP: plain.Listener, dialect.HTTPS: secure.Listener} {
		for _, c := range []struct {
			path, codes string
			status      int32
			healthy     bool
		}{
			{"/ready?x=1", "", 200, true}, {"/ready?x=1", "", 302, true}, {"/ready?x=1", "", 500, false}, {"/other", "", 200, false},
			{"/ready?x=1", "200", 204, false}, {"/ready?x=1", "200,401", 401, true}, {"", "404", 200, true},
		} {
			status.Store(c.status)
			h := dialect.Health{Protocol: protocol, Path: c.path, Codes: c.codes}
			if err := (Checks{Health: h}).at(t, l.Addr().String()); (err == nil) != c.healthy {
				t.Errorf("%s %+v: %v", protocol, c, err)
			}
		}
		h := dialect.Health{Protocol: protocol, Host: "web.example", Method: http.MethodHead, Codes: "418"}
		if err := (Checks{Health: h}).at(t, l.Addr().String()); err != nil {
			t.Errorf("%s: a check with a host and a method: %v", protocol, err)
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server, service := grpc.NewServer(), health.NewServer()
	grpc_health_v1.RegisterHealthServer(server, service)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	asks := Checks{Health: dialect.Health{Protocol: dialect.GRPC}}
	if err := asks.at(t, l.Addr().String()); err != nil {
		t.Error(err)
	}
	service.SetServingStatus("", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	if err := asks.at(t, l.Addr().String()); err == nil {
		t.Error("a gRPC server that does not serve is healthy")
	}
	// Another port than that of the connections.
	port := netip.MustParseAddrPort(plain.Listener.Addr().String()).Port()
	if err := (Checks{Health: dialect.Health{Protocol: dialect.TCP, Port: port}}).at(t, "127.0.0.1:1"); err != nil {
		t.Error(err)
	}
}

// Checks of Pods that expect the PROXY protocol have their own header.
func TestProbesSpeakTheProxyProtocol(t *testing.T) {
	for version, want := range map[int]string{1: "PROXY UNKNOWN\r\n", 2: "\r\n\r\n\x00\r\nQUIT\n\x20\x00\x00\x00"} {
		r := lbtest.New(t)
		pod := r.Pod(func(c net.Conn) {
			head := make([]byte, len(want))
			if _, err := io.ReadFull(c, head); err != nil || string(head) != want {
				return
			}
			if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
			}
		})
		if err := (Checks{Health: dialect.Health{Protocol: dialect.HTTP}, Proxy: version}).at(t, pod.String()); err != nil {
			t.Errorf("version %d: %v", version, err)
		}
		if _, _, ok, err := proxyproto.Read(strings.NewReader(want)); ok || err != nil {
			t.Errorf("version %d is read as %t, %v", version, ok, err)
		}
	}
}

// A Pod that has failed its checks stays so when only TLS to it begins otherwise, and begins as a good one with other checks.
func TestUnhealthyWithAnotherCertificate(t *testing.T) {
	r := lbtest.New(t)
	pod := netip.MustParseAddrPort("10.0.0.1:80")
	o := Options{Checks: Checks{Health: dialect.Health{Enabled: true, Interval: dialect.Duration(time.Hour), Path: "/"}}}
	ctx, cancel := context.WithCancel(t.Context())
	p := newPool(t, r.Logger())
	p.ctx = ctx
	defer p.wg.Wait()
	defer cancel()
	p.Set(o, []netip.AddrPort{pod}, 0)
	m := p.members[0]
	m.bad = true
	o.Checks.TLS.Cert = &tls.Certificate{}
	if p.Set(o, []netip.AddrPort{pod}, 0); !m.bad {
		t.Error("it is healthy with another certificate")
	}
	o.Checks.Path = "/other"
	if p.Set(o, []netip.AddrPort{pod}, 0); m.bad {
		t.Error("it fails other checks before the first one")
	}
}

// A check that panics has failed.
func TestPanicOfCheck(t *testing.T) {
	r := lbtest.New(t)
	p := newPool(t, r.Logger())
	counter := p.panics
	p.Set(Options{}, []netip.AddrPort{r.Pod(lbtest.Named("a"))}, 0)
	var none context.Context
	if err := p.probe(none, p.members[0], p.o.Checks); err == nil || counter.Count() != 1 {
		t.Errorf("%v, %d panics", err, counter.Count())
	}
}
