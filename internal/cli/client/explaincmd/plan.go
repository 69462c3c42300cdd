package explaincmd

import (
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
)

// exitCuts is the exit code of a plan by which a connection would be cut.
const exitCuts = 2

// planReport is what 'fairlead plan' shows. Its JSON form is meant for programs: fields are only ever added.
type planReport struct {
	// Objects are the objects of the file: created, changed or unchanged.
	Objects []planned        `json:"objects"`
	Changes []explain.Change `json:"changes"`
	// Cuts reports whether a connection would be cut.
	Cuts bool `json:"cuts"`
	// Problems are what the plan does not know.
	Problems []string `json:"problems,omitempty"`
}

// NewPlan returns 'fairlead plan'.
func NewPlan(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var output base.OutputFlag
	var file string
	cmd := &cobra.Command{
		Use:   "plan -f FILE",
		Short: "Show what 'kubectl apply -f FILE' would change for Services, before it is done",
		Long: `Show what 'kubectl apply -f FILE' would change: the addresses at which Services answer on
each node, their endpoints, the answers of DNS, and which open connections would end. The
API server is asked what the objects would become (a dry run); nothing is changed. Services,
EndpointSlices, Pods, Deployments and DaemonSets are looked at; objects of other kinds are
listed, and have no effect in the plan.

The exit code is 2 if a connection would be cut, and 0 if not. It is 64 for a mistake in how
the command was called, and 1 for any other error.`,
		Example: `  fairlead plan -f service.yaml
  fairlead plan -f service.yaml -o json && kubectl apply -f service.yaml`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Check(); err != nil {
				return err
			}
			if file == "" {
				return base.Usagef("fairlead plan needs -f FILE")
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), base.RequestTimeout)
			defer cancel()
			r, err := plan(ctx, &f, g.In, file)
			if err != nil {
				return err
			}
			if err := output.Write(g.Out, r, r.print); err != nil {
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
	output.Add(cmd)
	cmd.Flags().StringVarP(&file, "filename", "f", "", `file with objects as YAML or JSON, "-" for the standard input`)
	return cmd
}

func plan(ctx context.Context, f *base.ClientFlags, in io.Reader, file string) (*planReport, error) {
	config, namespace, err := f.Load()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	dyn, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	objects, err := readObjects(in, file, namespace)
	if err != nil {
		return nil, err
	}
	c, err := read(ctx, client, &explain.Question{}, namespace)
	if err != nil {
		return nil, err
	}
	before := c.world()
	after := explain.World{Services: slices.Clone(before.Services), Slices: slices.Clone(before.Slices), Pods: slices.Clone(before.Pods),
		Nodes: before.Nodes}
	r := &planReport{Changes: []explain.Change{}}
	touched := map[svc.Name]bool{}
	for i := range objects {
		done, err := dryRun(ctx, dyn, &objects[i])
		if err != nil {
			return nil, err
		}
		r.Objects = append(r.Objects, done.planned)
		r.Changes = append(r.Changes, done.into(&after, touched)...)
	}
	after.Slices = after.Follow(touched)
	r.unread(c, before, &after, touched)
	r.Changes = append(r.Changes, explain.Differences(&c.ranges, before, &after, touched, c.objects.Domains)...)
	for _, d := range r.Changes {
		r.Cuts = r.Cuts || d.Cuts != ""
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

// into puts the object into the world after the apply, and marks the Services that it touches. It returns the changes that
// no Table tells: Pods that end.
func (d *done) into(w *explain.World, touched map[svc.Name]bool) (out []explain.Change) {
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
	case *appsv1.Deployment, *appsv1.DaemonSet:
		was, is := rolloutOf(d.before), rolloutOf(o)
		if was != nil && is != nil {
			out = is.after(was, w, touched)
		}
	}
	return out
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
	if len(r.Changes) == 0 {
		_, err := fmt.Fprintln(out, "\nnothing changes for Services")
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
	return nil
}
