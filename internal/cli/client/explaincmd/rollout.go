package explaincmd

import (
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
)

// rollout is what decides which Pods of a Deployment or DaemonSet end.
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
	}
	return nil
}

// after returns what the change from an earlier state means for each Service whose endpoints are Pods of it. Without replicas its
// Pods leave the world.
func (r *rollout) after(was *rollout, w *explain.World, touched map[svc.Name]bool) (out []explain.Change) {
	renewed := !equality.Semantic.DeepEqual(was.template, r.template)
	fewer := r.scales && r.replicas < was.replicas
	if !renewed && !fewer {
		return nil
	}
	pods := was.pods(w.Pods)
	for _, s := range w.Services {
		count := 0
		for _, p := range pods {
			if explain.Selects(s, p) {
				count++
			}
		}
		if count == 0 && !explain.Selects(s, like(r)) && !explain.Selects(s, like(was)) {
			continue
		}
		if w.Pods == nil { // the user may not read Pods
			count = was.replicas
		}
		if fewer {
			out = append(out, r.scaled(s, was, count))
		}
		if renewed && (r.replicas > 0 || !r.scales) {
			out = append(out, r.renewed(s, min(count, r.left(count))))
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

// left is how many of a number of Pods are there after a change of the replicas.
func (r *rollout) left(pods int) int {
	if r.scales {
		return min(pods, r.replicas)
	}
	return pods
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

func (r *rollout) scaled(s *corev1.Service, was *rollout, pods int) explain.Change {
	end := pods - r.left(pods)
	return explain.Change{Service: svc.NameOf(s).String(), Cuts: cutsOf(end),
		Text: fmt.Sprintf("%s %s/%s has %d replicas in place of %d: %s", r.kind, r.namespace, r.name, r.replicas, was.replicas, podsEnd(end))}
}

func (r *rollout) renewed(s *corev1.Service, pods int) explain.Change {
	c := explain.Change{Service: svc.NameOf(s).String(), Text: fmt.Sprintf("%s %s/%s has a new template", r.kind, r.namespace, r.name)}
	if r.held != "" {
		c.Text += ", which replaces no Pod yet: " + r.held
		return c
	}
	c.Text += fmt.Sprintf(": %s and are replaced, %s", podsEnd(pods), r.order)
	c.Cuts = cutsOf(pods)
	if !explain.Selects(s, like(r)) {
		c.Text += "; the Service does not select the new ones by their labels"
	}
	return c
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
