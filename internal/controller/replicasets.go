package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/workloads"
)

// replicaSets keeps as many Pods of each ReplicaSet as it asks for.
type replicaSets struct {
	*controllerContext
	pods   *dependents[*corev1.Pod]
	writer podWriter
	loop   *loop.Loop[svc.Name]
}

func newReplicaSets(s *controllerContext) (func(ctx context.Context), error) {
	c := &replicaSets{controllerContext: s}
	c.loop = loop.New(s.log, ReplicaSetName, s.options.Workers, c.sync)
	var err error
	c.pods, err = newDependents(s, s.informers.Core().V1().Pods().Informer(), workloads.ReplicaSetKind, c.loop.Queue.Add, c.orphan)
	if err != nil {
		return nil, err
	}
	c.writer = podWriter{s, c.pods}
	set := func(r *appsv1.ReplicaSet) { c.loop.Queue.Add(nameOf(r)) }
	if err := s.handle(s.informers.Apps().V1().ReplicaSets().Informer(), handlers(set, nil)); err != nil {
		return nil, err
	}
	return runWithDependents(c.loop, c.pods), nil
}

// orphan has the ReplicaSets look at a Pod that they might adopt.
func (c *replicaSets) orphan(pod *corev1.Pod) {
	list := c.informers.Apps().V1().ReplicaSets().Lister().ReplicaSets(pod.Namespace).List
	eachAdopter(pod, list, func(s *appsv1.ReplicaSet) *metav1.LabelSelector { return s.Spec.Selector }, c.loop.Queue.Add)
}

func (c *replicaSets) sync(ctx context.Context, name svc.Name) error {
	r, err := c.informers.Apps().V1().ReplicaSets().Lister().ReplicaSets(name.Namespace).Get(name.Name)
	if err != nil {
		return nil // deleted: its Pods are the garbage collector's
	}
	selector, err := metav1.LabelSelectorAsSelector(r.Spec.Selector)
	if err != nil {
		return nil // validation has seen to it
	}
	pods, err := c.pods.claim(ctx, r, selector, func(ctx context.Context) (metav1.Object, error) {
		return c.client.AppsV1().ReplicaSets(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	}, c.patchPod)
	if err != nil {
		return err
	}
	related := func() []*corev1.Pod { return c.related(r) }
	plan := workloads.PlanReplicaSet(r, pods, related, c.pods.deleted(pods), time.Now())
	if plan.After > 0 {
		c.loop.Queue.AddAfter(name, plan.After)
	}
	failed := c.writer.create(ctx, r, plan.Create, func(int) *corev1.Pod {
		return workloads.NewPod(&r.Spec.Template, r, workloads.ReplicaSetKind)
	})
	if failed == nil {
		failed = c.writer.delete(ctx, r, plan.Delete)
	}
	workloads.SetReplicaFailure(&plan.Status, plan.Create > 0, failed, time.Now())
	return errors.Join(failed, c.writeStatus(ctx, r, &plan.Status))
}

// related returns the Pods of all ReplicaSets of the Deployment of r, without those that this
// process has deleted.
func (c *replicaSets) related(r *appsv1.ReplicaSet) []*corev1.Pod {
	owner := metav1.GetControllerOfNoCopy(r)
	if owner == nil {
		return c.pods.staying(nameOf(r))
	}
	list, _ := c.informers.Apps().V1().ReplicaSets().Lister().ReplicaSets(r.Namespace).List(labels.Everything())
	var out []*corev1.Pod
	for _, o := range list {
		if ref := metav1.GetControllerOfNoCopy(o); ref != nil && ref.UID == owner.UID {
			out = append(out, c.pods.staying(nameOf(o))...)
		}
	}
	return out
}

func (c *replicaSets) writeStatus(ctx context.Context, r *appsv1.ReplicaSet, status *appsv1.ReplicaSetStatus) error {
	if equality.Semantic.DeepEqual(&r.Status, status) {
		return nil
	}
	r = r.DeepCopy()
	r.Status = *status
	if _, err := c.client.AppsV1().ReplicaSets(r.Namespace).UpdateStatus(ctx, r, metav1.UpdateOptions{}); ignoreNotFound(err) != nil {
		return fmt.Errorf("status of ReplicaSet %s: %w", nameOf(r), err)
	}
	return nil
}
