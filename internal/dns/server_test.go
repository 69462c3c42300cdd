package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/zone"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		serveForBenchmark()
		return
	}
	goleak.VerifyTestMain(m)
}

// start runs a Server on loopback until the test ends.
func start(t testing.TB, o Options) *Server {
	t.Helper()
	if o.Listen == nil {
		o.Listen = []string{"127.0.0.1:0"}
	}
	if o.Workers == 0 {
		o.Workers = 1
	}
	if o.Logger == nil && testing.Verbose() {
		o.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := ended(done); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return s
}

func ended(done chan error) error {
	select {
	case err := <-done:
		return err
	case <-time.After(15 * time.Second):
		return errors.New("has not returned")
	}
}

// eventually polls a condition for at most ten seconds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); <-tick.C {
		if ok() {
			return
		}
	}
	t.Fatalf("not in ten seconds: %s", what)
}

// clusterOptions are those of the cluster in zone's test data.
func clusterOptions() Options {
	return Options{
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")},
		PodCIDRs:     []netip.Prefix{netip.MustParsePrefix("10.244.0.0/14"), netip.MustParsePrefix("fd00:10:244::/56")},
	}
}

// objects reads the objects of zone's test data.
func objects(t testing.TB) (out []any) {
	t.Helper()
	raw, err := os.ReadFile("../zone/testdata/cluster.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for doc := range strings.SplitSeq(string(raw), "\n---\n") {
		var kind struct{ Kind string }
		if err := yaml.Unmarshal([]byte(doc), &kind); err != nil {
			t.Fatal(err)
		}
		var o any
		switch kind.Kind {
		case "Namespace":
			o = new(corev1.Namespace)
		case "Service":
			o = new(corev1.Service)
		case "EndpointSlice":
			o = new(discoveryv1.EndpointSlice)
		}
		if err := yaml.Unmarshal([]byte(doc), o); err != nil {
			t.Fatal(err)
		}
		out = append(out, o)
	}
	return out
}

func fill(z *zone.Zone, objs []any) {
	for _, o := range objs {
		switch o := o.(type) {
		case *corev1.Namespace:
			z.SetNamespace(o.Name)
		case *corev1.Service:
			z.SetService(o)
		case *discoveryv1.EndpointSlice:
			z.SetSlice(o)
		}
	}
}

// ask puts a question over UDP or TCP and returns the answer.
func exchange(t testing.TB, s *Server, network string, m *mdns.Msg) *mdns.Msg {
	t.Helper()
	c := mdns.Client{Net: network, Timeout: 10 * time.Second, UDPSize: maxMessage}
	r, _, err := c.Exchange(m, s.Addrs()[0].String())
	if err != nil {
		t.Fatalf("%s over %s: %v", m.Question[0].Name, network, err)
	}
	return r
}

func question(name string, typ uint16) *mdns.Msg {
	m := new(mdns.Msg)
	m.SetQuestion(name, typ)
	return m
}

// The table of zone's test data, asked over UDP and TCP.
func TestQuestionsOverSockets(t *testing.T) {
	s := start(t, clusterOptions())
	fill(s.Zone(), objects(t))
	raw, err := os.ReadFile("../zone/testdata/questions.txt")
	if err != nil {
		t.Fatal(err)
	}
	asked := 0
	for block := range strings.SplitSeq(strings.TrimSpace(string(raw)), "\n\n") {
		_, rest, _ := strings.Cut("\n"+block, "\nask ")
		q, want, _ := strings.Cut(rest, "\n")
		name, typ, _ := strings.Cut(q, " ")
		for _, network := range []string{"udp", "tcp"} {
			m := question(name, mdns.StringToType[typ])
			m.SetEdns0(udpSize, false)
			r := exchange(t, s, network, m)
			asked++
			if got := tableText(r, s); got != tableWant(want) {
				t.Errorf("%s over %s:\n%s\nwant:\n%s", q, network, got, tableWant(want))
			}
			if strings.HasPrefix(want, "not ours") {
				continue
			}
			if !r.Authoritative && !strings.Contains(want, "elsewhere") || r.RecursionAvailable || r.Truncated || r.IsEdns0() == nil {
				t.Errorf("%s over %s: wrong flags in\n%v", q, network, r)
			}
		}
	}
	if asked < 2*150 {
		t.Errorf("only %d questions asked", asked)
	}
}

// tableWant is what a server without upstreams makes of a row of the table.
func tableWant(want string) string {
	if strings.HasPrefix(want, "not ours") || strings.Contains(want, "elsewhere") {
		return "REFUSED"
	}
	return sortAnswers(want)
}

// tableText writes an answer as the table does.
func tableText(r *mdns.Msg, s *Server) string {
	lines := []string{mdns.RcodeToString[r.Rcode]}
	add := func(prefix string, rrs []mdns.RR) {
		for _, rr := range rrs {
			if soa, ok := rr.(*mdns.SOA); ok {
				soa.Serial = 0
			}
			if _, ok := rr.(*mdns.OPT); !ok {
				l := prefix + strings.ReplaceAll(rr.String(), "\t", " ")
				lines = append(lines, strings.Replace(l, " 0 7200", " SERIAL 7200", 1))
			}
		}
	}
	add("", r.Answer)
	add("authority ", r.Ns)
	add("additional ", r.Extra)
	return sortAnswers(strings.Join(lines, "\n"))
}

// sortAnswers puts addresses into order: they rotate.
func sortAnswers(s string) string {
	lines := strings.Split(s, "\n")
	for i := 1; i < len(lines); i++ {
		for j := i; j > 1 && isAddr(lines[j]) && isAddr(lines[j-1]) && lines[j] < lines[j-1]; j-- {
			lines[j], lines[j-1] = lines[j-1], lines[j]
		}
	}
	return strings.Join(lines, "\n")
}

func isAddr(l string) bool {
	return !strings.HasPrefix(l, "a") && (strings.Contains(l, " IN A ") || strings.Contains(l, " IN AAAA "))
}

// The file may come late, may be empty for a moment, and may change.
func TestResolvConf(t *testing.T) {
	file := t.TempDir() + "/resolv.conf"
	s, err := New(Options{Listen: []string{"127.0.0.1:0"}, ResolvConf: file})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ text, want string }{
		{"", ""},
		{"search a b\nnameserver 192.0.2.1\n nameserver 2001:db8::1 # two\nnameserver x\noptions ndots:5\n", "192.0.2.1:53 [2001:db8::1]:53"},
		{"", "192.0.2.1:53 [2001:db8::1]:53"},
		{"nameserver fe80::1%eth0\nnameserver ::ffff:192.0.2.2\nnameserver 192.0.2.2", "[fe80::1%eth0]:53 192.0.2.2:53"},
	} {
		if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		s.forward.reload(s.options.ResolvConf)
		var got []string
		for _, u := range s.forward.all() {
			got = append(got, u.name)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%q: upstreams %v, want %s", c.text, got, c.want)
		}
	}
}

// The tool of the trade understands what is answered.
func TestDig(t *testing.T) {
	dig, err := exec.LookPath("dig")
	if err != nil {
		t.Skip("dig is not installed (Debian: bind9-dnsutils)")
	}
	o := clusterOptions()
	o.Upstream = upstreams(startUpstream(t, answerWith("@ 60 IN A 192.0.2.1")))
	s := start(t, o)
	fill(s.Zone(), objects(t))
	a := s.Addrs()[0]
	for args, want := range map[string]string{
		"+short my-service.prod.svc.cluster.local A":                        "10.96.0.20\n",
		"+short +tcp my-service.prod.svc.cluster.local A":                   "10.96.0.20\n",
		"+short +noedns MY-service.prod.svc.cluster.local A":                "10.96.0.20\n",
		"+short +dnssec +bufsize=4096 six.prod.svc.cluster.local AAAA":      "fd00:10:96::66\n",
		"+short _https._tcp.kubernetes.default.svc.cluster.local SRV":       "0 100 443 kubernetes.default.svc.cluster.local.\n",
		"+short -x 10.96.0.20":                                              "my-service.prod.svc.cluster.local.\n",
		"+short -x fd00:10:96::66":                                          "six.prod.svc.cluster.local.\n",
		"+short dns-version.cluster.local TXT":                              "\"1.1.0\"\n",
		"+short www.example.com A":                                          "192.0.2.1\n",
		"+noall +comments missing.prod.svc.cluster.local A":                 "status: NXDOMAIN",
		"+noall +comments cluster.local AXFR":                               "Transfer failed",
		"+noall +comments +class=CH version.bind TXT -c CH":                 "status: REFUSED",
		"+noall +comments +edns=1 +noednsnegotiation cluster.local SOA":     "status: BADVERS",
		"+noall +comments +cookie +nsid +subnet=192.0.2.0/24 cluster.local": "status: NOERROR",
		"+noall +comments +opcode=STATUS cluster.local SOA":                 "status: NOTIMP",
	} {
		argv := append([]string{"@" + a.Addr().String(), "-p", fmt.Sprint(a.Port()), "+time=10", "+tries=1"}, strings.Fields(args)...)
		out, _ := exec.Command(dig, argv...).CombinedOutput()
		if got := string(out); got != want && (strings.HasPrefix(args, "+short") || !strings.Contains(got, want)) {
			t.Errorf("dig %s:\n%s\nwant %s", args, got, want)
		}
		if strings.Contains(string(out), "malformed") || strings.Contains(string(out), "recursion requested but not available") {
			t.Errorf("dig %s:\n%s", args, out)
		}
	}
}
