package node

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// expression is what a panel shows, or what an alert compares. {} is what every dashboard puts between braces.
type expression struct{ where, text string }

// The expressions of the dashboard "Kubernetes / Proxy" and the alerts about kube-proxy in kubernetes-mixin (Apache-2.0),
// https://github.com/kubernetes-monitoring/kubernetes-mixin at aa38e2bfa7ea: dashboards/proxy.libsonnet, alerts/kube_proxy.libsonnet.
var ofProxy = []expression{
	{"Up", `sum(up{})`},
	{"Rules Sync Rate", `sum(rate(kubeproxy_sync_proxy_rules_duration_seconds_count{}[1m]))`},
	{"Rules Sync Latency", `histogram_quantile(0.99, rate(kubeproxy_sync_proxy_rules_duration_seconds_bucket{}[1m]))`},
	{"Network Programming Rate", `sum(rate(kubeproxy_network_programming_duration_seconds_count{}[1m]))`},
	{"Network Programming Latency",
		`histogram_quantile(0.99, sum(rate(kubeproxy_network_programming_duration_seconds_bucket{}[1m])) by (instance, le))`},
	{"Kube API Request Rate 2xx", `sum(rate(rest_client_requests_total{code=~"2.."}[1m]))`},
	{"Kube API Request Rate 3xx", `sum(rate(rest_client_requests_total{code=~"3.."}[1m]))`},
	{"Kube API Request Rate 4xx", `sum(rate(rest_client_requests_total{code=~"4.."}[1m]))`},
	{"Kube API Request Rate 5xx", `sum(rate(rest_client_requests_total{code=~"5.."}[1m]))`},
	{"Post Request Latency",
		`histogram_quantile(0.99, sum(rate(rest_client_request_duration_seconds_bucket{verb="POST"}[1m])) by (verb, le))`},
	{"Get Request Latency",
		`histogram_quantile(0.99, sum(rate(rest_client_request_duration_seconds_bucket{verb="GET"}[1m])) by (verb, le))`},
	{"Memory", `process_resident_memory_bytes{}`},
	{"CPU usage", `rate(process_cpu_seconds_total{}[1m])`},
	{"Goroutines", `go_goroutines{}`},
	{"KubeProxyDown", `up{}`},                     // fires when this is absent
	{"KubeProxyInstanceUnreachable", `up{} != 0`}, // fires when it is 0
}

// Those of CoreDNS in https://github.com/povilasv/coredns-mixin at eb356cfbdcb9 (Apache-2.0): dashboards/coredns.libsonnet with and
// without kubernetesPlugin, alerts/coredns.libsonnet, alerts/forward.libsonnet; and of the dashboard "Kubernetes / System / CoreDNS",
// https://grafana.com/grafana/dashboards/15762 (Apache-2.0), in https://github.com/dotdc/grafana-dashboards-kubernetes at 7fc1dc8ccd23:
// dashboards/k8s-system-coredns.json. What alerts compare is here without the bound, where the bound is far from a healthy server.
var ofDNS = []expression{
	{"instances", `coredns_build_info{}`}, // of both dashboards: without it they have no instance, or no job, to show
	{"Up", `sum(up{})`},
	{"Panics", `sum(coredns_panics_total{})`},
	{"RPC Rate", `sum(rate(coredns_dns_responses_total{}[5m])) by (rcode)`},
	{"RPC Rate forward", `sum(rate(coredns_forward_responses_total{}[5m])) by (rcode)`},
	{"Request duration", `histogram_quantile(0.99, sum(rate(coredns_dns_request_duration_seconds_bucket{}[5m])) by (server, zone, le))`},
	{"Request duration forward", `histogram_quantile(0.99, sum(rate(coredns_forward_request_duration_seconds_bucket{}[5m])) by (to, le))`},
	{"Requests (by qtype)", `sum(rate(coredns_dns_requests_total{}[5m])) by (type)`},
	{"Requests (by zone)", `sum(rate(coredns_dns_requests_total{}[5m])) by (zone)`},
	{"Forward Requests (by to)", `sum(rate(coredns_forward_requests_total{}[5m])) by (to)`},
	{"Kubernetes DNS programming duration",
		`histogram_quantile(0.99, sum(rate(coredns_kubernetes_dns_programming_duration_seconds_bucket{}[5m])) by (service_kind, le))`},
	{"Kubernetes DNS programming duration 50",
		`histogram_quantile(0.50, sum(rate(coredns_kubernetes_dns_programming_duration_seconds_bucket{}[5m])) by (service_kind, le))`},
	{"Plugins Enabled", `count(sum(coredns_plugin_enabled{}) by (name))`},
	{"Request size", `histogram_quantile(0.99, sum(rate(coredns_dns_request_size_bytes_bucket{}[5m])) by (server, zone, proto, le))`},
	{"Request size 50", `histogram_quantile(0.50, sum(rate(coredns_dns_request_size_bytes_bucket{}[5m])) by (server, zone, proto, le))`},
	{"Response size", `histogram_quantile(0.99, sum(rate(coredns_dns_response_size_bytes_bucket{}[5m])) by (server, zone, proto, le))`},
	{"Response size 50", `histogram_quantile(0.50, sum(rate(coredns_dns_response_size_bytes_bucket{}[5m])) by (server, zone, proto, le))`},
	{"Cached", `sum(coredns_cache_hits_total{}) / (sum(coredns_cache_misses_total{}) + sum(coredns_cache_hits_total{}))`},
	{"Cache hit Rate", `sum(rate(coredns_cache_hits_total{}[5m])) by (type)`},
	{"Cache hit Rate misses", `sum(rate(coredns_cache_misses_total{}[5m]))`},
	{"Cache Size", `sum(coredns_cache_entries{}) by (type)`},
	{"Memory", `process_resident_memory_bytes{}`},
	{"CPU usage", `rate(process_cpu_seconds_total{}[5m])`},
	{"Goroutines", `go_goroutines{}`},
	{"CoreDNSDown", `up{} == 1`}, // fires when this is absent
	{"CoreDNSLatencyHigh",
		`histogram_quantile(0.99, sum(rate(coredns_dns_request_duration_seconds_bucket{}[5m])) without (instance,pod))`},
	{"CoreDNSErrorsHigh", `sum without (pod, instance, server, zone, view, rcode, plugin) ` +
		`(rate(coredns_dns_responses_total{rcode="SERVFAIL"}[5m])) / ` +
		`sum without (pod, instance, server, zone, view, rcode, plugin) (rate(coredns_dns_responses_total{}[5m])) > 0.03`},
	{"CoreDNSForwardLatencyHigh",
		`histogram_quantile(0.99, sum(rate(coredns_forward_request_duration_seconds_bucket{}[5m])) without (pod, instance, rcode))`},
	{"CoreDNSForwardErrorsHigh", `sum without (pod, instance, rcode) (rate(coredns_forward_responses_total{rcode="SERVFAIL"}[5m])) / ` +
		`sum without (pod, instance, rcode) (rate(coredns_forward_responses_total{}[5m])) > 0.03`},
	{"CoreDNSForwardHealthcheckFailureCount",
		`sum without (pod, instance) (rate(coredns_forward_healthcheck_failures_total{}[5m]))`},
	{"CoreDNSForwardHealthcheckBrokenCount", `sum without (pod, instance) (rate(coredns_forward_healthcheck_broken_total{}[5m]))`},

	{"15762 Health Status", `up{}`},
	{"15762 CPU Usage", `rate(process_cpu_seconds_total{}[1m])`},
	{"15762 Total DNS Requests", `sum(rate(coredns_dns_requests_total{proto="udp"}[1m]))`},
	{"15762 Average Packet Size", `sum(rate(coredns_dns_request_size_bytes_sum{proto="udp"}[1m])) by (proto) / ` +
		`sum(rate(coredns_dns_request_size_bytes_count{proto="udp"}[1m])) by (proto)`},
	{"15762 Requests by type", `sum(rate(coredns_dns_requests_total{}[1m])) by (type)`},
	{"15762 Requests by return code", `sum(rate(coredns_dns_responses_total{}[1m])) by (rcode)`},
	{"15762 Total Forward Requests", `sum(rate(coredns_proxy_request_duration_seconds_count{proxy_name="forward"}[1m]))`},
	{"15762 DNS Errors",
		`sum(rate(coredns_proxy_request_duration_seconds_count{proxy_name="forward",rcode=~"SERVFAIL|REFUSED"}[1m])) by (rcode)`},
	{"15762 Cache Hits", `sum(rate(coredns_cache_hits_total{}[1m])) by (type)`},
	{"15762 Cache Misses", `sum(rate(coredns_cache_misses_total{}[1m])) by (type)`},
	{"15762 DNS request duration", `sum(increase(coredns_dns_request_duration_seconds_bucket{}[1m])) by (le)`},
	{"15762 DNS request size", `sum(increase(coredns_dns_request_size_bytes_bucket{le!="0"}[1m])) by (le)`},
	{"15762 DNS response size", `sum(increase(coredns_dns_response_size_bytes_bucket{le!="0"}[1m])) by (le)`},
}

// jobs are what Prometheus scrapes, with the reasons why expressions return nothing there.
var jobs = []struct {
	name        string
	expressions []expression
	without     map[string]string
}{
	{"kube-proxy", ofProxy, map[string]string{
		"Kube API Request Rate 3xx": "the API server redirects no request of a proxy",
		"Kube API Request Rate 5xx": "the API server has no fault here",
	}},
	{"kube-dns", ofDNS, map[string]string{
		"Panics":          "without a Corefile nothing goes on after a panic",
		"Plugins Enabled": "without a Corefile there are no plugins",
	}},
	{"coredns", ofDNS, nil},
}

// corefile is that of kubeadm, without what the host of the API server has no use for.
const corefile = `.:53 {
    errors
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
       pods insecure
       fallthrough in-addr.arpa ip6.arpa
       ttl 30
    }
    prometheus 0.0.0.0:9153
    forward . UPSTREAM
    cache 30
    loop
    loadbalance
}
`

// dashboards has Debian's Prometheus scrape the node, and a server of DNS by a Corefile beside the API server, while both work.
type dashboards struct {
	c       *cluster
	servers []netip.AddrPort // of DNS
	rounds  int
}

// dashboardsHaveData evaluates every expression until it returns data, unless the job has a reason why it does not.
func (c *cluster) dashboardsHaveData(upstream string) {
	c.t.Helper()
	d := &dashboards{c: c, servers: []netip.AddrPort{
		netip.MustParseAddrPort(clusterDNS + ":53"), netip.AddrPortFrom(c.server.Addr4(), 53),
	}}
	began := time.Now()
	d.start(upstream)
	missing := map[string]string{}
	for _, job := range jobs {
		names := map[string]bool{}
		for _, e := range job.expressions {
			if names[e.where] {
				c.t.Errorf("two expressions are %s", e.where)
			}
			if names[e.where] = true; job.without[e.where] == "" {
				missing[job.name+": "+e.where] = e.of(job.name)
			}
		}
		for where := range job.without {
			if !names[where] {
				c.t.Errorf("%s: no expression is %s", job.name, where)
			}
		}
	}
	testbed.Until(c.t, "data of every expression", func() error {
		if err := d.round(); err != nil {
			return err
		}
		for where, text := range missing {
			if n, err := d.evaluate(text); err != nil {
				c.t.Fatalf("%s: %v", where, err)
			} else if n > 0 {
				delete(missing, where)
			}
		}
		if len(missing) > 0 {
			return fmt.Errorf("none after %d rounds of %q", d.rounds, slices.Sorted(maps.Keys(missing)))
		}
		return nil
	})
	c.t.Logf("every expression has data after %d rounds, %s", d.rounds, time.Since(began))
	for _, job := range jobs {
		for _, e := range job.expressions {
			if n, err := d.evaluate(e.of(job.name)); job.without[e.where] != "" && (err != nil || n > 0) {
				c.t.Errorf("%s: %s returns %d values (%v), though %s", job.name, e.where, n, err, job.without[e.where])
			}
		}
	}
}

// of is the expression with a dashboard's selection: a job, all instances, and the only cluster, which has no name.
func (e expression) of(job string) string {
	return strings.NewReplacer("{}", "{"+selection(job)+"}", "{", "{"+selection(job)+",").Replace(e.text)
}

func selection(job string) string { return fmt.Sprintf("job=%q,instance=~\".+\",cluster=\"\"", job) }

// start starts the server of DNS and Prometheus.
func (d *dashboards) start(upstream string) {
	c := d.c
	c.t.Helper()
	files := map[string]string{
		"Corefile": strings.ReplaceAll(corefile, "UPSTREAM", upstream),
		"prometheus.yaml": fmt.Sprintf(`
global: {scrape_interval: 500ms, scrape_timeout: 500ms}
scrape_configs:
- {job_name: kube-proxy, static_configs: [{targets: ["127.0.0.1:10249"]}]}
- {job_name: kube-dns, static_configs: [{targets: ["127.0.0.1:9153"], labels: {pod: node}}]}
- {job_name: coredns, static_configs: [{targets: ["%s:9153"], labels: {pod: server}}]}
`, c.server.Addr4()),
	}
	for name, text := range files {
		if err := os.WriteFile(c.path(name), []byte(text), 0o600); err != nil {
			c.t.Fatal(err)
		}
	}
	process.Start(c.t, c.fairlead(c.server, "dns", "--kubeconfig", c.api.Kubeconfig, "--corefile", c.path("Corefile")))
	process.Start(c.t, c.on(c.node, "prometheus", "--config.file", c.path("prometheus.yaml"),
		"--storage.tsdb.path", c.path("tsdb"), "--web.listen-address", "127.0.0.1:9090", "--log.level", "warn"))
	testbed.Until(c.t, "scrapes of every job", func() error {
		if n, err := d.evaluate(`up == 1`); err != nil || n != len(jobs) {
			return fmt.Errorf("%d jobs are up: %w", n, err)
		}
		return nil
	})
}

// round makes every kind of traffic, and waits until all of it is scraped.
func (d *dashboards) round() error {
	d.rounds++
	if err := d.change(); err != nil {
		return err
	}
	for name, want := range map[string]int{
		"kubernetes.default.svc.cluster.local.": dns.RcodeSuccess, "www.example.com.": dns.RcodeSuccess,
		fmt.Sprintf("n%d.example.com.", d.rounds):      dns.RcodeNameError,
		fmt.Sprintf("n%d.fail.example.com.", d.rounds): dns.RcodeServerFailure,
	} {
		for _, at := range d.servers {
			if err := d.ask(at, name, want); err != nil {
				return fmt.Errorf("%s of %s: %w", name, at, err)
			}
		}
	}
	after := time.Now()
	testbed.Until(d.c.t, "a scrape of every job", func() error {
		if n, err := d.evaluate(fmt.Sprintf("timestamp(up) > %d.%03d", after.Unix(), after.Nanosecond()/1e6)); err != nil || n != len(jobs) {
			return fmt.Errorf("%d: %w", n, err)
		}
		return nil
	})
	return nil
}

// change makes a Service, whose endpoints the controller writes and the node programs, and a Pod, of which the node writes Events.
func (d *dashboards) change() error {
	client, err := d.c.client()
	if err != nil {
		return err
	}
	_, err = client.CoreV1().Services("default").Create(d.c.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "round-"},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "MyApp"}, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	_, err = client.CoreV1().Pods("default").Create(d.c.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "round-"},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever,
			Containers:    []corev1.Container{{Name: "main", Image: "host", Command: []string{"true"}}},
		},
	}, metav1.CreateOptions{})
	return err
}

// ask asks one question from the node.
func (d *dashboards) ask(at netip.AddrPort, name string, want int) error {
	conn, err := d.c.node.Dial(d.c.t.Context(), svc.UDP, at)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	answer, _, err := new(dns.Client).ExchangeWithConn(new(dns.Msg).SetQuestion(name, dns.TypeA), &dns.Conn{Conn: conn})
	if err == nil && answer.Rcode != want {
		err = fmt.Errorf("answered %s", dns.RcodeToString[answer.Rcode])
	}
	return err
}

// evaluate returns how many values an expression has now that are numbers.
func (d *dashboards) evaluate(expression string) (n int, err error) {
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return d.c.node.Dial(ctx, svc.TCP, netip.MustParseAddrPort("127.0.0.1:9090"))
		},
	}}
	answer, err := client.Get("http://prometheus/api/v1/query?query=" + url.QueryEscape(expression))
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	var result struct {
		Error string
		Data  struct{ Result []struct{ Value []any } }
	}
	if err := json.NewDecoder(answer.Body).Decode(&result); err != nil || result.Error != "" {
		return 0, fmt.Errorf("%s: %w %s", expression, err, result.Error)
	}
	for _, r := range result.Data.Result {
		if len(r.Value) == 2 && r.Value[1] != "NaN" {
			n++
		}
	}
	return n, nil
}
