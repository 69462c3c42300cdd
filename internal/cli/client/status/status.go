// Package status has 'fairlead status' and 'fairlead top', which show the state of a cluster,
// what is wrong with it, and what its Pods use.
package status

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/space"
	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/explaincmd"
	"github.com/fairlead/fairlead/internal/proxy"
)

// Report is what 'fairlead status' shows. Its JSON form is meant for programs:
// fields are only ever added.
type Report struct {
	Server string `json:"server"`
	// Node is the name of the node whose view this is, empty for an administrator's.
	Node string `json:"node,omitempty"`
	// Healthz is what the proxy of this node answers at /healthz, in the view of a node.
	Healthz  string          `json:"healthz,omitempty"`
	Nodes    []nodeReport    `json:"nodes"`
	Services []ServiceReport `json:"services"`
	// Store is the state of the server's etcd, nil when it is not the server's own.
	Store *space.Status `json:"store,omitempty"`
	// LoadBalancers counts load balancers; nil where there are none of fairlead's.
	LoadBalancers *lbSummary `json:"loadBalancers,omitempty"`
	// NotProbed counts the endpoints written by hand that this machine did not connect to.
	NotProbed int `json:"notProbed,omitempty"`
	// NotAllowed counts the nodes that the user may not ask.
	NotAllowed int `json:"notAllowed,omitempty"`
	// Problems is everything that is wrong, a line each; empty when all is
	// well.
	Problems []string `json:"problems"`
	// ServiceProblems are the problems that are about one Service.
	ServiceProblems []serviceProblem `json:"serviceProblems,omitempty"`
	// Endpoints belong to the one Service of the question.
	Endpoints []endpointReport `json:"endpoints,omitempty"`

	// warnings are the causes that Events name; scope is the part of the cluster to show.
	warnings warnings
	scope    scope
}

type nodeReport struct {
	Name      string   `json:"name"`
	Ready     bool     `json:"ready"`
	Addresses []string `json:"addresses"`
	PodCIDRs  []string `json:"podCIDRs"`
	Pods      int      `json:"pods"`
	// PodsUnknown is set where a node, which may only read its own Pods, shows another one, or no server answers.
	PodsUnknown bool `json:"podsUnknown,omitempty"`
	// NoAgent is set if no agent of fairlead is there: a kubelet has answered.
	NoAgent bool `json:"noAgent,omitempty"`
	// Programmed is the status of the node's proxy, nil when its agent does not
	// answer or may not be asked.
	Programmed *proxy.Status `json:"programmed"`
}

// serviceProblem is a line of Problems, and the Service that it is about, NAMESPACE/NAME.
type serviceProblem struct {
	Service string `json:"service"`
	Text    string `json:"text"`
}

// ServiceReport is the state of a Service.
type ServiceReport struct {
	Namespace  string   `json:"namespace"`
	Name       string   `json:"name"`
	Type       string   `json:"type"`
	ClusterIPs []string `json:"clusterIPs"`
	Ports      []string `json:"ports"`
	// Ready and Total count the endpoints of one address family, the larger.
	Ready int `json:"ready"`
	Total int `json:"total"`
	// Programmed is the condition barrier.Programmed of a Service that asks for it, else nil.
	// One of an earlier spec has the status Unknown here.
	Programmed *metav1.Condition `json:"programmed,omitempty"`
}

// NewStatus returns 'fairlead status'.
func NewStatus(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var output base.OutputFlag
	var probe, watch bool
	cmd := &cobra.Command{
		Use:   "status [SERVICE]",
		Short: "Show nodes, services, endpoints, what is programmed where, and what is wrong",
		Long: `Show nodes, services, endpoints, what is programmed where, and, in lines that begin
with !, what is wrong. On a node without an administrator's kubeconfig it shows what
the node itself knows: its proxy, its own Pods, and what the node may read of the API.

With the name of a Service it shows this Service, its endpoints, and what concerns it; with
--namespace what is in that namespace.

If this machine is a node, it connects to endpoints that were written by hand,
` + strconv.Itoa(maxProbes) + ` at most and as many of each namespace, for ` + dialTimeout.String() + ` each. Their addresses are
the choice of whoever may write them: --probe-endpoints connects from any machine,
--probe-endpoints=false from none.

The exit code is 0 when there is something to show, whatever is wrong, and 1 when the
server does not answer; scripts look at .problems of -o json, which is empty when nothing
is wrong.`,
		Example: `  fairlead status
  fairlead status my-service
  fairlead status -n shop --watch
  fairlead status -o json | jq -e '.problems == []'`,
		Args: oneName,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := output.Check(); err != nil {
				return err
			}
			var p *prober
			if probe {
				p = newProber()
				p.anywhere = cmd.Flags().Changed("probe-endpoints")
			}
			want := scope{namespace: f.Namespace}
			if len(args) == 1 {
				want.service = args[0]
			}
			show := func(ctx context.Context) error {
				ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
				defer cancel()
				r, err := reportFor(ctx, &f, p, want)
				if err != nil {
					return err
				}
				return output.Write(g.Out, r, r.print)
			}
			if err := show(cmd.Context()); err != nil || !watch {
				return err
			}
			again(cmd.Context(), g.Out, g.Err, show)
			return nil
		},
	}
	f.Add(cmd)
	cmd.Flags().StringVarP(&f.Namespace, "namespace", "n", "", "show only this namespace (default: all; with SERVICE the kubeconfig's)")
	output.Add(cmd)
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "show it again every "+topInterval.String())
	cmd.Flags().BoolVar(&probe, "probe-endpoints", true, "connect to endpoints that were written by hand; unless given, only from a node")
	return cmd
}

// again shows the status every topInterval until ctx ends. A request that fails is told, and the next one follows: an outage is
// when people look.
func again(ctx context.Context, out, errs io.Writer, show func(context.Context) error) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(topInterval):
		}
		fmt.Fprintln(out)
		if err := show(ctx); err != nil && ctx.Err() == nil {
			fmt.Fprintf(errs, "! %s: %v; trying again every %s\n", time.Now().Format(time.TimeOnly), err, topInterval)
		}
	}
}

// collect asks the API, and through it every node's agent. A node, whose name is own,
// may only ask for its own Pods, and for no agent.
func collect(ctx context.Context, client kubernetes.Interface, own string, probe *prober, want scope) (*Report, error) {
	var podsOf metav1.ListOptions
	if own != "" {
		podsOf.FieldSelector = "spec.nodeName=" + own
	}
	o, err := readObjects(ctx, client, podsOf, want.namespace)
	if err != nil {
		return nil, err
	}
	nodes, pods, slicesList := o.nodes, o.pods, o.slices
	services, err := want.services(o.services.Items)
	if err != nil {
		return nil, err
	}
	r := &Report{
		Nodes: nodeReports(nodes.Items, pods.Items, own), Services: serviceReports(services, slicesList.Items), Problems: []string{}, scope: want,
	}
	if u := client.CoreV1().RESTClient().Get().URL(); u != nil {
		r.Server = u.Scheme + "://" + u.Host
	}
	var more related
	if own == "" {
		r.LoadBalancers = summarizeLB(ctx, client, services)
		r.askStore(ctx, client)
		r.askCertificates(ctx, client, time.Now())
		r.ask(ctx, client)
		more = readRelated(ctx, client, want.namespace)
		r.warnings = more.warnings
	}
	now := time.Now()
	index := newPodIndex(pods.Items, own == "")
	if !o.nodesUnknown {
		r.judgeNodes(nodes.Items)
	}
	r.judgeServices(services, index)
	r.judgeEndpoints(services, slicesList.Items, index, now)
	r.judgeProgrammed(now)
	mine := want.pods(pods.Items, services)
	r.judgePods(mine, now)
	r.judgeLimits(nodes.Items, mine)
	if want.service == "" {
		r.judgePools()
		r.judgeSets(&more)
		r.judgeIngresses(more.ingresses, more.classes, now)
	} else if len(services) == 1 {
		r.Endpoints = endpointReports(&services[0], slicesList.Items, index, now)
	}
	r.judgeWarnings(services, more.warnings, now)
	if own == "" {
		r.judgeCauses(services, explaincmd.JudgeObjects(services, slicesList.Items, nodes.Items, pods.Items))
	}
	if probe != nil {
		r.probe(ctx, probe, nodes.Items, handMade(services, slicesList.Items, nodes.Items, probe.local))
	} else {
		r.NotProbed = len(handMade(services, slicesList.Items, nodes.Items, nil))
	}
	return r, nil
}

// objects are what a report is made of.
type objects struct {
	nodes *corev1.NodeList
	// nodesUnknown is set if the user may not read Nodes.
	nodesUnknown bool
	pods         *corev1.PodList
	services     *corev1.ServiceList
	slices       *discoveryv1.EndpointSliceList
}

// readObjects reads them in all namespaces, or in the one that is asked for if the user has no rights beyond it.
func readObjects(ctx context.Context, client kubernetes.Interface, podsOf metav1.ListOptions, namespace string) (o objects, err error) {
	all := metav1.ListOptions{}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		o.nodes, err = client.CoreV1().Nodes().List(ctx, all)
		if o.nodesUnknown = apierrors.IsForbidden(err) && namespace != ""; o.nodesUnknown {
			o.nodes, err = &corev1.NodeList{}, nil
		}
		return err
	})
	group.Go(func() (err error) {
		o.pods, err = listAllowed(ctx, namespace, podsOf, func(in string) lister[corev1.PodList] { return client.CoreV1().Pods(in) })
		return err
	})
	group.Go(func() (err error) {
		o.services, err = listAllowed(ctx, namespace, all, func(in string) lister[corev1.ServiceList] { return client.CoreV1().Services(in) })
		return err
	})
	group.Go(func() (err error) {
		o.slices, err = listAllowed(ctx, namespace, all, func(in string) lister[discoveryv1.EndpointSliceList] {
			return client.DiscoveryV1().EndpointSlices(in)
		})
		return err
	})
	err = group.Wait()
	return o, err
}

// lister is the client of one kind.
type lister[T any] interface {
	List(context.Context, metav1.ListOptions) (*T, error)
}

// listAllowed lists a kind in all namespaces, or in one if the user may not.
func listAllowed[T any](ctx context.Context, namespace string, o metav1.ListOptions, in func(namespace string) lister[T]) (*T, error) {
	out, err := in("").List(ctx, o)
	if apierrors.IsForbidden(err) && namespace != "" {
		return in(namespace).List(ctx, o)
	}
	return out, err
}

// probe adds the targets that do not answer, and counts the targets that were not asked.
func (r *Report) probe(ctx context.Context, p *prober, nodes []corev1.Node, all []target) {
	var chosen []target
	if p.anywhere || p.onNode(nodes) {
		chosen = share(all)
	}
	r.NotProbed = len(all) - len(chosen)
	for _, found := range p.problems(ctx, chosen) {
		r.serviceProblem(found.Service, "%s", found.Text)
	}
}

// nodeReports counts Pods; own, if not empty, is the node whose Pods alone are known.
func nodeReports(nodes []corev1.Node, pods []corev1.Pod, own string) []nodeReport {
	count := map[string]int{}
	for i := range pods {
		count[pods[i].Spec.NodeName]++
	}
	out := []nodeReport{}
	for _, n := range nodes {
		nr := nodeReport{Name: n.Name, PodCIDRs: n.Spec.PodCIDRs, Pods: count[n.Name], PodsUnknown: own != "" && own != n.Name}
		for _, a := range n.Status.Addresses {
			if a.Type == corev1.NodeInternalIP {
				nr.Addresses = append(nr.Addresses, a.Address)
			}
		}
		for _, c := range n.Status.Conditions {
			nr.Ready = nr.Ready || c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		}
		out = append(out, nr)
	}
	return out
}

func serviceReports(services []corev1.Service, all []discoveryv1.EndpointSlice) []ServiceReport {
	type count struct{ ready, total int }
	counts := map[string]map[discoveryv1.AddressType]count{}
	for _, s := range all {
		key := s.Namespace + "/" + s.Labels[discoveryv1.LabelServiceName]
		if counts[key] == nil {
			counts[key] = map[discoveryv1.AddressType]count{}
		}
		c := counts[key][s.AddressType]
		for _, e := range s.Endpoints {
			c.total++
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				c.ready++
			}
		}
		counts[key][s.AddressType] = c
	}
	out := []ServiceReport{}
	for _, s := range services {
		sr := ServiceReport{
			Namespace: s.Namespace, Name: s.Name, Type: string(s.Spec.Type), ClusterIPs: s.Spec.ClusterIPs, Programmed: programmedCondition(&s),
		}
		for _, p := range s.Spec.Ports {
			text := strconv.Itoa(int(p.Port))
			if p.NodePort != 0 {
				text += ":" + strconv.Itoa(int(p.NodePort))
			}
			sr.Ports = append(sr.Ports, text+"/"+string(p.Protocol))
		}
		for _, c := range counts[s.Namespace+"/"+s.Name] {
			if c.total > sr.Total {
				sr.Ready, sr.Total = c.ready, c.total
			}
		}
		out = append(out, sr)
	}
	return out
}

// reasonOutdated is the reason of a condition of an earlier spec.
const reasonOutdated = "Outdated"

// programmedCondition returns a copy of the condition that ServiceReport has.
func programmedCondition(s *corev1.Service) *metav1.Condition {
	c := meta.FindStatusCondition(s.Status.Conditions, barrier.Programmed)
	if c == nil {
		return nil
	}
	c = c.DeepCopy()
	if c.ObservedGeneration < s.Generation {
		c.Status, c.Reason, c.Message = metav1.ConditionUnknown, reasonOutdated, "the condition is of an earlier spec"
	}
	return c
}

// askStore gets the state of the server's etcd, which only fairlead's server tells,
// if it runs one and the user may read it.
func (r *Report) askStore(ctx context.Context, client kubernetes.Interface) {
	text, err := client.CoreV1().RESTClient().Get().AbsPath(space.Path).DoRaw(ctx)
	var s space.Status
	if err != nil || json.Unmarshal(text, &s) != nil {
		return
	}
	r.Store = &s
	if s.Message != "" {
		r.problem("etcd: %s", s.Message)
	}
}

// ask gets the status of each node.
func (r *Report) ask(ctx context.Context, client kubernetes.Interface) {
	problems := make([]string, len(r.Nodes))
	var notAllowed atomic.Int32
	var group errgroup.Group
	group.SetLimit(askAtOnce)
	for i := range r.Nodes {
		n := &r.Nodes[i]
		if !n.Ready {
			continue
		}
		group.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, askTimeout)
			defer cancel()
			text, err := client.CoreV1().RESTClient().Get().Resource("nodes").Name(n.Name).SubResource("proxy").Suffix("status").DoRaw(ctx)
			var s proxy.Status
			if err == nil {
				err = json.Unmarshal(text, &s)
			}
			switch {
			case err == nil:
				n.Programmed = &s
			case apierrors.IsForbidden(err):
				notAllowed.Add(1)
			case apierrors.IsNotFound(err):
				n.NoAgent = true
			default:
				problems[i] = fmt.Sprintf("node %s: its agent does not answer: %s", n.Name, base.OneLine(err))
			}
			return nil
		})
	}
	_ = group.Wait() // the functions return no errors: they are in problems
	r.NotAllowed = int(notAllowed.Load())
	for _, p := range problems {
		if p != "" {
			r.problem("%s", p)
		}
	}
}

func (r *Report) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 4, 3, ' ', 0)
	fmt.Fprintf(w, "SERVER\t%s\n", r.Server)
	if r.Node != "" {
		fmt.Fprintf(w, "VIEW OF\tnode %s: its own Pods, and no other agent\nPROXY\t%s\n", r.Node, base.PlainLine(r.Healthz))
	}
	fmt.Fprintln(w)
	fmt.Fprintln(w, "NODE\tREADY\tADDRESS\tPODS\tMODE\tSERVICE PORTS\tENDPOINTS\tPROGRAMMED")
	for _, n := range r.Nodes {
		pods := strconv.Itoa(n.Pods)
		if n.PodsUnknown {
			pods = "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t", n.Name, yesNo(n.Ready), base.PlainLine(cmp.Or(strings.Join(n.Addresses, ","), "-")), pods)
		if s := n.Programmed; s != nil {
			fmt.Fprintf(w, "%s\t%d\t%d\t%s\n", base.PlainLine(s.Mode), s.ServicePorts, s.Endpoints, programmedText(s))
		} else if n.NoAgent {
			fmt.Fprint(w, "-\t-\t-\tno agent of fairlead\n")
		} else {
			fmt.Fprint(w, "-\t-\t-\tunknown\n")
		}
	}
	r.printServices(w)
	r.printEndpoints(w)
	if err := w.Flush(); err != nil {
		return err
	}
	if l := r.LoadBalancers; l != nil {
		fmt.Fprintf(out, "\nload balancers: %d addresses of %d pools, %d pending\n", l.Addresses, l.Pools, l.Pending)
	}
	if r.NotProbed > 0 {
		fmt.Fprintf(out, "\n%d endpoints written by hand were not probed from this machine\n", r.NotProbed)
	}
	if r.NotAllowed > 0 {
		fmt.Fprintf(out, "\n%d nodes were not asked: it takes the right to get nodes/proxy\n", r.NotAllowed)
	}
	switch {
	case len(r.Problems) > 0:
	case r.NotProbed > 0 || r.NotAllowed > 0:
		fmt.Fprintln(out, "\nnothing else is wrong that could be checked")
		return nil
	default:
		fmt.Fprintln(out, "\nnothing is wrong")
		return nil
	}
	fmt.Fprintln(out)
	for _, p := range slices.Compact(r.Problems) {
		fmt.Fprintln(out, "!", p)
	}
	return nil
}

// printServices shows what is programmed where a Service asks for that.
func (r *Report) printServices(w io.Writer) {
	asked := slices.ContainsFunc(r.Services, func(s ServiceReport) bool { return s.Programmed != nil })
	fmt.Fprint(w, "\nNAMESPACE\tSERVICE\tTYPE\tCLUSTER-IP\tPORTS\tREADY")
	if asked {
		fmt.Fprint(w, "\tPROGRAMMED")
	}
	fmt.Fprintln(w)
	for _, s := range r.Services {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%d/%d", s.Namespace, s.Name, s.Type,
			cmp.Or(strings.Join(s.ClusterIPs, ","), "-"), cmp.Or(strings.Join(s.Ports, ","), "-"), s.Ready, s.Total)
		if asked {
			fmt.Fprint(w, "\t"+conditionText(s.Programmed))
		}
		fmt.Fprintln(w)
	}
}

// conditionText is one word, and why where it is not yes.
func conditionText(c *metav1.Condition) string {
	switch {
	case c == nil:
		return "-"
	case c.Status == metav1.ConditionTrue:
		return "yes"
	case c.Status == metav1.ConditionFalse:
		return "no: " + base.PlainLine(cmp.Or(c.Message, c.Reason))
	}
	return "unknown: " + base.PlainLine(cmp.Or(c.Message, c.Reason))
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// programmedText is one word, and how long the last write to the kernel took.
func programmedText(s *proxy.Status) string {
	if !s.Programmed {
		return "no: " + base.PlainLine(s.Reason)
	}
	return "yes (last in " + time.Duration(s.LastApplyDuration).Round(10*time.Microsecond).String() + ")"
}

// askTimeout bounds the request to one node, and askAtOnce how many there are at
// a time.
const (
	askTimeout = 3 * time.Second
	askAtOnce  = 16
)
