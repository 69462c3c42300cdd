package sets

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/workloads"
)

// daemonSets keeps one Pod of each DaemonSet on every node that suits it.
type daemonSets struct {
	*kit.Kit
	pods      *dependents[*corev1.Pod]
	revisions *dependents[*appsv1.ControllerRevision]
	writer    podWriter
	loop      *loop.Loop[svc.Name]
}

// NewDaemonSets returns the controller of DaemonSets.
func NewDaemonSets(k *kit.Kit, name string) (kit.Task, error) {
	c := &daemonSets{Kit: k}
	c.loop = loop.New(k.Log, name, k.Workers, c.sync)
	var err error
	c.pods, err = newDependents(k, k.Informers.Core().V1().Pods().Informer(), workloads.DaemonSetKind, c.loop.Queue.Add, c.orphan)
	if err != nil {
		return nil, err
	}
	c.writer = podWriter{k, c.pods}
	c.revisions, err = newDependents(k, k.Informers.Apps().V1().ControllerRevisions().Informer(), workloads.DaemonSetKind,
		c.loop.Queue.Add, func(*appsv1.ControllerRevision) {})
	if err != nil {
		return nil, err
	}
	if err := k.Handle(k.Informers.Core().V1().Nodes().Informer(), kit.NodeHandlers(c.all)); err != nil {
		return nil, err
	}
	set := func(d *appsv1.DaemonSet) { c.loop.Queue.Add(svc.NameOf(d)) }
	if err := k.Handle(k.Informers.Apps().V1().DaemonSets().Informer(), kit.Handlers(set, nil)); err != nil {
		return nil, err
	}
	return runWithDependents(c.loop, c.pods, c.revisions), nil
}

// all has every DaemonSet look at the nodes again.
func (c *daemonSets) all() {
	list, _ := c.Informers.Apps().V1().DaemonSets().Lister().List(labels.Everything())
	for _, d := range list {
		c.loop.Queue.Add(svc.NameOf(d))
	}
}

// orphan has the DaemonSets look at a Pod that they might adopt.
func (c *daemonSets) orphan(pod *corev1.Pod) {
	list := c.Informers.Apps().V1().DaemonSets().Lister().DaemonSets(pod.Namespace).List
	eachAdopter(pod, list, func(s *appsv1.DaemonSet) *metav1.LabelSelector { return s.Spec.Selector }, c.loop.Queue.Add)
}

func (c *daemonSets) sync(ctx context.Context, name svc.Name) error {
	d, err := c.Informers.Apps().V1().DaemonSets().Lister().DaemonSets(name.Namespace).Get(name.Name)
	if err != nil {
		return nil // deleted: its Pods are the garbage collector's
	}
	selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	if err != nil {
		return nil // validation has seen to it
	}
	live := func(ctx context.Context) (metav1.Object, error) {
		return c.Client.AppsV1().DaemonSets(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	}
	pods, err := c.pods.claim(ctx, d, selector, live, c.writer.patch)
	if err != nil {
		return err
	}
	revisions, err := c.revisions.claim(ctx, d, selector, live, c.patchRevision)
	if err != nil {
		return err
	}
	history := workloads.PlanHistory(d, revisions)
	if d.DeletionTimestamp == nil {
		if err := c.writeRevision(ctx, d, history); err != nil {
			return err
		}
	}
	nodes, err := c.Informers.Core().V1().Nodes().Lister().List(labels.Everything())
	if err != nil {
		return err
	}
	hash := workloads.TemplateHash(history.Current)
	plan := workloads.PlanDaemonSet(d, hash, pods, nodes, c.pods.deleted(pods), time.Now())
	if plan.After > 0 {
		c.loop.Queue.AddAfter(name, plan.After)
	}
	failed := errors.Join(
		c.writer.create(ctx, d, len(plan.Create), func(i int) *corev1.Pod { return workloads.NewDaemon(d, hash, plan.Create[i]) }),
		c.writer.delete(ctx, d, plan.Delete),
	)
	for _, r := range workloads.SurplusHistory(d, history.Old, pods) {
		failed = errors.Join(failed, c.deleteRevision(ctx, r, name))
	}
	return errors.Join(failed, c.writeStatus(ctx, d, &plan.Status))
}

func (c *daemonSets) patchRevision(ctx context.Context, r *appsv1.ControllerRevision, patch []byte) (*appsv1.ControllerRevision, error) {
	return c.Client.AppsV1().ControllerRevisions(r.Namespace).Patch(ctx, r.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
}

func (c *daemonSets) deleteRevision(ctx context.Context, r *appsv1.ControllerRevision, owner svc.Name) error {
	err := c.Client.AppsV1().ControllerRevisions(r.Namespace).Delete(ctx, r.Name, kit.OnlyUID(r.UID))
	if kit.IgnoreReplaced(err) != nil {
		return fmt.Errorf("delete ControllerRevision %s: %w", svc.NameOf(r), err)
	}
	c.revisions.AssumeDeleted(svc.NameOf(r), owner, r.UID)
	return nil
}

func (c *daemonSets) writeRevision(ctx context.Context, d *appsv1.DaemonSet, h workloads.History) error {
	api := c.Client.AppsV1().ControllerRevisions(d.Namespace)
	switch {
	case h.Update:
		now, err := api.Update(ctx, h.Current, metav1.UpdateOptions{})
		if err != nil {
			return fmt.Errorf("ControllerRevision %s: %w", svc.NameOf(h.Current), err)
		}
		c.revisions.Assume(now)
	case h.Create:
		made, err := api.Create(ctx, h.Current, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return c.revisionExists(ctx, d, h.Current, err)
		}
		if err != nil {
			return fmt.Errorf("ControllerRevision %s: %w", svc.NameOf(h.Current), err)
		}
		c.revisions.Assume(made)
	}
	return nil
}

// revisionExists decides what follows from a revision whose name is taken: by this one, which
// the cache did not have yet, or by another template with the same hash.
func (c *daemonSets) revisionExists(ctx context.Context, d *appsv1.DaemonSet, want *appsv1.ControllerRevision, err error) error {
	have, getErr := c.Client.AppsV1().ControllerRevisions(want.Namespace).Get(ctx, want.Name, metav1.GetOptions{})
	if getErr != nil {
		return getErr
	}
	if ref := metav1.GetControllerOfNoCopy(have); ref != nil && ref.UID == d.UID && workloads.IsRevisionOf(have, d) {
		c.revisions.Assume(have)
		return err
	}
	status, n := d.Status.DeepCopy(), int32(1)
	if status.CollisionCount != nil {
		n += *status.CollisionCount
	}
	status.CollisionCount = &n
	return errors.Join(err, c.writeStatus(ctx, d, status))
}

func (c *daemonSets) writeStatus(ctx context.Context, d *appsv1.DaemonSet, status *appsv1.DaemonSetStatus) error {
	if equality.Semantic.DeepEqual(&d.Status, status) {
		return nil
	}
	d = d.DeepCopy()
	d.Status = *status
	if _, err := c.Client.AppsV1().DaemonSets(d.Namespace).UpdateStatus(ctx, d, metav1.UpdateOptions{}); kit.IgnoreNotFound(err) != nil {
		return fmt.Errorf("status of DaemonSet %s: %w", svc.NameOf(d), err)
	}
	return nil
}
