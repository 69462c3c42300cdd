package explaincmd

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
)

// rollout is what decides which Pods of a Deployment, a DaemonSet or a StatefulSet end.
type rollout struct {
	kind, namespace, name string
	selector              *metav1.LabelSelector
	template              *corev1.PodTemplateSpec
	// replicas is how many Pods it has, by its spec or, of a DaemonSet, by its status.
	replicas int
	// scales is set if the spec has the replicas.
	scales bool
	// held is why a new template replaces no Pod by itself, empty if it does.
	held string
	// order is how Pods are replaced.
	order string
	// ordered is set for a StatefulSet: its Pods have ordinals, from start on.
	ordered bool
	start   int
	// first is how many of the first Pods, counted from start, a new template does not replace: the partition of a StatefulSet.
	first int
	// gone is set if the object is deleted.
	gone bool
}

// rolloutOf returns nil for an object of another kind.
func rolloutOf(object any) *rollout {
	const oneByOne = "one after the other"
	switch o := object.(type) {
	case *appsv1.Deployment:
		r := &rollout{kind: "Deployment", namespace: o.Namespace, name: o.Name, selector: o.Spec.Selector, template: &o.Spec.Template,
			replicas: 1, scales: true, order: oneByOne}
		if o.Spec.Replicas != nil {
			r.replicas = int(*o.Spec.Replicas)
		}
		if o.Spec.Paused {
			r.held = "it is paused"
		}
		if o.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
			r.order = "all at once"
		}
		return r
	case *appsv1.DaemonSet:
		r := &rollout{kind: "DaemonSet", namespace: o.Namespace, name: o.Name, selector: o.Spec.Selector, template: &o.Spec.Template,
			replicas: int(o.Status.CurrentNumberScheduled), order: oneByOne}
		if o.Spec.UpdateStrategy.Type == appsv1.OnDeleteDaemonSetStrategyType {
			r.held = "its updateStrategy is OnDelete"
		}
		return r
	case *appsv1.StatefulSet:
		r := &rollout{kind: "StatefulSet", namespace: o.Namespace, name: o.Name, selector: o.Spec.Selector, template: &o.Spec.Template,
			replicas: 1, scales: true, order: oneByOne + ", the last one first", ordered: true}
		if o.Spec.Ordinals != nil {
			r.start = int(o.Spec.Ordinals.Start)
		}
		if o.Spec.Replicas != nil {
			r.replicas = int(*o.Spec.Replicas)
		}
		if o.Spec.UpdateStrategy.Type == appsv1.OnDeleteStatefulSetStrategyType {
			r.held = "its updateStrategy is OnDelete"
		}
		if u := o.Spec.UpdateStrategy.RollingUpdate; u != nil && u.Partition != nil {
			r.first = int(*u.Partition)
		}
		return r
	}
	return nil
}

// after returns what the change from an earlier state means for each Service whose endpoints are Pods of it. Without replicas its
// Pods leave the world.
func (r *rollout) after(was *rollout, w *explain.World, touched map[svc.Name]bool) (out []explain.Change) {
	renewed := !equality.Semantic.DeepEqual(was.template, r.template)
	fewer := r.scales && (r.replicas < was.replicas || r.start != was.start)
	if !renewed && !fewer {
		return nil
	}
	pods := was.pods(w.Pods)
	if w.Pods == nil { // the user may not read Pods
		pods = was.expected()
	}
	for _, s := range w.Services {
		var selected []*corev1.Pod
		for _, p := range pods {
			if explain.Selects(s, p) {
				selected = append(selected, p)
			}
		}
		if len(selected) == 0 && !explain.Selects(s, like(r)) && !explain.Selects(s, like(was)) {
			continue
		}
		kept := r.keeps(selected)
		if end := len(selected) - len(kept); fewer && (end > 0 || !r.ordered) {
			out = append(out, r.scaled(s, was, end))
		}
		if renewed && (r.replicas > 0 || !r.scales) {
			out = append(out, r.renewed(s, r.replaces(kept)))
		}
	}
	if fewer && r.replicas == 0 {
		for _, p := range pods {
			markSelecting(w, p, touched)
		}
		w.Pods = slices.DeleteFunc(w.Pods, func(p *corev1.Pod) bool { return slices.Contains(pods, p) })
	}
	return out
}

// keeps returns the Pods that stay after a change of the replicas. A StatefulSet keeps the Pods with its ordinals.
func (r *rollout) keeps(pods []*corev1.Pod) []*corev1.Pod {
	switch {
	case !r.scales:
		return pods
	case !r.ordered:
		return pods[:min(len(pods), r.replicas)]
	}
	return slices.DeleteFunc(slices.Clone(pods), func(p *corev1.Pod) bool {
		n := r.ordinal(p)
		return n < r.start || n >= r.start+r.replicas
	})
}

// replaces returns the Pods that a new template replaces.
func (r *rollout) replaces(pods []*corev1.Pod) []*corev1.Pod {
	if !r.ordered {
		return pods
	}
	return slices.DeleteFunc(slices.Clone(pods), func(p *corev1.Pod) bool { return r.ordinal(p) < r.start+r.first })
}

// ordinal is the number of a Pod of a StatefulSet, by its name; -1 for another Pod.
func (r *rollout) ordinal(p *corev1.Pod) int {
	text, is := strings.CutPrefix(p.Name, r.name+"-")
	n, err := strconv.ParseUint(text, 10, 31)
	if !is || err != nil {
		return -1
	}
	return int(n)
}

// maxExpected bounds the Pods that are expected of one object.
const maxExpected = 10000

// expected are the Pods that it has by its spec.
func (r *rollout) expected() (out []*corev1.Pod) {
	for i := range min(r.replicas, maxExpected) {
		p := like(r)
		if r.ordered {
			p.Name = fmt.Sprintf("%s-%d", r.name, r.start+i)
			r.number(p)
		}
		out = append(out, p)
	}
	return out
}

// number adds the labels that the controller of StatefulSets sets.
func (r *rollout) number(p *corev1.Pod) {
	p.Labels = maps.Clone(p.Labels)
	if p.Labels == nil {
		p.Labels = map[string]string{}
	}
	p.Labels[appsv1.StatefulSetPodNameLabel] = p.Name
	p.Labels[appsv1.PodIndexLabel] = strconv.Itoa(r.ordinal(p))
}

// again is the Pod that comes in place of another one.
func (r *rollout) again(p *corev1.Pod) *corev1.Pod {
	next := like(r)
	if r.ordered {
		next.Name = p.Name
		r.number(next)
	}
	return next
}

func like(r *rollout) *corev1.Pod {
	p := &corev1.Pod{}
	p.Namespace, p.Labels = r.namespace, r.template.Labels
	return p
}

// pods are the Pods of it that run, or may yet.
func (r *rollout) pods(all []*corev1.Pod) (out []*corev1.Pod) {
	selector, err := metav1.LabelSelectorAsSelector(r.selector)
	if err != nil {
		return nil
	}
	for _, p := range all {
		ended := p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
		if !ended && p.Namespace == r.namespace && selector.Matches(labels.Set(p.Labels)) {
			out = append(out, p)
		}
	}
	return out
}

func (r *rollout) scaled(s *corev1.Service, was *rollout, end int) explain.Change {
	what := fmt.Sprintf("has %s in place of %d", replicasText(r.replicas), was.replicas)
	switch {
	case r.gone:
		what = "is deleted"
	case r.start != was.start:
		what = fmt.Sprintf("has %s from ordinal %d on, in place of %d from %d on", replicasText(r.replicas), r.start, was.replicas, was.start)
	}
	return explain.Change{Service: svc.NameOf(s).String(), Cuts: cutsOf(end),
		Text: fmt.Sprintf("%s %s/%s %s: %s", r.kind, r.namespace, r.name, what, podsEnd(end))}
}

func (r *rollout) renewed(s *corev1.Service, pods []*corev1.Pod) explain.Change {
	c := explain.Change{Service: svc.NameOf(s).String(), Text: fmt.Sprintf("%s %s/%s has a new template", r.kind, r.namespace, r.name)}
	if r.held != "" {
		c.Text += ", which replaces no Pod yet: " + r.held
		return c
	}
	replaced := "are replaced"
	if len(pods) == 1 {
		replaced = "is replaced"
	}
	c.Text += fmt.Sprintf(": %s and %s, %s", podsEnd(len(pods)), replaced, r.order)
	c.Cuts = cutsOf(len(pods))
	if slices.ContainsFunc(pods, func(p *corev1.Pod) bool { return !explain.Selects(s, r.again(p)) }) {
		c.Text += "; the Service does not select the new ones by their labels"
	}
	return c
}

func replicasText(n int) string {
	if n == 1 {
		return "1 replica"
	}
	return fmt.Sprintf("%d replicas", n)
}

func podsEnd(n int) string {
	if n == 1 {
		return "1 Pod ends"
	}
	return fmt.Sprintf("%d Pods end", n)
}

// cutsOf is why the end of Pods ends connections.
func cutsOf(pods int) string {
	if pods == 0 {
		return ""
	}
	return "connections that are still open when a Pod stops end with it"
}
