package dns

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/hubble/seen"
)

// scrape gets one of the paths that monitoring asks for.
func scrape(t testing.TB, s *Server, path string) string {
	t.Helper()
	w := httptest.NewRecorder()
	s.Handler().ServeHTTP(w, httptest.NewRequest("GET", path, nil))
	if ok := w.Code == 200; ok != (w.Body.String() == "OK" || path == "/metrics") {
		t.Errorf("%s: %d with %q", path, w.Code, w.Body)
	}
	return w.Body.String()
}

// corednsMetrics are the metrics of CoreDNS v1.15.0 (plugin/metrics/vars,
// plugin/cache, plugin/forward, plugin/pkg/proxy, plugin/hosts, plugin/autopath,
// plugin/kubernetes) for what both do, with their labels.
const corednsMetrics = `
counter   dns_requests_total                          family proto server type view zone
histogram dns_request_duration_seconds                server view zone
histogram dns_request_size_bytes                      proto server view zone
counter   dns_do_requests_total                       server view zone
histogram dns_response_size_bytes                     proto server view zone
counter   dns_responses_total                         plugin rcode server view zone
gauge     cache_entries                               server type view zones
counter   cache_requests_total                        server view zones
counter   cache_hits_total                            server type view zones
counter   cache_misses_total                          server view zones
counter   cache_prefetch_total                        server view zones
counter   cache_drops_total                           server view zones
counter   cache_served_stale_total                    server view zones
counter   cache_evictions_total                       server type view zones
counter   forward_healthcheck_broken_total
counter   forward_max_concurrent_rejects_total
histogram proxy_request_duration_seconds              proxy_name rcode to
counter   proxy_healthcheck_failures_total            proxy_name to
counter   proxy_conn_cache_hits_total                 proto proxy_name to
counter   proxy_conn_cache_misses_total               proto proxy_name to
gauge     hosts_entries                               hostsfile
gauge     hosts_reload_timestamp_seconds
counter   autopath_success_total                      server
histogram kubernetes_dns_programming_duration_seconds service_kind
gauge     build_info                                  goversion revision version
`

// earlier are metrics that CoreDNS had before, and dashboards still have.
const earlier = `
counter   forward_requests_total                      to
counter   forward_responses_total                     rcode to
histogram forward_request_duration_seconds            rcode to
counter   forward_healthcheck_failures_total          to
`

// Whatever CoreDNS has is here under the same name, of the same kind and with
// the same labels; nothing else bears its prefix.
func TestMetricsAreThoseOfCoreDNS(t *testing.T) {
	file := t.TempDir() + "/hosts"
	if err := os.WriteFile(file, []byte("192.0.2.10 db.corp\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	client := fake.NewClientset()
	o := clusterOptions()
	o.Client, o.Hosts, o.Autopath = client, file, true
	o.Upstream = upstreams(startUpstream(t, answerWith("@ 60 IN A 192.0.2.1")))
	s := start(t, o)
	eventually(t, "ready", s.Ready)
	exchange(t, s, "udp", question("www.example.com.", mdns.TypeA))
	s.follow.ObserveDelay(&discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Annotations: map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().Add(-3 * time.Millisecond).Format(time.RFC3339Nano)},
	}})

	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(s)
	var got []string
	gathered := func() bool {
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got = nil
		for _, f := range families {
			name, ours := strings.CutPrefix(f.GetName(), "coredns_")
			if !ours {
				continue
			}
			line := []string{strings.ToLower(f.GetType().String()), name}
			for _, l := range f.GetMetric()[0].GetLabel() {
				line = append(line, l.GetName())
			}
			got = append(got, strings.Join(line, " "))
			var bounds []float64
			for _, b := range f.GetMetric()[0].GetHistogram().GetBucket() {
				bounds = append(bounds, b.GetUpperBound())
			}
			checkBounds(t, name, bounds)
		}
		return slices.ContainsFunc(got, func(l string) bool { return strings.Contains(l, " dns_responses_total ") })
	}
	// A client has its answer a moment before it is counted.
	eventually(t, "the answer is counted", gathered)
	var want []string
	for line := range strings.Lines(strings.TrimSpace(corednsMetrics) + earlier) {
		want = append(want, strings.Join(strings.Fields(line), " "))
	}
	slices.Sort(want)
	slices.Sort(got)
	if g, w := strings.Join(got, "\n"), strings.Join(want, "\n"); g != w {
		t.Errorf("metrics:\n%s\nwant:\n%s", g, w)
	}
}

// checkBounds sees that histograms have CoreDNS's buckets.
func checkBounds(t *testing.T, name string, got []float64) {
	t.Helper()
	times, sizes := prometheus.ExponentialBuckets(0.00025, 2, 16), []float64{0, 100, 200, 300, 400, 511, 1023, 2047, 4095, 8291, 16e3, 32e3,
		48e3, 64e3}
	want := map[string][]float64{
		"dns_request_duration_seconds":                times,
		"proxy_request_duration_seconds":              times,
		"forward_request_duration_seconds":            times,
		"dns_request_size_bytes":                      sizes,
		"dns_response_size_bytes":                     sizes,
		"kubernetes_dns_programming_duration_seconds": prometheus.ExponentialBuckets(0.001, 2, 20),
	}[name]
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s has the bounds %v, not %v", name, got, want)
	}
}

// Delays are those of changes that a watch brings, not of what was there before.
func TestProgrammingDelay(t *testing.T) {
	client := fake.NewClientset()
	slice := sliceOf("prod", "first", 1)
	slice.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().Add(-time.Hour).Format(time.RFC3339Nano)}
	if err := client.Tracker().Add(slice); err != nil {
		t.Fatal(err)
	}
	o := clusterOptions()
	o.Client = client
	s := start(t, o)
	eventually(t, "ready, and watching", func() bool { return s.Ready() && watching(client) })
	slice = sliceOf("prod", "second", 1)
	slice.Labels[corev1.IsHeadlessService] = ""
	slice.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().Format(time.RFC3339Nano)}
	if _, err := client.DiscoveryV1().EndpointSlices("prod").Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	const name = "coredns_kubernetes_dns_programming_duration_seconds"
	var text string
	eventually(t, "the change is measured", func() bool {
		text = scrape(t, s, "/metrics")
		return strings.Contains(text, name+`_count{service_kind="headless_with_selector"} 1`)
	})
	// An hour would be beyond all bounds.
	if strings.Contains(text, `service_kind="cluster_ip"`) ||
		strings.Contains(text, name+`_bucket{service_kind="headless_with_selector",le="524.288"} 0`) {
		t.Errorf("what is old is measured:\n%s", text)
	}
}

// watching reports whether the slices are watched.
func watching(client *fake.Clientset) bool {
	for _, a := range client.Actions() {
		if a.Matches("watch", "endpointslices") {
			return true
		}
	}
	return false
}

// lines collects what is logged.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// all is everything that was logged.
func (l *lines) all() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// queries are the log lines of questions, without their time.
func (l *lines) queries(t *testing.T) []string {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for line := range strings.Lines(l.text.String()) {
		var q map[string]any
		if err := json.Unmarshal([]byte(line), &q); err != nil {
			t.Fatalf("%v in %q", err, line)
		}
		if q["msg"] != "query" {
			continue
		}
		delete(q, "time")
		if c, err := netip.ParseAddrPort(fmt.Sprint(q["client"])); err != nil || !c.Addr().IsLoopback() || c.Port() == 0 {
			t.Errorf("client %v in %s", q["client"], line)
		}
		if d, ok := q["duration"].(float64); !ok || d <= 0 || d > float64(time.Minute) {
			t.Errorf("duration %v in %s", q["duration"], line)
		}
		delete(q, "client")
		delete(q, "duration")
		b, _ := json.Marshal(q)
		out = append(out, string(b))
	}
	return out
}

// watcher keeps questions, in words, while they are wanted.
type watcher struct {
	wanted atomic.Bool
	got    chan string
}

func (w *watcher) Wants() bool { return w.wanted.Load() }

func (w *watcher) Question(q *seen.Question) {
	m := new(mdns.Msg)
	if err := m.Unpack(q.Answer); err != nil || !q.Client.Addr().IsLoopback() || !q.Server.Addr().IsLoopback() || q.Client == q.Server ||
		q.Latency <= 0 || q.Answered.IsZero() {
		w.got <- fmt.Sprintf("%v: %+v", err, q)
		return
	}
	w.got <- fmt.Sprintf("%s %s %s %d", m.Question[0].Name, q.Protocol, mdns.RcodeToString[m.Rcode], len(m.Answer))
}

// Every question that is wanted is shown with its answer, whoever answers it.
func TestQuestionsAreShown(t *testing.T) {
	w := &watcher{got: make(chan string, 10)}
	o := clusterOptions()
	o.Upstream, o.Questions = upstreams(startUpstream(t, answerWith("@ 60 IN A 192.0.2.1"))), w
	s := start(t, o)
	fill(s.Zone(), objects(t))
	exchange(t, s, "udp", question("my-service.prod.svc.cluster.local.", mdns.TypeA)) // not wanted
	for _, c := range []struct{ network, name, want string }{
		{"udp", "my-service.prod.svc.cluster.local.", "my-service.prod.svc.cluster.local. UDP NOERROR 1"},
		{"tcp", "my-service.prod.svc.cluster.local.", "my-service.prod.svc.cluster.local. TCP NOERROR 1"},
		{"udp", "missing.prod.svc.cluster.local.", "missing.prod.svc.cluster.local. UDP NXDOMAIN 0"},
		{"tcp", "www.example.com.", "www.example.com. TCP NOERROR 1"}, // asked of the upstream
		{"udp", "www.example.com.", "www.example.com. UDP NOERROR 1"}, // kept
	} {
		w.wanted.Store(true)
		exchange(t, s, c.network, question(c.name, mdns.TypeA))
		select {
		case got := <-w.got:
			if got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		case <-time.After(time.Minute):
			t.Fatalf("nothing is shown, want %s", c.want)
		}
	}
}

// Every question has its line, whoever answers it, and only when that is wanted.
func TestQueryLog(t *testing.T) {
	var log lines
	o := clusterOptions()
	o.Upstream = upstreams(startUpstream(t, answerWith("@ 60 IN A 192.0.2.1")))
	o.Logger, o.LogQueries = slog.New(slog.NewJSONHandler(&log, nil)), true
	s := start(t, o)
	fill(s.Zone(), objects(t))
	with := func(name string, typ uint16) *mdns.Msg {
		m := question(name, typ)
		m.SetEdns0(1232, true)
		return m
	}
	var want []string
	for _, c := range []struct {
		network string
		m       *mdns.Msg
		line    string
	}{
		{"udp", question("My-Service.prod.svc.cluster.local.", mdns.TypeA),
			`{"do":false,"level":"INFO","msg":"query",` +
				`"name":"my-service.prod.svc.cluster.local.","proto":"udp","rcode":"NOERROR","size":67,"type":"A"}`},
		{"tcp", with("missing.prod.svc.cluster.local.", mdns.TypeAAAA),
			`{"do":true,"level":"INFO","msg":"query",` +
				`"name":"missing.prod.svc.cluster.local.","proto":"tcp","rcode":"NXDOMAIN","size":113,"type":"AAAA"}`},
		{"udp", question("www.example.com.", mdns.TypeA), // asked of the upstream
			`{"do":false,"level":"INFO","msg":"query","name":"www.example.com.","proto":"udp","rcode":"NOERROR","size":49,"type":"A"}`},
		{"tcp", question("www.example.com.", mdns.TypeA), // kept
			`{"do":false,"level":"INFO","msg":"query","name":"www.example.com.","proto":"tcp","rcode":"NOERROR","size":49,"type":"A"}`},
		{"udp", question("cluster.local.", 65400),
			`{"do":false,"level":"INFO","msg":"query","name":"cluster.local.","proto":"udp","rcode":"NOERROR","size":85,"type":"TYPE65400"}`},
		{"udp", question("cluster.local.", mdns.TypeAXFR),
			`{"do":false,"level":"INFO","msg":"query","name":"cluster.local.","proto":"udp","rcode":"REFUSED","size":31,"type":"AXFR"}`},
	} {
		exchange(t, s, c.network, c.m)
		want = append(want, c.line)
		eventually(t, "the line is there", func() bool { return len(log.queries(t)) >= len(want) })
	}
	bad, _ := question("cluster.local.", mdns.TypeA).Pack()
	raw(t, s, bad[:14])
	want = append(want,
		`{"do":false,"level":"INFO","msg":"query","name":"","proto":"udp","rcode":"FORMERR","size":12,"type":"None"}`,
		`{"do":false,"level":"INFO","msg":"query","name":"cluster.local.","proto":"udp","rcode":"NOERROR","size":85,"type":"SOA"}`)
	eventually(t, "the last line", func() bool { return len(log.queries(t)) >= len(want) })
	if got := log.queries(t); !slices.Equal(got, want) {
		t.Errorf("logged:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}

	var quiet lines
	s = start(t, Options{Logger: slog.New(slog.NewJSONHandler(&quiet, nil)), Upstream: []netip.AddrPort{dead(t)}})
	exchange(t, s, "udp", question("cluster.local.", mdns.TypeSOA))
	if got := quiet.queries(t); len(got) != 0 {
		t.Errorf("no question for %s", got)
	}
}
