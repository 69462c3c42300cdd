// Package explaincmd has the commands 'fairlead explain', 'fairlead trace', 'fairlead plan' and 'fairlead history'.
package explaincmd

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiclient"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/asking"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Report is what 'fairlead explain' shows. Its JSON form is meant for programs: fields are only ever added.
type Report struct {
	Question string `json:"question"`
	// Verdicts has one for each node asked, the worst first.
	Verdicts []*explain.Verdict `json:"verdicts"`
	// Balancers are the load balancers of the Services that the question leads to.
	Balancers []*explain.Balancer `json:"balancers,omitempty"`
	// Finding is the worst verdict in short, as Judge has it.
	Finding *Finding `json:"finding,omitempty"`
	// NotAsked is how many nodes were left out.
	NotAsked int `json:"notAsked,omitempty"`
	// At is the time that the answer is about; nil stands for the present.
	At *time.Time `json:"at,omitempty"`
}

// Asked is a question as a user writes it; see the flags of 'fairlead explain' for each field.
type Asked struct {
	Question, From, Node, Protocol string
	// Namespace is that of names without one.
	Namespace string
	// Probe lets nodes connect to the endpoints.
	Probe bool
	// At, if it is not zero, asks for what nodes had at that time.
	At time.Time
}

// Ask answers a question with the rights of the user of nodes. A question that cannot be read is a usage error.
func Ask(ctx context.Context, nodes *asking.Nodes, a *Asked) (*Report, error) {
	q, err := parseQuestion(a.Question, a.Protocol, a.Namespace)
	if err != nil {
		return nil, err
	}
	if q.Then = !a.At.IsZero(); q.Then && q.Service == (svc.Name{}) {
		return nil, base.Usagef("--at takes a SERVICE, but got %q: nodes remember Services", a.Question)
	}
	if q.Then {
		a.Probe = false
	}
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	r, err := a.report(ctx, nodes, q)
	if err != nil {
		return nil, err
	}
	if r.Question = a.Question; q.Then {
		r.At = &a.At
	}
	return r, nil
}

// explainFlags are the flags of 'fairlead explain'.
type explainFlags struct {
	base.ClientFlags
	output base.OutputFlag
	asked  Asked
	at     string
}

// NewExplain returns 'fairlead explain'.
func NewExplain(g *base.Global) *cobra.Command {
	var f explainFlags
	cmd := &cobra.Command{
		Use:   "explain SERVICE | ADDRESS:PORT | NAME",
		Short: "Show what becomes of a connection to a Service on each node, and which field of which object decides that",
		Long: `Show what becomes of a connection to a Service, to an address and port, or to a DNS
name, and why: which endpoints may answer and which may not, by which field of which
object, and what the node really has for it. Each node reads that back from its kernel,
or from its own listeners, and connects once to each endpoint (--probe=false: it does not).

Without --from and --node all nodes are asked, and the worst answer comes first. A node
that cannot be asked is explained by what the API has.

With --at the answer is about an earlier time: what each node had programmed then, as far
as it remembers (an hour at most, and not before the start of its agent).`,
		Example: `  fairlead explain my-service
  fairlead explain 203.0.113.7:443 --from 198.51.100.20
  fairlead explain my-service.shop.svc.cluster.local --from web-6d5f9 -n shop
  fairlead explain shop/my-service --node node2 -o json
  fairlead explain my-service --at 12:03`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return base.Usagef("fairlead explain takes one SERVICE, ADDRESS:PORT or NAME, but got %q", args)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.output.Check(); err != nil {
				return err
			}
			nodes, namespace, err := userNodes(&f.ClientFlags)
			if err != nil {
				return err
			}
			f.asked.Question, f.asked.Namespace = args[0], cmp.Or(namespace, metav1.NamespaceDefault)
			if f.at != "" {
				if f.asked.At, err = parseTime(f.at, time.Now()); err != nil {
					return err
				}
			}
			r, err := Ask(cmd.Context(), nodes, &f.asked)
			if err != nil {
				return err
			}
			return f.output.Write(g.Out, r, r.print)
		},
	}
	f.Add(cmd)
	f.AddNamespace(cmd)
	f.output.Add(cmd)
	cmd.Flags().StringVar(&f.asked.From, "from", "", "who connects: a Pod, a Node or an IP address (default: any client)")
	cmd.Flags().StringVar(&f.asked.Node, "node", "", "the node whose answer counts (default: that of --from, else all nodes)")
	cmd.Flags().StringVar(&f.asked.Protocol, "protocol", "", "TCP, UDP or SCTP, for ADDRESS:PORT (default: any)")
	cmd.Flags().BoolVar(&f.asked.Probe, "probe", true, "let each node connect once to each endpoint, over TCP")
	cmd.Flags().StringVar(&f.at, "at", "", "what nodes had at this time: HH:MM of today, or RFC 3339 (default: now)")
	return cmd
}

// userNodes asks the nodes of a cluster for the user of this machine.
func userNodes(f *base.ClientFlags) (nodes *asking.Nodes, namespace string, err error) {
	cfg, namespace, err := f.Load()
	if err != nil {
		return nil, "", err
	}
	cfg = apiclient.Tuned(apiclient.Protobuf(cfg), "") // nodes are asked at once
	client, err := kubernetes.NewForConfig(cfg)
	return asking.FromHere(client, cfg), namespace, err
}

// parseQuestion reads the argument: an address with a port, a name with a dot, or a Service.
func parseQuestion(text, protocol, namespace string) (*explain.Question, error) {
	q := &explain.Question{}
	if protocol != "" {
		p, err := svc.ParseProtocol(strings.ToUpper(protocol))
		if err != nil {
			return nil, base.Usagef("--protocol is %q; want TCP, UDP or SCTP", protocol)
		}
		q.Protocol = p
	}
	if at, err := netip.ParseAddrPort(text); err == nil {
		q.Address = netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
		return q, nil
	}
	if _, err := netip.ParseAddr(text); err == nil {
		return nil, base.Usagef("%q has no port; want ADDRESS:PORT, such as %s", text, netip.AddrPortFrom(netip.MustParseAddr(text), 80))
	}
	if ns, name, ok := strings.Cut(text, "/"); ok {
		if ns == "" || name == "" || strings.Contains(name, "/") {
			return nil, base.Usagef("%q is not NAMESPACE/SERVICE", text)
		}
		q.Service = svc.Name{Namespace: ns, Name: name}
		return q, nil
	}
	switch {
	case text == "":
		return nil, base.Usagef("the SERVICE is empty")
	case strings.Contains(text, "."):
		q.Name = text
	default:
		q.Service = svc.Name{Namespace: namespace, Name: text}
	}
	return q, nil
}

func (a *Asked) report(ctx context.Context, from *asking.Nodes, q *explain.Question) (*Report, error) {
	client := from.Client()
	c, err := readOne(ctx, client, q, a.From, a.Namespace)
	if c == nil && err == nil {
		if c, err = read(ctx, client, q, a.Namespace); err == nil {
			c.readClient(ctx, client, a.From, a.Namespace)
		}
	}
	if err != nil {
		return nil, err
	}
	if q.Client, err = c.client("--from", a.From, a.Namespace); err != nil {
		return nil, err
	}
	nodes, left, err := c.choose(a.Node, q)
	if err != nil {
		return nil, err
	}
	r := &Report{NotAsked: left, Verdicts: make([]*explain.Verdict, len(nodes))}
	if !q.Then {
		r.Balancers = c.balancers(ctx, from, q)
		c.objects.Policies = c.policies(ctx, client, q)
	}
	atOnce(nodes, func(i int, n string) {
		objects := c.objects
		objects.Node = c.nodes[n]
		facts := c.facts(ctx, from, n, q, a)
		if q.Then {
			facts = then(ctx, from, q.Service, facts, a.At)
		}
		r.Verdicts[i] = explain.Explain(q, &objects, facts)
	})
	slices.SortStableFunc(r.Verdicts, func(a, b *explain.Verdict) int { return explain.Worse(a.Answer, b.Answer) })
	if len(r.Verdicts) > 0 {
		f := findingOf(r.Verdicts[0])
		r.Finding = &f
	}
	return r, nil
}

// Bounds of the questions to nodes.
const (
	askAtOnce = 16
	maxNodes  = 32
)

// atOnce calls ask for each node, for askAtOnce of them at a time, and waits.
func atOnce(nodes []string, ask func(i int, node string)) {
	var group errgroup.Group
	group.SetLimit(askAtOnce)
	for i, n := range nodes {
		group.Go(func() error {
			ask(i, n)
			return nil
		})
	}
	_ = group.Wait() // the functions return no errors
}

// noNodes is why no node was asked.
const noNodes = "you may not read Nodes, or there are none"

// Advice of the commands; the page has a list of nodes to choose from.
const (
	nameOne      = "name one to ask with --node"
	notAskedText = "%d more nodes were not asked: " + nameOne + "\n"
)

// facts asks a node, or assumes what it must have.
func (c *cluster) facts(ctx context.Context, nodes *asking.Nodes, node string, q *explain.Question, a *Asked) *explain.Facts {
	target := explain.Resolve(q, &c.objects)
	if node == "" {
		t := c.table(node)
		return explain.Assumed(node, noNodes, t, explain.Choose(t, target, q.Address, q.Protocol))
	}
	query := url.Values{}
	if target != (svc.Name{}) {
		query.Add("service", target.String())
	} else if q.Address.IsValid() {
		query.Add("address", q.Address.String())
	} else {
		return explain.Assumed(node, "", c.table(node), nil) // the name leads nowhere: nothing to ask
	}
	if q.Protocol != 0 {
		query.Add("protocol", q.Protocol.String())
	}
	for _, a := range q.Client.Addrs { // an agent of an earlier version reads the first
		query.Add("client", a.String())
	}
	if !a.Probe {
		query.Add("probe", "false")
	}
	text, err := nodes.Get(ctx, node, "explain", query)
	facts := &explain.Facts{}
	if err == nil {
		facts, err = decodeFacts(text, node)
	}
	if err == nil {
		return facts
	}
	t := c.table(node)
	why := asking.WhyNot(err)
	if asking.ThereItself(err) {
		question := a.Question
		if target != (svc.Name{}) {
			question = target.String()
		}
		why += fmt.Sprintf("; on that node 'fairlead explain %s --node %s' asks it", question, node)
	}
	return explain.Assumed(node, why, t, explain.Choose(t, target, q.Address, q.Protocol))
}

// decodeFacts reads the Facts that a node sent, which speaks only of itself.
func decodeFacts(text []byte, node string) (*explain.Facts, error) {
	f := &explain.Facts{}
	if err := json.Unmarshal(text, f); err != nil {
		return nil, err
	}
	return checkFacts(f, node)
}

// checkFacts returns the Facts that a node sent, if they can be used.
func checkFacts(f *explain.Facts, node string) (*explain.Facts, error) {
	f.Node = node
	for i := range f.Ports {
		switch p := &f.Ports[i]; {
		case p.ServicePort == nil:
			return nil, fmt.Errorf("cannot use its answer: ports[%d] is empty", i)
		case len(p.Installed) > len(p.Frontends):
			return nil, fmt.Errorf("cannot use its answer: ports[%d] has %d frontends, and %d are installed", i, len(p.Frontends),
				len(p.Installed))
		case slices.ContainsFunc(p.Frontends, func(f table.Frontend) bool { return f.Kind > table.NodePort }):
			return nil, fmt.Errorf("cannot use its answer: ports[%d] has a frontend of an unknown kind", i)
		}
	}
	return f, nil
}

// client finds out who from is, the value of what.
func (c *cluster) client(what, from, namespace string) (explain.Client, error) {
	out := explain.Client{Text: from}
	if from == "" {
		return out, nil
	}
	if a, err := netip.ParseAddr(from); err == nil {
		out.Addrs = []netip.Addr{a.Unmap()}
		c.place(&out)
		return out, nil
	}
	if n := c.nodes[from]; n != nil {
		out.Addrs, out.Node, out.Host = explain.NodeAddresses(n), from, true
		return out, nil
	}
	name := podName(from, namespace)
	for _, p := range c.objects.Pods {
		if svc.NameOf(p) != name {
			continue
		}
		for _, ip := range p.Status.PodIPs {
			if a, err := netip.ParseAddr(ip.IP); err == nil {
				out.Addrs = append(out.Addrs, a)
			}
		}
		out.Node, out.Host = p.Spec.NodeName, p.Spec.HostNetwork
		if len(out.Addrs) == 0 {
			return out, fmt.Errorf("%s %s: the Pod has no address yet (%s)", what, from, base.PodTrouble(p))
		}
		return out, nil
	}
	return out, fmt.Errorf("%s is %q; want an IP address, a Node (there are: %s), or a Pod of namespace %s", what, from,
		cmp.Or(strings.Join(c.names, ", "), "none"), name.Namespace)
}

// place finds the node that an address is on.
func (c *cluster) place(to *explain.Client) {
	for _, p := range c.objects.Pods {
		if slices.ContainsFunc(p.Status.PodIPs, func(ip corev1.PodIP) bool { return ip.IP == to.Addrs[0].String() }) && !p.Spec.HostNetwork {
			to.Node = p.Spec.NodeName
			return
		}
	}
	for name, n := range c.nodes {
		if slices.Contains(explain.NodeAddresses(n), to.Addrs[0]) {
			to.Node, to.Host = name, true
			return
		}
	}
}

// sliceOwner returns the Service that a slice is of.
func sliceOwner(s *discoveryv1.EndpointSlice) svc.Name {
	return svc.Name{Namespace: s.Namespace, Name: s.Labels[discoveryv1.LabelServiceName]}
}

// endpointNodes returns the nodes of the endpoints of slices, or "" for any node. They take the place of Nodes that the user may
// not read.
func endpointNodes(list []*discoveryv1.EndpointSlice) (out []string) {
	for _, s := range list {
		for i := range s.Endpoints {
			if n := s.Endpoints[i].NodeName; n != nil && *n != "" && !slices.Contains(out, *n) {
				out = append(out, *n)
			}
		}
	}
	if len(out) == 0 {
		return []string{""}
	}
	slices.Sort(out)
	return out
}

// choose returns the nodes to ask, and how many are left out.
func (c *cluster) choose(node string, q *explain.Question) (nodes []string, left int, err error) {
	switch {
	case node != "" && c.nodes[node] == nil && len(c.nodes) > 0:
		return nil, 0, fmt.Errorf("--node is %q; want one of %s%s", node, strings.Join(c.names, ", "), base.DidYouMean(node, "", c.names))
	case node != "":
		return []string{node}, 0, nil
	case q.Client.Node != "":
		return []string{q.Client.Node}, 0, nil
	}
	if q.Address.IsValid() {
		for name, n := range c.nodes {
			if slices.Contains(explain.NodeAddresses(n), q.Address.Addr()) {
				return []string{name}, 0, nil
			}
		}
	}
	names := c.names
	if len(names) == 0 {
		service := explain.Resolve(q, &c.objects)
		names = endpointNodes(slices.DeleteFunc(slices.Clone(c.objects.Slices), func(s *discoveryv1.EndpointSlice) bool {
			return sliceOwner(s) != service
		}))
	}
	n := min(len(names), maxNodes)
	return names[:n], len(names) - n, nil
}
