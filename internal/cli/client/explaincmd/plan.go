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
	"k8s.io/apimachinery/pkg/api/equality"
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

The exit code is 2 if a connection would be cut, and 0 if not.`,
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
	before := explain.World{Services: c.objects.Services, Slices: c.objects.Slices, Pods: c.objects.Pods}
	for _, n := range c.names[:min(len(c.names), maxNodes)] {
		before.Nodes = append(before.Nodes, c.nodes[n])
	}
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
	r.Changes = append(r.Changes, explain.Differences(&c.ranges, &before, &after, touched, c.objects.Domains)...)
	for _, d := range r.Changes {
		r.Cuts = r.Cuts || d.Cuts != ""
	}
	return r, nil
}

// into puts the object into the world after the apply, and marks the Services that it touches. It returns the changes that
// no Table tells: Pods that are replaced.
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
	case *appsv1.Deployment:
		if b, ok := d.before.(*appsv1.Deployment); ok && !equality.Semantic.DeepEqual(b.Spec.Template.Spec, o.Spec.Template.Spec) {
			out = replacedPods(w, "Deployment", o.Namespace, o.Name, o.Spec.Template.Labels)
		}
	case *appsv1.DaemonSet:
		if b, ok := d.before.(*appsv1.DaemonSet); ok && !equality.Semantic.DeepEqual(b.Spec.Template.Spec, o.Spec.Template.Spec) {
			out = replacedPods(w, "DaemonSet", o.Namespace, o.Name, o.Spec.Template.Labels)
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

// replacedPods names the Services whose endpoints are Pods of a set that a new template replaces.
func replacedPods(w *explain.World, kind, namespace, name string, labels map[string]string) (out []explain.Change) {
	like := &corev1.Pod{}
	like.Namespace, like.Labels = namespace, labels
	for _, s := range w.Services {
		if explain.Selects(s, like) {
			out = append(out, explain.Change{Service: svc.NameOf(s).String(),
				Text: fmt.Sprintf("%s %s/%s has a new template: its Pods are replaced one after the other", kind, namespace, name),
				Cuts: "connections that are still open when a Pod stops end with it"})
		}
	}
	return out
}

func (r *planReport) print(out io.Writer) error {
	for _, o := range r.Objects {
		fmt.Fprintf(out, "%s %s: %s\n", o.Kind, base.PlainLine(o.Name), o.Result)
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
