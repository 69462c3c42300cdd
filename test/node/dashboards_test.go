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
	c        *cluster
	servers  []netip.AddrPort // of DNS
	services []string         // that have endpoints, of both families
	typo     string           // has none
	shop     string           // has a route
	http     *http.Client     // of Prometheus
	rounds   int
}

// dashboardsHaveData evaluates every expression until it returns data, unless the job has a reason why it does not.
func (c *cluster) dashboardsHaveData(upstream string) {
	c.t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return c.node.Dial(ctx, svc.TCP, netip.MustParseAddrPort("127.0.0.1:9090"))
	}}
	defer transport.CloseIdleConnections()
	d := &dashboards{
		c:       c,
		servers: []netip.AddrPort{netip.MustParseAddrPort(clusterDNS + ":53"), netip.AddrPortFrom(c.server.Addr4(), 53)},
		http:    &http.Client{Timeout: 30 * time.Second, Transport: transport},
	}
	began := time.Now()
	d.start(upstream)
	d.serve()
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

func selection(job string) string {
	s := fmt.Sprintf("job=%q,instance=~\".+\",cluster=\"\"", job)
	if job == "hubble" { // all values of its variables
		for _, label := range []string{"source_namespace", "source_workload", "destination_namespace", "destination_workload"} {
			s += "," + label + `=~".*"`
		}
	}
	return s
}

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
- {job_name: hubble, static_configs: [{targets: ["127.0.0.1:10249"], labels: {pod: node}}]}
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

// both is a Service of both families.
const both = `
apiVersion: v1
kind: Service
metadata: {name: both}
spec:
  ipFamilyPolicy: RequireDualStack
  ipFamilies: [IPv4, IPv6]
  selector: {app: MyApp}
  ports: [{port: 80, targetPort: 9376}]
`

// serve waits for a Service of both families, and looks where the others are.
func (d *dashboards) serve() {
	d.c.t.Helper()
	d.typo, d.shop = d.c.frontend("typo"), d.c.frontend("shop")
	d.c.apply(both)
	for _, ip := range strings.Fields(d.c.kubectl("get", "service", "both", "-o", "jsonpath={.spec.clusterIPs[*]}")) {
		at := net.JoinHostPort(ip, "80")
		testbed.Until(d.c.t, "an answer of "+at, func() error { return d.c.dial(at) })
		d.services = append(d.services, at)
	}
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
	if err := d.connect(); err != nil {
		return err
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

// connect makes connections of both families to a Service, one that is refused, and requests by a route.
func (d *dashboards) connect() error {
	for _, at := range d.services {
		if err := d.c.dial(at); err != nil {
			return err
		}
	}
	if err := d.c.dial(d.typo); !testbed.Refused(err) {
		return fmt.Errorf("a Service without endpoints: %w, want refused", err)
	}
	return d.c.requests(d.shop)
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
	answer, err := d.http.Get("http://prometheus/api/v1/query?query=" + url.QueryEscape(expression))
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
