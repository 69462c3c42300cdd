package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
)

// The cluster and the questions of the table that package zone is tested with,
// relative to the folder of the fairlead program's sources.
const (
	namesCluster   = "internal/zone/testdata/cluster.yaml"
	namesQuestions = "internal/zone/testdata/questions.txt"
)

// namesCorefile is kubeadm's, with the TTL that fairlead has.
const namesCorefile = `.:53 {
    errors
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        kubeconfig %s
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 5
    }
    forward . ` + switchAddr + `
    cache 30 {
        disable success cluster.local
        disable denial cluster.local
    }
    loadbalance
    prometheus :9153
}
`

// runNames asks both servers everything in the table and prints where they
// differ, with the reason. A difference without a reason is an error, as is one of
// the names and labels of their metrics afterwards.
func (b *bench) runNames(ctx context.Context) (figures []figure, err error) {
	stop, err := serveWorld()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	a, err := b.startAPI(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, a.stop()) }()
	if err := fillCluster(ctx, a.client, filepath.Join(b.sources, namesCluster)); err != nil {
		return nil, err
	}
	questions, err := readQuestions(filepath.Join(b.sources, namesQuestions))
	if err != nil {
		return nil, err
	}
	mine, myMetrics, err := b.answersOf(ctx, a, b.fairleadNames(), questions)
	if err != nil {
		return nil, err
	}
	figures = append(figures, unpaired("questions asked", pieces, float64(len(questions)), expectation{}))
	if b.peer("coredns") == "" {
		return figures, nil
	}
	theirs, theirMetrics, err := b.answersOf(ctx, a, b.coreNames(), questions)
	if err != nil {
		return nil, err
	}
	differ, unexplained := 0, 0
	for i, q := range questions {
		if mine[i].String() == theirs[i].String() {
			continue
		}
		differ++
		why := explain(q, mine[i], theirs[i])
		if why == "" {
			unexplained++
			why = "NO REASON KNOWN"
		}
		fmt.Printf("%s: %s\n  fairlead  %s\n  CoreDNS   %s\n", q, why, mine[i], theirs[i])
	}
	figures = append(figures, unpaired("of them answered otherwise than by CoreDNS, for a reason", pieces, float64(differ-unexplained),
		expectation{}))
	same, err := compareMetrics(myMetrics, theirMetrics)
	figures = append(figures, unpaired("metrics that are CoreDNS's, with the same labels", pieces, float64(same), expectation{}))
	if unexplained > 0 {
		err = errors.Join(err, fmt.Errorf("%d answers differ from CoreDNS's without a known reason", unexplained))
	}
	return figures, err
}

// asked is a question of the table.
type asked struct {
	name string
	kind uint16
}

func (q asked) String() string { return q.name + " " + dns.TypeToString[q.kind] }

// readQuestions reads the lines "ask NAME TYPE".
func readQuestions(file string) ([]asked, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var out []asked
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) != 3 || f[0] != "ask" {
			continue
		}
		kind, ok := dns.StringToType[f[2]]
		if !ok {
			return nil, fmt.Errorf("%s: no type %s", file, f[2])
		}
		out = append(out, asked{f[1], kind})
	}
	if len(out) < 200 {
		return nil, fmt.Errorf("%s: only %d questions", file, len(out))
	}
	return out, nil
}

// answered is an answer in a form to compare: records are sorted, TTLs are left
// out, as is what of an SOA record changes.
type answered struct {
	rcode                         int
	answer, authority, additional []string
}

func (a answered) String() string {
	parts := []string{dns.RcodeToString[a.rcode]}
	for _, s := range []struct {
		name string
		rrs  []string
	}{{"", a.answer}, {"authority: ", a.authority}, {"additional: ", a.additional}} {
		if len(s.rrs) > 0 {
			parts = append(parts, s.name+strings.Join(s.rrs, ", "))
		}
	}
	return strings.Join(parts, "; ")
}

func newAnswered(m *dns.Msg) answered {
	return answered{m.Rcode, records(m.Answer), records(m.Ns), records(m.Extra)}
}

func records(rrs []dns.RR) []string {
	var out []string
	for _, rr := range rrs {
		h := rr.Header()
		text := strings.TrimPrefix(rr.String(), h.String())
		switch h.Rrtype {
		case dns.TypeOPT:
			continue
		case dns.TypeSOA:
			text = "..."
		}
		out = append(out, strings.ToLower(h.Name)+" "+dns.TypeToString[h.Rrtype]+" "+strings.ToLower(text))
	}
	slices.Sort(out)
	return out
}

// answersOf starts a server on its own host, asks it everything, and reads
// its metrics.
func (b *bench) answersOf(ctx context.Context, a *api, n nameserver, questions []asked) (
	out []answered, metrics map[string]string, err error,
) {
	h, err := b.net.host(ctx, fmt.Sprintf("names%d", b.net.count))
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, h.remove(context.WithoutCancel(ctx))) }()
	dir, err := os.MkdirTemp(b.dir, n.name+"-")
	if err != nil {
		return nil, nil, err
	}
	p, err := n.start(h, dir, a.kubeconfig)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	server := netip.AddrPortFrom(h.addr, dnsPort).String()
	c := &dns.Client{Net: "tcp", Timeout: 5 * time.Second}
	ask := func(q asked) (*dns.Msg, error) {
		m, _, err := c.ExchangeContext(ctx, new(dns.Msg).SetQuestion(q.name, q.kind), server)
		return m, err
	}
	// Names of Services and of endpoints near the end of the file.
	if err := waitFor(ctx, dnsReady, 5*time.Millisecond, p, func() error {
		for _, q := range []asked{{"mixed.prod.svc.cluster.local.", dns.TypeA}, {"ext-db.prod.svc.cluster.local.", dns.TypeA}} {
			m, err := ask(q)
			if err != nil {
				return err
			}
			if len(m.Answer) == 0 {
				return fmt.Errorf("no answer yet to %s", q)
			}
		}
		return nil
	}); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", n.name, err)
	}
	for _, q := range questions {
		m, err := ask(q)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %s: %w", n.name, q, err)
		}
		out = append(out, newAnswered(m))
	}
	if metrics, err = readMetrics(ctx, h.addr); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", n.name, err)
	}
	return out, metrics, nil
}

func (b *bench) fairleadNames() nameserver {
	return nameserver{"fairlead", func(h *host, dir, kubeconfig string) (*process, error) {
		return spawn(h, dir, "fairlead-dns", b.fairlead, "dns", "--kubeconfig", kubeconfig,
			"--listen", netip.AddrPortFrom(h.addr, dnsPort).String(), "--upstream", switchAddr,
			"--metrics-bind-address", netip.AddrPortFrom(h.addr, metricsPort).String())
	}}
}

func (b *bench) coreNames() nameserver {
	return nameserver{"CoreDNS", func(h *host, dir, kubeconfig string) (*process, error) {
		return b.startCoreDNS(h, dir, fmt.Sprintf(namesCorefile, kubeconfig))
	}}
}

// serveWorld is the resolver of everything outside of the cluster, over UDP and
// TCP: it knows one name. The function it returns stops it.
func serveWorld() (stop func() error, err error) {
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		name := q.Question[0].Name
		switch {
		case !strings.EqualFold(name, "my.database.example.com."):
			m.Rcode = dns.RcodeNameError
		case q.Question[0].Qtype == dns.TypeA:
			m.Answer = []dns.RR{&dns.A{
				Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60},
				A:   netip.MustParseAddr("203.0.113.5").AsSlice(),
			}}
		}
		_ = w.WriteMsg(m)
	})
	var stops []func() error
	stop = func() error {
		var errs []error
		for _, f := range stops {
			errs = append(errs, f())
		}
		return errors.Join(errs...)
	}
	for _, network := range []string{"udp", "tcp"} {
		ready := make(chan error, 1)
		s := &dns.Server{Addr: switchAddr + ":53", Net: network, Handler: handler, NotifyStartedFunc: func() { ready <- nil }}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if err := s.ListenAndServe(); err != nil {
				ready <- err
			}
		}()
		if err := <-ready; err != nil {
			return nil, errors.Join(err, stop())
		}
		stops = append(stops, func() error {
			err := s.Shutdown()
			<-ended
			return err
		})
	}
	return stop, nil
}

// fillCluster creates the objects of a file that are not there.
func fillCluster(ctx context.Context, client kubernetes.Interface, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		if err := createOne(ctx, client, []byte(doc)); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

func createOne(ctx context.Context, client kubernetes.Interface, doc []byte) error {
	var head struct{ Kind string }
	if err := yaml.Unmarshal(doc, &head); err != nil {
		return err
	}
	switch head.Kind {
	case "Namespace":
		var o corev1.Namespace
		if err := yaml.Unmarshal(doc, &o); err != nil {
			return err
		}
		_, err := client.CoreV1().Namespaces().Create(ctx, &o, metav1.CreateOptions{})
		return err
	case "Service":
		var o corev1.Service
		if err := yaml.Unmarshal(doc, &o); err != nil {
			return err
		}
		if _, err := client.CoreV1().Services(o.Namespace).Get(ctx, o.Name, metav1.GetOptions{}); err == nil {
			return nil // made by the server: kubernetes and kube-dns
		}
		if len(o.Spec.ClusterIPs) == 2 {
			both := corev1.IPFamilyPolicyRequireDualStack
			o.Spec.IPFamilyPolicy = &both
		}
		_, err := client.CoreV1().Services(o.Namespace).Create(ctx, &o, metav1.CreateOptions{})
		return err
	case "EndpointSlice":
		var o discoveryv1.EndpointSlice
		if err := yaml.Unmarshal(doc, &o); err != nil {
			return err
		}
		for i := range o.Endpoints {
			// The API refuses capitals, which package zone is tested with.
			if h := o.Endpoints[i].Hostname; h != nil {
				*h = strings.ToLower(*h)
			}
		}
		_, err := client.DiscoveryV1().EndpointSlices(o.Namespace).Create(ctx, &o, metav1.CreateOptions{})
		return err
	}
	return fmt.Errorf("unknown kind %q", head.Kind)
}
