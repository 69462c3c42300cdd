package proxy

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// TestProxyHealth asks for the codes and the body that kube-proxy has.
func TestProxyHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, err := New(Options{Client: fake.NewClientset(), NodeName: "here", Dataplane: newFakeDataplane()})
		if err != nil {
			t.Fatal(err)
		}
		ask := func(h http.HandlerFunc) (int, map[string]any) {
			w := httptest.NewRecorder()
			h(w, nil)
			var body map[string]any
			if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
				t.Fatalf("%v: %s", err, w.Body)
			}
			if w.Header().Get("Content-Type") != "application/json" || w.Header().Get("X-Content-Type-Options") != "nosniff" {
				t.Errorf("headers %v", w.Header())
			}
			return w.Code, body
		}
		expect := func(when string, healthz, livez int, eligible bool) {
			t.Helper()
			code, body := ask(n.serveHealthz)
			if code != healthz || body["nodeEligible"] != eligible || body["lastUpdated"] == nil || body["currentTime"] == nil {
				t.Errorf("%s: /healthz %d %v", when, code, body)
			}
			if serving := n.health.serving(); body["healthy"] != serving {
				t.Errorf("%s: %v: healthy is not %v", when, body, serving)
			}
			if (code == 200) != (body["lastUpdated"] == body["currentTime"]) {
				t.Errorf("%s: %v: lastUpdated is now exactly while all is well", when, body)
			}
			code, body = ask(n.serveLivez)
			if _, has := body["nodeEligible"]; code != livez || has {
				t.Errorf("%s: /livez %d %v", when, code, body)
			}
		}
		expect("before anything is programmed", 503, 200, false)
		n.health.setNode(&corev1.Node{})
		expect("the Node is known, nothing is programmed", 503, 200, true)
		n.health.queued(time.Now())
		n.health.updated(time.Now())
		expect("all is programmed", 200, 200, true)
		time.Sleep(time.Second) // in the bubble
		n.health.queued(time.Now())
		time.Sleep(59 * time.Second)
		n.health.queued(time.Now())
		expect("a change waits for less than the timeout", 200, 200, true)
		time.Sleep(time.Second)
		expect("a change waits for too long", 503, 503, true)
		n.health.updated(time.Now())
		expect("it is programmed", 200, 200, true)
		time.Sleep(time.Second)
		n.health.setTampered(true)
		expect("another program has changed the rules", 503, 200, true)
		n.health.setTampered(false)
		expect("they are repaired", 200, 200, true)
		time.Sleep(time.Second)
		gone := &corev1.Node{Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: toBeDeletedTaint}}}}
		n.health.setNode(gone)
		expect("the autoscaler is about to delete the node", 503, 200, false)
		now := metav1.Now()
		n.health.setNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}})
		expect("the node is being deleted", 503, 200, false)
		n.health.setNode(nil)
		expect("it is gone", 503, 200, false)
		n.health.setNode(&corev1.Node{})
		expect("it is back", 200, 200, true)
		w := httptest.NewRecorder()
		n.Metrics().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		for _, want := range []string{
			`kubeproxy_proxy_healthz_total{code="200"} 5`, `kubeproxy_proxy_healthz_total{code="503"} 7`,
			`kubeproxy_proxy_livez_total{code="503"} 1`,
			"kubeproxy_sync_proxy_rules_duration_seconds_bucket", "kubeproxy_network_programming_duration_seconds_count",
			"process_resident_memory_bytes",
		} {
			if !strings.Contains(w.Body.String(), want) {
				t.Errorf("/metrics has no %s", want)
			}
		}
	})
}

func healthChecked(name string, at uint16, f svc.Family, ready int) *table.ServicePort {
	return &table.ServicePort{
		ID: svc.PortName{Name: svc.Name{Namespace: "d", Name: name}, Port: "p"}, Family: f, Protocol: svc.TCP,
		HealthCheckNodePort: at, LocalReady: ready,
	}
}

// TestHealthPorts asks real sockets on loopback (behaviour 103).
func TestHealthPorts(t *testing.T) {
	healthy := true
	h := newHealthPorts(func() bool { return healthy }, false)
	defer h.close()
	loopback := []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	at := freePort(t)
	ask := func() (int, string, http.Header) {
		r, err := (&http.Client{Timeout: 5 * time.Second,
			Transport: &http.Transport{DisableKeepAlives: true}}).Get(fmt.Sprintf("http://127.0.0.1:%d/", at))
		if err != nil {
			return 0, err.Error(), nil
		}
		defer r.Body.Close()
		body, _ := io.ReadAll(r.Body)
		return r.StatusCode, string(body), r.Header
	}
	show := func(ports ...*table.ServicePort) []serviceProblem {
		tab := table.New(ports...)
		keys := []table.Key{}
		for k := range h.wanted {
			keys = append(keys, k)
		}
		for p := range tab.All() {
			keys = append(keys, p.Key())
		}
		h.update(tab, keys)
		return h.sync(loopback)
	}
	if p := show(healthChecked("lb", at, svc.IPv4, 2), healthChecked("lb", at, svc.IPv6, 1)); p != nil {
		t.Fatal(p)
	}
	code, body, header := ask()
	want := "{\n\t\"service\": {\n\t\t\"namespace\": \"d\",\n\t\t\"name\": \"lb\"\n\t},\n" +
		"\t\"localEndpoints\": 2,\n\t\"serviceProxyHealthy\": true\n}"
	if code != 200 || body != want || header.Get("X-Load-Balancing-Endpoint-Weight") != "2" ||
		header.Get("Content-Type") != "application/json" {
		t.Errorf("with endpoints: %d %q %v", code, body, header)
	}
	healthy = false
	if code, body, _ := ask(); code != 503 || !strings.Contains(body, `"serviceProxyHealthy": false`) {
		t.Errorf("proxy not well: %d %s", code, body)
	}
	healthy = true
	show(healthChecked("lb", at, svc.IPv4, 0))
	if code, _, header := ask(); code != 503 || header.Get("X-Load-Balancing-Endpoint-Weight") != "0" {
		t.Errorf("without endpoints: %d %v", code, header)
	}
	show()
	if code, body, _ := ask(); code != 0 {
		t.Errorf("still open: %d %s", code, body)
	}
	// A port that another process has: said once, opened when it is free.
	taken, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", at))
	if err != nil {
		t.Fatal(err)
	}
	if p := show(healthChecked("lb", at, svc.IPv4, 1)); len(p) != 1 || p[0].service.Name != "lb" {
		t.Errorf("a taken port: %v", p)
	}
	if p := show(healthChecked("lb", at, svc.IPv4, 1)); p != nil {
		t.Errorf("a taken port, again: %v", p)
	}
	taken.Close()
	show(healthChecked("lb", at, svc.IPv4, 1))
	if code, body, _ := ask(); code != 200 {
		t.Errorf("free again: %d %s", code, body)
	}
}

// freePort returns a port of loopback that is free now.
func freePort(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port()
}

// askHealth returns what a health check port answers, 0 if nothing does.
func askHealth(at string, port uint16) int {
	r, err := (&http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}).
		Get("http://" + net.JoinHostPort(at, strconv.Itoa(int(port))))
	if err != nil {
		return 0
	}
	_ = r.Body.Close()
	return r.StatusCode
}

// Each family of a Service is asked about by itself; a Service of one family may
// be asked about by either, and a port that is busy in one family answers in the
// other.
func TestHealthPortsOfFamilies(t *testing.T) {
	h := newHealthPorts(func() bool { return true }, true)
	defer h.close()
	at := freePort(t)
	show := func(ports ...*table.ServicePort) []serviceProblem {
		tab := table.New(ports...)
		keys := slices.Collect(maps.Keys(h.wanted))
		for p := range tab.All() {
			keys = append(keys, p.Key())
		}
		h.update(tab, keys)
		return h.sync(nil)
	}
	expect := func(when string, code4, code6 int) {
		t.Helper()
		if got4, got6 := askHealth("127.0.0.1", at), askHealth("::1", at); got4 != code4 || got6 != code6 {
			t.Errorf("%s: IPv4 %d, IPv6 %d, want %d and %d", when, got4, got6, code4, code6)
		}
	}
	if p := show(healthChecked("lb", at, svc.IPv4, 0), healthChecked("lb", at, svc.IPv6, 2)); p != nil {
		t.Fatal(p)
	}
	expect("endpoints of IPv6 alone", 503, 200)
	show(healthChecked("lb", at, svc.IPv4, 1), healthChecked("lb", at, svc.IPv6, 0))
	expect("endpoints of IPv4 alone", 200, 503)
	show(healthChecked("lb", at, svc.IPv6, 1))
	expect("a Service of IPv6 alone", 200, 200)
	show()
	expect("no Service", 0, 0)

	taken, err := net.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", at))
	if err != nil {
		t.Fatal(err)
	}
	if p := show(healthChecked("lb", at, svc.IPv4, 1), healthChecked("lb", at, svc.IPv6, 1)); len(p) != 1 {
		t.Errorf("busy in IPv4: %v", p)
	}
	if got := askHealth("::1", at); got != 200 {
		t.Errorf("busy in IPv4, asked in IPv6: %d", got)
	}
	_ = taken.Close()
	if p := h.retry(); p != nil {
		t.Errorf("free again: %v", p)
	}
	expect("free again", 200, 200)
}

// A port of /healthz or /metrics that another program has costs neither the
// Services nor the proxy: it is reported, and served once it is free.
func TestBusyPortsAreRetried(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	metrics, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = metrics.Close() }()
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}})
	p := startProxy(t, nil, Options{Client: client, NodeName: "here", Dataplane: newFakeDataplane(),
		HealthzAddress: taken.Addr().String(), MetricsAddress: metrics.Addr().String()})
	ctx := t.Context()
	until(t, "Services are programmed", func() bool { return p.Status().Programmed })
	until(t, "both Events are there", func() bool {
		list, err := client.CoreV1().Events("").List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		for _, e := range list.Items {
			seen[e.Reason] = strings.Contains(e.Message, "address already in use")
		}
		return seen["FailedToStartProxierHealthcheck"] && seen["FailedToServeMetrics"]
	})
	_, _ = taken.Close(), metrics.Close()
	for at, path := range map[net.Addr]string{taken.Addr(): "/healthz", metrics.Addr(): "/metrics"} {
		until(t, path+" is served", func() bool {
			r, err := http.Get("http://" + at.String() + path)
			if err != nil {
				return false
			}
			_ = r.Body.Close()
			return r.StatusCode == 200
		})
	}
}
