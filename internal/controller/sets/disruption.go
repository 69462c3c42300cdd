package sets

import (
	"context"
	"fmt"
	"maps"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/controller/selection"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/workloads"
)

// disruption keeps the status of PodDisruptionBudgets, by which evictions are allowed.
type disruption struct {
	*kit.Kit
	index *selection.Index
	loop  *loop.Loop[svc.Name]
}

// NewDisruption returns the controller of PodDisruptionBudgets.
func NewDisruption(k *kit.Kit, name string, index *selection.Index) (kit.Task, error) {
	c := &disruption{Kit: k, index: index}
	c.loop = loop.New(k.Log, name, 2, c.sync)
	set := func(b *policyv1.PodDisruptionBudget) { c.loop.Queue.Add(svc.NameOf(b)) }
	if err := k.Handle(k.Informers.Policy().V1().PodDisruptionBudgets().Informer(), kit.Handlers(set, nil)); err != nil {
		return nil, err
	}
	deployments := differing(func(d *appsv1.Deployment) { c.selecting(d.Namespace, d.Spec.Template.Labels) },
		func(a, b *appsv1.Deployment) bool { return scaleDiffers(a, b, a.Spec.Replicas, b.Spec.Replicas) })
	if err := k.Handle(k.Informers.Apps().V1().Deployments().Informer(), deployments); err != nil {
		return nil, err
	}
	if err := k.Handle(k.Informers.Apps().V1().ReplicaSets().Informer(), c.setHandlers()); err != nil {
		return nil, err
	}
	c.index.FollowPods(c.podChanged)
	return c.loop.Run, nil
}

func (c *disruption) setHandlers() cache.ResourceEventHandlerFuncs {
	return differing(func(r *appsv1.ReplicaSet) { c.selecting(r.Namespace, r.Spec.Template.Labels) },
		func(a, b *appsv1.ReplicaSet) bool { return scaleDiffers(a, b, a.Spec.Replicas, b.Spec.Replicas) })
}

func (c *disruption) podChanged(before, now *corev1.Pod) {
	if before != nil && now != nil && !healthDiffers(before, now) {
		return
	}
	for _, p := range []*corev1.Pod{before, now} {
		if p != nil {
			c.selecting(p.Namespace, p.Labels)
		}
	}
}

// differing returns handlers that call changed for objects that come or go, and for both states
// of an object that differs.
func differing[T any](changed func(T), differ func(before, now T) bool) cache.ResourceEventHandlerFuncs {
	h := kit.Handlers(changed, changed)
	h.UpdateFunc = func(before, now any) {
		if differ(before.(T), now.(T)) {
			changed(before.(T))
			changed(now.(T))
		}
	}
	return h
}

// scaleDiffers reports whether two states of a set differ in how many Pods it wants, or in what
// it belongs to.
func scaleDiffers(a, b metav1.Object, replicasA, replicasB *int32) bool {
	return a.GetUID() != b.GetUID() || !ptr.Equal(replicasA, replicasB) || ownerUID(a) != ownerUID(b)
}

// healthDiffers reports whether two states of a Pod differ in what budgets count.
func healthDiffers(a, b *corev1.Pod) bool {
	return a.UID != b.UID || (a.DeletionTimestamp == nil) != (b.DeletionTimestamp == nil) ||
		workloads.IsReady(a) != workloads.IsReady(b) || ownerUID(a) != ownerUID(b) || !maps.Equal(a.Labels, b.Labels)
}

func ownerUID(obj metav1.Object) types.UID {
	if ref := metav1.GetControllerOfNoCopy(obj); ref != nil {
		return ref.UID
	}
	return ""
}

// selecting has the budgets of a namespace that select Pods with these labels looked at again.
func (c *disruption) selecting(namespace string, of map[string]string) {
	list, _ := c.Informers.Policy().V1().PodDisruptionBudgets().Lister().PodDisruptionBudgets(namespace).List(labels.Everything())
	for _, b := range list {
		if selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector); err == nil && selector.Matches(labels.Set(of)) {
			c.loop.Queue.Add(svc.NameOf(b))
		}
	}
}

func (c *disruption) sync(ctx context.Context, name svc.Name) error {
	b, err := c.Informers.Policy().V1().PodDisruptionBudgets().Lister().PodDisruptionBudgets(name.Namespace).Get(name.Name)
	if err != nil || b.DeletionTimestamp != nil {
		return nil
	}
	selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	if err != nil {
		return nil // validation has seen to it
	}
	var pods []*corev1.Pod
	if b.Spec.Selector != nil { // without one it selects none
		for _, p := range c.index.PodsWith(name.Namespace, b.Spec.Selector.MatchLabels) {
			if selector.Matches(labels.Set(p.Labels)) {
				pods = append(pods, p)
			}
		}
	}
	status, unmanaged, after := workloads.PlanBudget(b, pods, func() (workloads.Scale, error) { return c.scaleOf(pods) }, time.Now())
	if after > 0 {
		c.loop.Queue.AddAfter(name, after)
	}
	if equality.Semantic.DeepEqual(b.Status, status) {
		return nil
	}
	if len(unmanaged) > 0 {
		c.Events.Event(b, corev1.EventTypeWarning, "UnmanagedPods", fmt.Sprintf("Pods selected by this PodDisruptionBudget "+
			"(selector: %v) were found to be unmanaged. As a result, the status of the PDB cannot be calculated correctly, which may "+
			"result in undefined behavior. To account for these pods please set \".spec.minAvailable\" field of the PDB to an integer "+
			"value.", metav1.FormatLabelSelector(b.Spec.Selector)))
	}
	b = b.DeepCopy()
	b.Status = status
	if _, err := c.Client.PolicyV1().PodDisruptionBudgets(name.Namespace).UpdateStatus(ctx, b, metav1.UpdateOptions{}); err != nil {
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("status of PodDisruptionBudget %s: %w", name, err)
	}
	return nil
}

// scaleOf adds up how many Pods the controllers of some Pods want.
func (c *disruption) scaleOf(pods []*corev1.Pod) (out workloads.Scale, err error) {
	seen := map[types.UID]bool{}
	for _, p := range pods {
		ref := metav1.GetControllerOfNoCopy(p)
		if ref == nil {
			out.Unmanaged = append(out.Unmanaged, p.Name)
			continue
		}
		uid, n, ok := c.replicasOf(p.Namespace, ref)
		if !ok {
			return out, fmt.Errorf("found no controllers for pod %q", p.Name)
		}
		if !seen[uid] {
			seen[uid] = true
			out.Expected += n
		}
	}
	return out, nil
}

// replicasOf returns the replicas of the Deployment above a ReplicaSet, or of the set alone.
func (c *disruption) replicasOf(namespace string, ref *metav1.OwnerReference) (types.UID, int32, bool) {
	if ref.Kind != workloads.ReplicaSetKind.Kind || ref.APIVersion != appsv1.SchemeGroupVersion.String() {
		return "", 0, false
	}
	r, err := c.Informers.Apps().V1().ReplicaSets().Lister().ReplicaSets(namespace).Get(ref.Name)
	if err != nil || r.UID != ref.UID {
		return "", 0, false
	}
	if up := metav1.GetControllerOfNoCopy(r); up != nil && up.Kind == workloads.DeploymentKind.Kind {
		d, err := c.Informers.Apps().V1().Deployments().Lister().Deployments(namespace).Get(up.Name)
		if err == nil && d.UID == up.UID && d.Spec.Replicas != nil {
			return d.UID, *d.Spec.Replicas, true
		}
	}
	if r.Spec.Replicas == nil {
		return "", 0, false
	}
	return r.UID, *r.Spec.Replicas, true
}
