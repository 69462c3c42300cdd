package walk

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/workloads"
)

// rollOut waits until the Pods of a DaemonSet are of its template and ready, except for those on nodes that are not ready. The
// time of a step begins again with each Pod, since DaemonSets replace few at a time.
func (w *Walk) rollOut(ctx context.Context, d *appsv1.DaemonSet) error {
	for most, grown := 0, true; grown; {
		grown = false
		within, cancel := context.WithTimeout(ctx, w.Timeout)
		err := w.act.Await(within, func() error {
			n, err := w.replaced(within, d)
			if err != nil && n > most {
				most, grown = n, true
				return nil
			}
			return err
		})
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// replaced returns how many Pods of a DaemonSet are of its template and ready, and an error if one is missing.
func (w *Walk) replaced(ctx context.Context, of *appsv1.DaemonSet) (int, error) {
	d, err := w.Client.AppsV1().DaemonSets(of.Namespace).Get(ctx, of.Name, metav1.GetOptions{})
	if err != nil || d.Spec.UpdateStrategy.Type == appsv1.OnDeleteDaemonSetStrategyType {
		return 0, err
	}
	s := &d.Status
	if s.ObservedGeneration < d.Generation {
		return 0, fmt.Errorf("the controller of DaemonSets has not seen the change of %s", d.Name)
	}
	n, want := int(min(s.UpdatedNumberScheduled, s.NumberReady)), int(s.DesiredNumberScheduled)
	hint, off := "", w.notReady()
	if len(off) > 0 && n < want {
		if n, want, err = w.countPods(ctx, d, off); err != nil {
			return 0, err
		}
		hint = fmt.Sprintf("; the nodes that are not ready (%s) count for maxUnavailable of its updateStrategy", strings.Join(off, ", "))
	}
	if n < want || s.CurrentNumberScheduled < s.DesiredNumberScheduled {
		return n, fmt.Errorf("the DaemonSet %s has %d of %d Pods updated and ready%s", d.Name, n, want, hint)
	}
	return n, nil
}

// notReady are the names of nodes that are not ready.
func (w *Walk) notReady() (out []string) {
	for _, n := range w.cluster.Nodes {
		if !migrate.Ready(n) {
			out = append(out, n.Name)
		}
	}
	return out
}

// countPods counts the Pods of a DaemonSet that are not on some nodes: those of its newest template that are ready, and all.
func (w *Walk) countPods(ctx context.Context, d *appsv1.DaemonSet, except []string) (replaced, all int, err error) {
	selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	if err != nil {
		return 0, 0, err
	}
	which := metav1.ListOptions{LabelSelector: selector.String()}
	revisions, err := w.Client.AppsV1().ControllerRevisions(d.Namespace).List(ctx, which)
	if err != nil {
		return 0, 0, err
	}
	var newest *appsv1.ControllerRevision
	for i := range revisions.Items {
		if r := &revisions.Items[i]; metav1.IsControlledBy(r, d) && (newest == nil || r.Revision > newest.Revision) {
			newest = r
		}
	}
	if newest == nil {
		return 0, 0, errors.New("there is no ControllerRevision of the DaemonSet " + d.Name)
	}
	hash := newest.Labels[appsv1.ControllerRevisionHashLabelKey]
	pods, err := w.Client.CoreV1().Pods(d.Namespace).List(ctx, which)
	if err != nil {
		return 0, 0, err
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		if !metav1.IsControlledBy(p, d) || slices.Contains(except, p.Spec.NodeName) {
			continue
		}
		all++
		if p.Labels[appsv1.ControllerRevisionHashLabelKey] == hash && p.DeletionTimestamp == nil && workloads.IsReady(p) {
			replaced++
		}
	}
	return replaced, all, nil
}

// sameImage waits until the nodes that have fairlead proxy run the image of this walk, before another node gets it.
func (w *Walk) sameImage(ctx context.Context) error {
	d := w.cluster.Fairlead
	if d == nil || d.Spec.Template.Spec.Containers[0].Image == w.objects.daemonSet.Spec.Template.Spec.Containers[0].Image {
		return nil
	}
	if !slices.ContainsFunc(w.plan.Nodes, func(n migrate.NodePlan) bool { return n.Phase.HasFairlead() }) {
		return nil
	}
	fmt.Fprintln(w.Out, "waiting for fairlead proxy to run the new image")
	if err := w.rollOut(ctx, w.objects.daemonSet); err != nil {
		return fmt.Errorf("%w. No other node is changed. Go on with 'fairlead migrate apply --image IMAGE', or back with "+
			"'fairlead migrate rollback --image IMAGE'", err)
	}
	return nil
}
