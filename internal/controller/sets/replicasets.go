package sets

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

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/workloads"
)

// replicaSets keeps as many Pods of each ReplicaSet as it asks for.
type replicaSets struct {
	*kit.Kit
	pods   *dependents[*corev1.Pod]
	writer podWriter
	loop   *loop.Loop[svc.Name]
}

// NewReplicaSets returns the controller of ReplicaSets.
func NewReplicaSets(k *kit.Kit, name string) (kit.Task, error) {
	c := &replicaSets{Kit: k}
	c.loop = loop.New(k.Log, name, k.Workers, c.sync)
	var err error
	c.pods, err = newDependents(k, k.Informers.Core().V1().Pods().Informer(), workloads.ReplicaSetKind, c.loop.Queue.Add, c.orphan)
	if err != nil {
		return nil, err
	}
	c.writer = podWriter{k, c.pods}
	set := func(r *appsv1.ReplicaSet) { c.loop.Queue.Add(svc.NameOf(r)) }
	if err := k.Handle(k.Informers.Apps().V1().ReplicaSets().Informer(), kit.Handlers(set, nil)); err != nil {
		return nil, err
	}
	return runWithDependents(c.loop, c.pods), nil
}

// orphan has the ReplicaSets look at a Pod that they might adopt.
func (c *replicaSets) orphan(pod *corev1.Pod) {
	list := c.Informers.Apps().V1().ReplicaSets().Lister().ReplicaSets(pod.Namespace).List
	eachAdopter(pod, list, func(s *appsv1.ReplicaSet) *metav1.LabelSelector { return s.Spec.Selector }, c.loop.Queue.Add)
}

func (c *replicaSets) sync(ctx context.Context, name svc.Name) error {
	r, err := c.Informers.Apps().V1().ReplicaSets().Lister().ReplicaSets(name.Namespace).Get(name.Name)
	if err != nil {
		return nil // deleted: its Pods are the garbage collector's
	}
	selector, err := metav1.LabelSelectorAsSelector(r.Spec.Selector)
	if err != nil {
		return nil // validation has seen to it
	}
	pods, err := c.pods.claim(ctx, r, selector, func(ctx context.Context) (metav1.Object, error) {
		return c.Client.AppsV1().ReplicaSets(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	}, c.writer.patch)
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

// related returns the Pods of all ReplicaSets of the Deployment of r, without the ones that this
// process has deleted.
func (c *replicaSets) related(r *appsv1.ReplicaSet) []*corev1.Pod {
	owner := metav1.GetControllerOfNoCopy(r)
	if owner == nil {
		return c.pods.staying(svc.NameOf(r))
	}
	list, _ := c.Informers.Apps().V1().ReplicaSets().Lister().ReplicaSets(r.Namespace).List(labels.Everything())
	var out []*corev1.Pod
	for _, o := range list {
		if ref := metav1.GetControllerOfNoCopy(o); ref != nil && ref.UID == owner.UID {
			out = append(out, c.pods.staying(svc.NameOf(o))...)
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
	if _, err := c.Client.AppsV1().ReplicaSets(r.Namespace).UpdateStatus(ctx, r, metav1.UpdateOptions{}); kit.IgnoreNotFound(err) != nil {
		return fmt.Errorf("status of ReplicaSet %s: %w", svc.NameOf(r), err)
	}
	return nil
}
