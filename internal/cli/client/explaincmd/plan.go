package explaincmd

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiclient"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/explaincmd/listing"
	"github.com/fairlead/fairlead/internal/cli/client/explaincmd/served"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/explain/routes"
	"github.com/fairlead/fairlead/internal/svc"
)

// exitCuts is the exit code of a plan by which a connection would be cut.
const exitCuts = 2

// planReport is what 'fairlead plan' shows. Its JSON form is meant for programs: fields are only ever added.
type planReport struct {
	// Objects are the objects of the file: created, changed or unchanged.
	Objects []planned        `json:"objects"`
	Changes []explain.Change `json:"changes"`
	// Routes are what changes at the fronts of Ingresses and Gateways.
	Routes []routes.Front `json:"routes"`
	// Cuts reports whether a connection would be cut, or a host or path would not be served any more.
	Cuts bool `json:"cuts"`
	// Problems are what the plan does not know.
	Problems []string `json:"problems,omitempty"`
}

// planFlags are the flags of 'fairlead plan'.
type planFlags struct {
	base.ClientFlags
	output  base.OutputFlag
	file    string
	remove  bool
	timeout time.Duration
}

// planTime is how long a plan may take unless the user gives another time: for tens of thousands of objects, and a long file.
const planTime = 5 * time.Minute

// NewPlan returns 'fairlead plan'.
func NewPlan(g *base.Global) *cobra.Command {
	var f planFlags
	cmd := &cobra.Command{
		Use:   "plan -f FILE",
		Short: "Show what 'kubectl apply -f FILE' would change for Services, hosts and paths, before it is done",
		Long: `Show what 'kubectl apply -f FILE' would change: the addresses at which Services answer on
each node, their endpoints, the answers of DNS, the certificates that listeners of the
proxied way serve, the addresses of pools, and which open connections would end. For Ingresses
and Gateways it is each host and path that would be served otherwise: by which Service, with
which certificate, by which rule, or no longer. The API server is asked what the objects would
become (a dry run); nothing is changed. With --delete it is 'kubectl delete -f FILE'.

Services, EndpointSlices, Pods, Deployments, DaemonSets, StatefulSets, Secrets, ConfigMaps with
certificates of authorities, IPAddressPools, Ingresses, IngressClasses, Namespaces and the kinds
of the Gateway API are looked at; objects of other kinds are listed, and have no effect in the
plan. A line "may change" names two rules with expressions of which the plan does not know which
requests they share.

The exit code is 2 if a connection would be cut, a host or path would not be served any more, or
a listener would close, and 0 if not. It is 64 for a mistake in how
the command was called, and 1 for any other error: also for an object of a kind that the API
server does not serve, for kubectl would fail, for an object that the file has twice with
different fields (but for --delete), and if --timeout is over before all is read.`,
		Example: `  fairlead plan -f service.yaml
  fairlead plan -f ingress.yaml && kubectl apply -f ingress.yaml
  fairlead plan -f certificate.yaml --delete
  fairlead plan -f service.yaml -o json && kubectl apply -f service.yaml`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.output.Check(); err != nil {
				return err
			}
			if f.file == "" {
				return base.Usagef("fairlead plan needs -f FILE")
			}
			if f.timeout <= 0 {
				return base.Usagef("--timeout is %s; want a time above 0, such as %s", f.timeout, planTime)
			}
			r, err := plan(cmd.Context(), &f, g)
			if err != nil {
				return err
			}
			if err := f.output.Write(g.Out, r, r.print); err != nil {
				return err
			}
			if err := r.unserved(); err != nil {
				return err
			}
			if r.Cuts {
				return base.ExitCodeError(exitCuts)
			}
			return nil
		},
	}
	base.UsageExitsWith64(cmd)
	f.Add(cmd)
	f.AddNamespace(cmd)
	f.output.Add(cmd)
	cmd.Flags().BoolVar(&f.remove, "delete", false, "plan 'kubectl delete' of the objects of the file, in place of 'kubectl apply'")
	cmd.Flags().StringVarP(&f.file, "filename", "f", "", `file with objects as YAML or JSON, "-" for the standard input`)
	cmd.Flags().DurationVar(&f.timeout, "timeout", planTime, "how long the plan may take; without all that it needs there is no plan")
	return cmd
}

// plan makes a plan, or returns what was not read when the time was over.
func plan(ctx context.Context, f *planFlags, g *base.Global) (*planReport, error) {
	config, namespace, err := f.Load()
	if err != nil {
		return nil, err
	}
	config = apiclient.Tuned(config, "") // the server limits a client that lists much
	client, err := kubernetes.NewForConfig(apiclient.Protobuf(config))
	if err != nil {
		return nil, err
	}
	objects, err := readObjects(g.In, f.file, namespace, f.remove)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	p := &planning{client: client, config: config, remove: f.remove, reader: listing.New(namespacesOf(ctx, client, objects, namespace))}
	p.reader.Tell = func(text string) { fmt.Fprintln(g.Err, "fairlead plan:", text) }
	r, err := p.report(ctx, objects)
	if err == nil {
		err = ctx.Err() // some reads count as refused where they fail
	}
	if err != nil {
		return nil, p.reader.Late(ctx, err, f.timeout)
	}
	return r, nil
}

// namespacesOf returns the namespaces of the objects of a file, and others that may concern them: the ones that the objects name, the one
// of the kubeconfig, and the ones that the user may list.
func namespacesOf(ctx context.Context, client kubernetes.Interface, objects []wanted, namespace string) (own, others []string) {
	for i := range objects {
		o := &objects[i]
		switch {
		case o.GetKind() == "Namespace" && o.GroupVersionKind().Group == "":
			own = append(own, o.GetName())
		case !kinds[o.GroupVersionKind()].cluster:
			own = append(own, o.GetNamespace())
		}
		others = namedNamespaces(o.Object["spec"], others)
	}
	others = append(others, namespace)
	if list, err := namespaces(ctx, client); err == nil {
		others = append(others, list...)
	}
	return own, others
}

// namedNamespaces adds the namespaces that fields of a value name, as references do.
func namedNamespaces(value any, to []string) []string {
	switch v := value.(type) {
	case map[string]any:
		for key, x := range v {
			if n, is := x.(string); is && key == "namespace" {
				to = append(to, n)
			}
			to = namedNamespaces(x, to)
		}
	case []any:
		for _, x := range v {
			to = namedNamespaces(x, to)
		}
	}
	return to
}

// planning makes one plan.
type planning struct {
	client kubernetes.Interface
	config *rest.Config
	reader *listing.Reader
	remove bool
}

// What a plan reads beside what fronts are made of, in words.
const (
	readServices = "Services"
	readSlices   = "EndpointSlices"
	readPods     = "Pods"
	readNodes    = "Nodes"
	readDryRuns  = "what the server makes of the objects of the file"
)

// read reads what decides about Services.
func (p *planning) read(ctx context.Context, r *planReport) (*cluster, error) {
	c := newCluster()
	c.settings(ctx, p.client)
	core, reader := p.client.CoreV1(), p.reader
	c.objects.Services = listing.List[*corev1.ServiceList, corev1.Service](ctx, reader, readServices,
		func(n string) listing.Func[*corev1.ServiceList] { return core.Services(n).List })
	c.objects.Slices = listing.List[*discoveryv1.EndpointSliceList, discoveryv1.EndpointSlice](ctx, reader, readSlices,
		func(n string) listing.Func[*discoveryv1.EndpointSliceList] {
			return p.client.DiscoveryV1().EndpointSlices(n).List
		})
	slices.SortFunc(c.objects.Slices, func(a, b *discoveryv1.EndpointSlice) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	pods := listing.List[*corev1.PodList, corev1.Pod](ctx, reader, readPods,
		func(n string) listing.Func[*corev1.PodList] { return core.Pods(n).List })
	if !reader.None(readPods) {
		c.objects.Pods = append([]*corev1.Pod{}, pods...) // not nil: they could be read
	}
	nodes, _ := listing.Whole[*corev1.NodeList, corev1.Node](ctx, reader, readNodes, core.Nodes().List)
	c.putNodes(nodes)
	if err := reader.Failed(); err != nil {
		return nil, err
	}
	for _, kind := range []string{readServices, readSlices} {
		if reader.None(kind) {
			return nil, fmt.Errorf("cannot read %s: you may not list them in any namespace of the plan", kind)
		}
	}
	if what, has, lacks := reader.Partly(readServices, readSlices, readPods); what != "" {
		text := fmt.Sprintf("%s were read of %s only, for want of rights: what changes for others is not in the plan", what, has)
		if lacks != "" {
			text += " (" + lacks + ")"
		}
		r.Problems = append(r.Problems, text)
	}
	return c, nil
}

func (p *planning) report(ctx context.Context, objects []wanted) (*planReport, error) {
	p.reader.Expect(readServices, readSlices, readPods, readNodes, readDryRuns, served.All)
	r := &planReport{Changes: []explain.Change{}, Routes: []routes.Front{}}
	c, err := p.read(ctx, r)
	if err != nil {
		return nil, err
	}
	dyn, err := dynamic.NewForConfig(p.config)
	if err != nil {
		return nil, err
	}
	before := c.world()
	after := explain.World{Services: slices.Clone(before.Services), Slices: slices.Clone(before.Slices), Pods: slices.Clone(before.Pods),
		Nodes: before.Nodes}
	touched := map[svc.Name]bool{}
	dry := dryRunner{client: dyn, discovery: p.client.Discovery(), remove: p.remove, served: map[schema.GroupVersion]*metav1.APIResourceList{}}
	beside := &besideTables{client: p.client, config: p.config, cluster: c, report: r, reader: p.reader}
	serving := &served.Routes{Client: p.client, Config: p.config, Services: c.objects.Services, Reader: p.reader}
	p.reader.Begin(readDryRuns)
	for i := range objects {
		done, err := dry.run(ctx, &objects[i])
		if err != nil {
			return nil, err
		}
		p.reader.Count(1)
		r.Objects = append(r.Objects, done.planned)
		r.Changes = append(r.Changes, done.into(&after, touched)...)
		beside.add(done)
		serving.Add(done.before, done.after, done.Result != unchanged)
	}
	p.reader.End()
	fronts, err := serving.Fronts(ctx)
	if err != nil {
		return nil, err
	}
	r.Routes, r.Problems = append(r.Routes, fronts...), append(r.Problems, serving.Problems...)
	if err := beside.changes(ctx, after.Services, serving); err != nil {
		return nil, err
	}
	p.reader.Compare()
	after.Slices = after.Follow(touched)
	r.unread(c, before, &after, touched)
	r.Changes = append(r.Changes, explain.Differences(&c.ranges, before, &after, touched, c.objects.Domains)...)
	slices.SortStableFunc(r.Changes, func(a, b explain.Change) int { return strings.Compare(a.Service, b.Service) })
	for _, d := range r.Changes {
		r.Cuts = r.Cuts || d.Cuts != ""
	}
	for _, f := range r.Routes {
		r.Cuts = r.Cuts || slices.ContainsFunc(f.Changes, func(d routes.Change) bool { return d.Cuts != "" })
	}
	return r, nil
}

// world is what the API has, with all nodes: no node is asked.
func (c *cluster) world() *explain.World {
	out := &explain.World{Services: c.objects.Services, Slices: c.objects.Slices, Pods: c.objects.Pods}
	for _, n := range c.names {
		out.Nodes = append(out.Nodes, c.nodes[n])
	}
	return out
}

// unread takes the nodes of the endpoints if the user may not read Nodes, and adds the problems.
func (r *planReport) unread(c *cluster, before, after *explain.World, touched map[svc.Name]bool) {
	if len(c.names) == 0 {
		var list []*discoveryv1.EndpointSlice
		for _, s := range slices.Concat(before.Slices, after.Slices) {
			if touched[sliceOwner(s)] {
				list = append(list, s)
			}
		}
		for _, n := range endpointNodes(list) {
			after.Nodes = append(after.Nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n}})
		}
		r.Problems = append(r.Problems, noNodes+": the plan is for the nodes of the endpoints, without node ports")
	}
	if c.objects.Pods == nil {
		r.Problems = append(r.Problems, "you may not read Pods: how many end is by the replicas of the set")
	}
}

// unserved is the error for objects of kinds that the API server does not have.
func (r *planReport) unserved() error {
	for _, o := range r.Objects {
		if o.Result == notServed {
			return fmt.Errorf("%s %s: the API server does not serve this kind, so that kubectl fails (docs/compatibility.md has the kinds that "+
				"fairlead serves)", o.Kind, base.PlainLine(o.Name))
		}
	}
	return nil
}

// into puts the object into the world after the apply, and marks the Services that it touches. It returns the changes that
// no Table tells: Pods that end.
func (d *done) into(w *explain.World, touched map[svc.Name]bool) (out []explain.Change) {
	if d.after == nil {
		return d.outOf(w, touched)
	}
	switch o := d.after.(type) {
	case *corev1.Service:
		if o.Spec.Type != corev1.ServiceTypeLoadBalancer {
			o.Status.LoadBalancer = corev1.LoadBalancerStatus{} // its controller gives the addresses back
		}
		w.Services = replaced(w.Services, o)
		touched[svc.NameOf(o)] = true
	case *discoveryv1.EndpointSlice:
		if b, ok := d.before.(*discoveryv1.EndpointSlice); ok {
			touched[svc.Name{Namespace: b.Namespace, Name: b.Labels[discoveryv1.LabelServiceName]}] = true
		}
		w.Slices = replaced(w.Slices, o)
		touched[svc.Name{Namespace: o.Namespace, Name: o.Labels[discoveryv1.LabelServiceName]}] = true
	case *corev1.Pod:
		for _, p := range []any{d.before, o} {
			if pod, ok := p.(*corev1.Pod); ok {
				markSelecting(w, pod, touched)
			}
		}
		w.Pods = replaced(w.Pods, o)
	case *appsv1.Deployment, *appsv1.DaemonSet, *appsv1.StatefulSet:
		was, is := rolloutOf(d.before), rolloutOf(o)
		if was != nil && is != nil {
			out = is.after(was, w, touched)
		}
	}
	return out
}

// outOf takes an object that is deleted out of the world.
func (d *done) outOf(w *explain.World, touched map[svc.Name]bool) []explain.Change {
	switch o := d.before.(type) {
	case *corev1.Service:
		n := svc.NameOf(o)
		w.Services = without(w.Services, o)
		w.Slices = slices.DeleteFunc(w.Slices, func(s *discoveryv1.EndpointSlice) bool { return sliceOwner(s) == n })
		touched[n] = true
	case *discoveryv1.EndpointSlice:
		w.Slices = without(w.Slices, o)
		touched[sliceOwner(o)] = true
	case *corev1.Pod:
		markSelecting(w, o, touched)
		w.Pods = without(w.Pods, o)
	case *appsv1.Deployment, *appsv1.DaemonSet, *appsv1.StatefulSet:
		was := rolloutOf(o)
		is := *was
		is.scales, is.replicas, is.gone = true, 0, true
		return is.after(was, w, touched)
	}
	return nil
}

func without[T object](list []T, o T) []T {
	return slices.DeleteFunc(list, func(x T) bool { return x.GetNamespace() == o.GetNamespace() && x.GetName() == o.GetName() })
}

type object interface {
	GetNamespace() string
	GetName() string
}

func replaced[T object](list []T, o T) []T {
	i := slices.IndexFunc(list, func(x T) bool { return x.GetNamespace() == o.GetNamespace() && x.GetName() == o.GetName() })
	if i < 0 {
		return append(list, o)
	}
	list[i] = o
	return list
}

// markSelecting marks the Services that select a Pod.
func markSelecting(w *explain.World, p *corev1.Pod, touched map[svc.Name]bool) {
	for _, s := range w.Services {
		if explain.Selects(s, p) {
			touched[svc.NameOf(s)] = true
		}
	}
}

func (r *planReport) print(out io.Writer) error {
	for _, o := range r.Objects {
		fmt.Fprintf(out, "%s %s: %s\n", o.Kind, base.PlainLine(o.Name), o.Result)
	}
	for i, p := range r.Problems {
		if i == 0 {
			fmt.Fprintln(out)
		}
		fmt.Fprintln(out, "!", base.PlainLine(p))
	}
	switch {
	case len(r.Changes)+len(r.Routes) > 0:
	case len(r.Problems) > 0:
		_, err := fmt.Fprintln(out, "\nnothing changes for Services, hosts and paths, as far as the plan knows")
		return err
	default:
		_, err := fmt.Fprintln(out, "\nnothing changes for Services, hosts and paths")
		return err
	}
	last := ""
	for _, c := range r.Changes {
		if c.Service != last {
			fmt.Fprintf(out, "\nService %s\n", c.Service)
			last = c.Service
		}
		where := ""
		if len(c.Nodes) > 0 {
			where = fmt.Sprintf(" (on %s)", base.PlainLine(fmt.Sprint(c.Nodes)))
		}
		fmt.Fprintf(out, "  %s%s\n", base.PlainLine(c.Text), where)
		if c.Cuts != "" {
			fmt.Fprintf(out, "  ! CUT: %s\n", base.PlainLine(c.Cuts))
		}
	}
	served.Print(out, r.Routes)
	return nil
}
