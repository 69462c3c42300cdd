package web

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/basic"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// ingress makes the Service of a rig the front of Ingresses, each for a path of its name with annotations "name: value; …" and with a
// Pod.
func (r *rig) ingress(annotations map[string]string, pod netip.AddrPort) {
	r.Helper()
	web, auth := svc.Name{Namespace: "default", Name: "web"}, svc.Name{Namespace: "default", Name: "auth"}
	staff := svc.Name{Namespace: "default", Name: "staff"}
	o := &gateway.Objects{
		Secrets:   map[svc.Name]gateway.Secret{staff: {}},
		Ingresses: map[svc.Name]*networkingv1.Ingress{},
		Services: map[svc.Name]*services.Service{
			web: {Ports: []services.Port{{Number: 80}}}, auth: {Ports: []services.Port{{Number: 8080}}},
		},
	}
	problems := 0
	for name, text := range annotations {
		in := &networkingv1.Ingress{}
		backend := cmp.Or(r.backends[name], "service: {name: web, port: {number: 80}}")
		if r.backends[name] != "" && !strings.Contains(backend, "{name: auth,") {
			problems++
		}
		r.Must(yaml.UnmarshalStrict(fmt.Appendf(nil, "metadata: {namespace: default, name: %s}\nspec: {rules: [{http: {paths: ["+
			"{path: /%s, pathType: Prefix, backend: {%s}}]}}]}", name, name, backend), in))
		in.Annotations = map[string]string{}
		for a := range strings.SplitSeq(text, "; ") {
			if k, v, ok := strings.Cut(a, ": "); ok {
				in.Annotations[nginx.Prefix+k] = v
			}
		}
		if codings, has := r.extra[name]; has {
			in.Annotations["fairlead.dev/lb-compress"] = codings
		}
		o.Ingresses[svc.NameOf(in)] = in
	}
	f := gateway.BuildIngress(o, nil)
	if len(f.Problems) != problems || len(f.Ignored) > 0 {
		r.Fatalf("%v, %v", f.Problems, f.Ignored)
	}
	r.service.Routes = &proxied.Routes{
		Ports: map[uint16]*gateway.Port{r.At.Port(): f.Table.Ports[gateway.IngressHTTP]}, Targets: map[gateway.Target][]netip.AddrPort{},
		Users: map[basic.Source]*basic.Users{{Secret: staff}: r.users},
	}
	for _, t := range f.Targets {
		r.service.Routes.Targets[t] = []netip.AddrPort{pod}
		if t.Name == auth {
			r.service.Routes.Targets[t] = []netip.AddrPort{r.auth}
		}
	}
	r.set()
}

// What the annotations of an Ingress ask for happens to requests: TLS to Pods, bounds of bodies also where their length is not
// announced, ranges of clients, and limits of requests.
func TestAnnotatedIngresses(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	cert, _, _ := lbtest.Certificate(t, "pod")
	pod := r.secureWeb(&tls.Config{Certificates: []tls.Certificate{cert}})
	r.ingress(map[string]string{
		"https": "backend-protocol: HTTPS", "grpcs": "backend-protocol: GRPCS", "body": "backend-protocol: HTTPS; proxy-body-size: 10",
		"allow": "backend-protocol: HTTPS; whitelist-source-range: 127.0.0.0/8", "deny": "denylist-source-range: 127.0.0.0/8",
		"limit": "backend-protocol: HTTPS; limit-rpm: 1; limit-burst-multiplier: 1", "other": "backend-protocol: HTTPS; limit-rpm: 1",
		"away": "permanent-redirect: https://elsewhere.example.com/",
	}, pod)
	ask := func(path string, body io.Reader) string {
		t.Helper()
		client := r.Client()
		client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		answer, err := client.Post("http://"+r.At.String()+path, "text/plain", body)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = answer.Body.Close() }()
		text, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		if answer.StatusCode == http.StatusOK {
			return string(text)
		}
		return strings.TrimSpace(fmt.Sprint(answer.StatusCode, " ", answer.Header.Get("Location")))
	}
	unannounced := func(n int) io.Reader { return io.MultiReader(strings.NewReader(strings.Repeat("x", n))) }
	for _, c := range []struct {
		path string
		body io.Reader
		want string
	}{
		{"/https", nil, "HTTP/1.1"}, {"/grpcs", nil, "HTTP/2.0"},
		{"/body", strings.NewReader("0123456789"), "HTTP/1.1"}, {"/body", strings.NewReader("0123456789a"), "413"},
		{"/body", unannounced(10), "HTTP/1.1"}, {"/body", unannounced(11), "413"}, {"/body", unannounced(1 << 20), "413"},
		{"/https", unannounced(1 << 20), "HTTP/1.1"},
		{"/allow", nil, "HTTP/1.1"}, {"/deny", nil, "403"},
		{"/limit", nil, "HTTP/1.1"}, {"/limit", nil, "HTTP/1.1"}, {"/limit", nil, "429"}, {"/other", nil, "HTTP/1.1"},
		{"/away/x", nil, "301 https://elsewhere.example.com/"},
	} {
		if got := ask(c.path, c.body); got != c.want {
			t.Errorf("%s: %q, want %q", c.path, got, c.want)
		}
	}
}

// A client waits for as many requests of an Ingress as it may, and for no more; once one is answered it may have another one. Other
// Ingresses, and clients of the list, do not count.
func TestConcurrentRequestsOfAClient(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	arrived, release := make(chan bool, 10), make(chan bool)
	r.ingress(map[string]string{
		"two": "limit-connections: 2", "other": "limit-connections: 2", "free": "limit-connections: 1; limit-whitelist: 127.0.0.0/8",
	}, r.Web(func(_ http.ResponseWriter, q *http.Request) {
		arrived <- true
		select {
		case <-release:
		case <-q.Context().Done():
		}
	}))
	done := make(chan string, 10)
	send := func(version int, path string) {
		client := r.clientOf(version)
		go func() {
			answer, err := client.Get("http://" + r.At.String() + path)
			if err != nil {
				done <- err.Error()
				return
			}
			_ = answer.Body.Close()
			done <- answer.Status
		}()
		testbed.Receive(t, "a request for "+path, arrived)
	}
	refused := func(path string) {
		t.Helper()
		for _, version := range []int{1, 2} {
			if answer, _ := r.sends(r.clientOf(version), "GET", path, nil); answer.StatusCode != http.StatusTooManyRequests ||
				answer.Header.Get("Retry-After") == "" {
				t.Errorf("HTTP/%d, %s: %s", version, path, answer.Status)
			}
		}
	}
	send(1, "/two")
	send(2, "/two")
	refused("/two")
	for range 2 {
		send(1, "/other")
		send(2, "/free")
	}
	refused("/two/x")
	for range 6 {
		release <- true
		if got := testbed.Receive(t, "an answer", done); got != "200 OK" {
			t.Error(got)
		}
	}
	send(1, "/two")
	release <- true
	testbed.Receive(t, "an answer", done)
}

// A path whose Service has no endpoint, does not exist or has no such port is answered by the default backend, which is told why; with
// an endpoint again it is not asked. Without one, and for a backend that is no Service, the answer is 500.
func TestDefaultBackends(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.auth = r.Web(func(w http.ResponseWriter, q *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = fmt.Fprint(w, "we are back soon ", q.RequestURI, " ", q.Header.Get("X-Code"), " ", q.Header.Values("X-Original-Uri"), " ",
			q.Header.Get("X-Namespace"), "/", q.Header.Get("X-Ingress-Name"), " ",
			q.Header.Get("X-Service-Name"), ":", q.Header.Get("X-Service-Port"))
	})
	pod := r.Web(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "web") })
	ask := func(path string) string {
		t.Helper()
		q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+r.At.String()+path, nil)
		r.Must(err)
		q.Header.Set("X-Original-Uri", "of the client")
		answer, err := r.Client().Do(q)
		r.Must(err)
		defer func() { _ = answer.Body.Close() }()
		text, err := io.ReadAll(answer.Body)
		r.Must(err)
		return fmt.Sprint(answer.StatusCode, " ", string(text))
	}
	const spare = "default-backend: auth"
	r.backends = map[string]string{
		"gone": "service: {name: gone, port: {number: 8081}}", "port": "service: {name: web, port: {name: admin}}",
		"none": "service: {name: gone, port: {number: 80}}", "file": "resource: {kind: Bucket, name: files}",
	}
	all := map[string]string{"shop": spare, "plain": "", "gone": spare, "port": spare + "; affinity: cookie", "none": "", "file": spare}
	for range 2 {
		r.ingress(all, pod)
		if got := ask("/shop/a"); got != "200 web" {
			t.Errorf("with a Pod: %s", got)
		}
		for path, want := range map[string]string{
			"/gone": "503 we are back soon /gone 503 [/gone] default/gone gone:8081",
			"/port": "503 we are back soon /port 503 [/port] default/port web:",
			"/none": "500 500 Internal Server Error\n", "/file": "500 500 Internal Server Error\n",
		} {
			if got := ask(path); got != want {
				t.Errorf("%s, whose backend cannot be used: %q, want %q", path, got, want)
			}
		}
		without := *r.service.Routes
		without.Targets = maps.Clone(without.Targets)
		for target := range without.Targets {
			if target.Name.Name == "web" {
				without.Targets[target] = nil
			}
		}
		r.service.Routes = &without
		r.set()
		if got := ask("/shop/a?b"); got != "503 we are back soon /shop/a?b 503 [/shop/a?b] default/shop web:80" {
			t.Errorf("without a Pod: %s", got)
		}
		if got := ask("/plain"); got != "503 503 Service Unavailable\n" {
			t.Errorf("without a default backend: %s", got)
		}
	}
}
