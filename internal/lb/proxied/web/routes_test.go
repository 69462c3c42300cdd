package web

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"testing"
	"time"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/svc"
)

// routes makes the Service of a rig the front of a Gateway whose route leads /a to one Service and the rest to another.
func (r *rig) routes(protocol string, pods map[string]netip.AddrPort) {
	r.Helper()
	g, route := &gwv1.Gateway{}, &gwv1.HTTPRoute{}
	r.Must(yaml.UnmarshalStrict(fmt.Appendf(nil, "metadata: {name: g, namespace: default}\nspec: {gatewayClassName: fairlead, listeners: ["+
		"{name: l, port: %d, protocol: %s, tls: {certificateRefs: [{name: c}]}}]}", r.At.Port(), protocol), g))
	r.Must(yaml.UnmarshalStrict([]byte("metadata: {name: r, namespace: default}\nspec:\n  parentRefs: [{name: g}]\n  rules:\n"+
		"  - {matches: [{path: {value: /a}}], backendRefs: [{name: a, port: 80}]}\n"+
		"  - {matches: [{path: {value: /r}}], filters: [{type: RequestRedirect, requestRedirect: {hostname: other}}]}\n"+
		"  - {backendRefs: [{name: b, port: 80}]}"), route))
	n, cert := svc.NameOf(g), svc.Name{Namespace: "default", Name: "c"}
	o := &gateway.Objects{
		Gateways: map[svc.Name]*gwv1.Gateway{n: g}, Routes: map[svc.Name]*gwv1.HTTPRoute{svc.NameOf(route): route},
		Services: map[svc.Name]*services.Service{}, Secrets: map[svc.Name]gateway.Secret{cert: {}},
	}
	for _, name := range []string{"a", "b"} {
		ports := []services.Port{{Number: 80, Protocol: r.appProtocol}}
		o.Services[svc.Name{Namespace: "default", Name: name}] = &services.Service{Ports: ports}
	}
	f := gateway.BuildGateway(o, n, nil)
	own, _, _ := lbtest.Certificate(r, "web.example.com")
	r.service.Routes = &proxied.Routes{
		Ports: f.Table.Ports, Targets: map[gateway.Target][]netip.AddrPort{}, Certificates: map[svc.Name]*tls.Certificate{cert: &own},
	}
	for _, t := range f.Targets {
		r.service.Routes.Targets[t] = []netip.AddrPort{pods[t.Name.Name]}
	}
	r.service.Spec.Listeners[0].Protocol = map[string]dialect.Protocol{"HTTP": "http", "HTTPS": "https"}[protocol]
	r.set()
}

// asks sends requests on a connection.
func asks(t *testing.T, c net.Conn, path string) string {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(lbtest.Patience))
	if _, err := io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: web.example.com\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	if to := answer.Header.Get("Location"); to != "" {
		return to
	}
	return string(body)
}

// Requests of one connection go where the routes lead each of them, by HTTP and by HTTPS, and by the routes as they are now.
func TestRequestsAreRouted(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	pod := func(name string) netip.AddrPort {
		return r.Web(func(w http.ResponseWriter, q *http.Request) { _, _ = io.WriteString(w, name+" "+q.RequestURI) })
	}
	pods := map[string]netip.AddrPort{"a": pod("a"), "b": pod("b")}
	r.routes("HTTP", pods)
	c := r.Dial()
	for _, q := range []struct{ path, want string }{
		{"/a/x", "a /a/x"}, {"/", "b /"}, {"//a", "a /a"}, {"/r/x", "http://other:" + strconv.Itoa(int(r.At.Port())) + "/r/x"},
		{"/b/../a?q", "a /a?q"}, {"/x/..;/a", "400 Bad Request\n"}, // the last one of the connection
	} {
		if got := asks(t, c, q.path); got != q.want {
			t.Errorf("%s: %q, want %q", q.path, got, q.want)
		}
	}
	// Each request that a route took is counted for it, with what it became, also one that no Pod got. The last one was for none.
	const of = `kind="HTTPRoute",namespace="default",route="default/r",service="web"} `
	r.shows(`fairlead_lb_route_requests_total{class="2xx",`+of+"4", `fairlead_lb_route_requests_total{class="3xx",`+of+"1",
		"fairlead_lb_route_request_seconds_total{"+of[:len(of)-1]+" some")
	c = r.Dial()
	_ = asks(t, c, "/a")
	pods["a"], pods["b"] = pods["b"], pods["a"]
	r.routes("HTTP", pods)
	if got := asks(t, c, "/a"); got != "b /a" {
		t.Errorf("after a change: %q", got)
	}
	r.routes("HTTPS", pods)
	s := tls.Client(r.Dial(), &tls.Config{ServerName: "web.example.com", InsecureSkipVerify: true})
	if got := asks(t, s, "/a"); got != "b /a" {
		t.Errorf("by HTTPS: %q", got)
	}
}
