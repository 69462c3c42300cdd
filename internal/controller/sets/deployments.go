// Package sets runs Deployments, ReplicaSets, DaemonSets and PodDisruptionBudgets.
package sets

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/workloads"
)

// deployments gives each Deployment its ReplicaSets and rolls from one to the next.
type deployments struct {
	*kit.Kit
	sets *dependents[*appsv1.ReplicaSet]
	loop *loop.Loop[svc.Name]
}

// NewDeployments returns the controller of Deployments.
func NewDeployments(k *kit.Kit, name string) (kit.Task, error) {
	c := &deployments{Kit: k}
	c.loop = loop.New(k.Log, name, k.Workers, c.sync)
	var err error
	c.sets, err = newDependents(k, k.Informers.Apps().V1().ReplicaSets().Informer(), workloads.DeploymentKind, c.loop.Queue.Add, c.orphan)
	if err != nil {
		return nil, err
	}
	if err := k.Handle(k.Informers.Core().V1().Pods().Informer(), kit.Handlers(c.podChanged, c.podChanged)); err != nil {
		return nil, err
	}
	set := func(d *appsv1.Deployment) { c.loop.Queue.Add(svc.NameOf(d)) }
	if err := k.Handle(k.Informers.Apps().V1().Deployments().Informer(), kit.Handlers(set, nil)); err != nil {
		return nil, err
	}
	return runWithDependents(c.loop, c.sets), nil
}

// orphan has the Deployments look at a ReplicaSet that they might adopt.
func (c *deployments) orphan(r *appsv1.ReplicaSet) {
	list := c.Informers.Apps().V1().Deployments().Lister().Deployments(r.Namespace).List
	eachAdopter(r, list, func(s *appsv1.Deployment) *metav1.LabelSelector { return s.Spec.Selector }, c.loop.Queue.Add)
}

// podChanged lets a Deployment with the strategy Recreate go on when a Pod has ended.
func (c *deployments) podChanged(pod *corev1.Pod) {
	ref := metav1.GetControllerOfNoCopy(pod)
	if ref == nil || ref.Kind != workloads.ReplicaSetKind.Kind {
		return
	}
	r, err := c.Informers.Apps().V1().ReplicaSets().Lister().ReplicaSets(pod.Namespace).Get(ref.Name)
	if err != nil {
		return
	}
	owner, ok := c.sets.ownerOf(r)
	if !ok {
		return
	}
	d, err := c.Informers.Apps().V1().Deployments().Lister().Deployments(owner.Namespace).Get(owner.Name)
	if err == nil && d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		c.loop.Queue.Add(owner)
	}
}

func (c *deployments) sync(ctx context.Context, name svc.Name) error {
	d, err := c.Informers.Apps().V1().Deployments().Lister().Deployments(name.Namespace).Get(name.Name)
	if err != nil {
		return nil // deleted: its ReplicaSets are the garbage collector's
	}
	selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	if err != nil {
		return nil // validation has seen to it
	}
	sets, err := c.sets.claim(ctx, d, selector, func(ctx context.Context) (metav1.Object, error) {
		return c.Client.AppsV1().Deployments(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	}, func(ctx context.Context, r *appsv1.ReplicaSet, patch []byte) (*appsv1.ReplicaSet, error) {
		return c.Client.AppsV1().ReplicaSets(r.Namespace).Patch(ctx, r.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	})
	if err != nil {
		return err
	}
	plan := workloads.PlanDeployment(d, sets, func(except *appsv1.ReplicaSet) bool { return c.podsRun(d, sets, except) }, time.Now())
	if plan.After > 0 {
		c.loop.Queue.AddAfter(name, plan.After)
	}
	if err := c.write(ctx, d, &plan); err != nil {
		return err
	}
	for _, message := range plan.Events {
		c.Events.Event(d, corev1.EventTypeNormal, "ScalingReplicaSet", message)
	}
	return c.writeStatus(ctx, d, plan.Revision, &plan.Status)
}

// podsRun reports whether Pods of ReplicaSets of d, but for one of them, have not ended.
func (c *deployments) podsRun(d *appsv1.Deployment, sets []*appsv1.ReplicaSet, except *appsv1.ReplicaSet) bool {
	selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	if err != nil {
		return false
	}
	others := map[types.UID]bool{}
	for _, r := range sets {
		others[r.UID] = except == nil || r.UID != except.UID
	}
	pods, _ := c.Informers.Core().V1().Pods().Lister().Pods(d.Namespace).List(selector)
	for _, p := range pods {
		if ref := metav1.GetControllerOfNoCopy(p); ref != nil && others[ref.UID] && !kit.Finished(p) {
			return true
		}
	}
	return false
}

func (c *deployments) write(ctx context.Context, d *appsv1.Deployment, plan *workloads.Rollout) error {
	api := c.Client.AppsV1().ReplicaSets(d.Namespace)
	if plan.Create != nil {
		made, err := api.Create(ctx, plan.Create, metav1.CreateOptions{})
		if err != nil {
			return c.createFailed(ctx, d, plan.Create, err)
		}
		c.sets.Assume(made)
	}
	for _, r := range plan.Update {
		now, err := api.Update(ctx, r, metav1.UpdateOptions{})
		if err != nil {
			return fmt.Errorf("ReplicaSet %s: %w", svc.NameOf(r), err)
		}
		c.sets.Assume(now)
	}
	for _, r := range plan.Delete {
		if err := kit.IgnoreReplaced(api.Delete(ctx, r.Name, kit.OnlyUID(r.UID))); err != nil {
			return fmt.Errorf("delete ReplicaSet %s: %w", svc.NameOf(r), err)
		}
		c.sets.AssumeDeleted(svc.NameOf(r), svc.NameOf(d), r.UID)
	}
	return nil
}

// createFailed decides what follows from a ReplicaSet that could not be created.
func (c *deployments) createFailed(ctx context.Context, d *appsv1.Deployment, want *appsv1.ReplicaSet, err error) error {
	status := d.Status.DeepCopy()
	switch {
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil // nothing can be created there any more
	case apierrors.IsAlreadyExists(err):
		have, getErr := c.Client.AppsV1().ReplicaSets(want.Namespace).Get(ctx, want.Name, metav1.GetOptions{})
		if getErr != nil {
			return getErr
		}
		ref := metav1.GetControllerOfNoCopy(have)
		if ref != nil && ref.UID == d.UID && workloads.SameTemplate(&have.Spec.Template, &d.Spec.Template) {
			c.sets.Assume(have) // ours, which the cache did not have yet
			return err
		}
		n := int32(1) // another template with the same hash
		if status.CollisionCount != nil {
			n += *status.CollisionCount
		}
		status.CollisionCount = &n
	default:
		message := fmt.Sprintf("Failed to create new replica set %q: %v", want.Name, err)
		c.Events.Event(d, corev1.EventTypeWarning, "ReplicaSetCreateError", message)
		workloads.SetCreateError(status, message, time.Now())
	}
	if writeErr := c.writeStatus(ctx, d, d.Annotations[workloads.RevisionAnnotation], status); writeErr != nil {
		return writeErr
	}
	return err
}

func (c *deployments) writeStatus(ctx context.Context, d *appsv1.Deployment, revision string, status *appsv1.DeploymentStatus) error {
	same := d.Annotations[workloads.RevisionAnnotation] == revision
	if same && equality.Semantic.DeepEqual(&d.Status, status) {
		return nil
	}
	d = d.DeepCopy()
	d.Status = *status
	if !same {
		if d.Annotations == nil {
			d.Annotations = map[string]string{}
		}
		d.Annotations[workloads.RevisionAnnotation] = revision
	}
	if _, err := c.Client.AppsV1().Deployments(d.Namespace).UpdateStatus(ctx, d, metav1.UpdateOptions{}); kit.IgnoreNotFound(err) != nil {
		return fmt.Errorf("status of Deployment %s: %w", svc.NameOf(d), err)
	}
	return nil
}
