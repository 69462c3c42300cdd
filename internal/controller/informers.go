package controller

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/placement"
	"github.com/fairlead/fairlead/internal/svc"
)

// handle registers handlers for one kind. The controllers start when they have
// been called for every object that exists.
func (s *controllerContext) handle(informer cache.SharedIndexInformer, h cache.ResourceEventHandler) error {
	r, err := informer.AddEventHandler(h)
	if err != nil {
		return err
	}
	s.synced = append(s.synced, r.HasSynced)
	return nil
}

// handlers returns handlers that call set for objects that were added or
// changed, and deleted, unless it is nil, for those that were deleted.
func handlers[T any](set, deleted func(T)) cache.ResourceEventHandlerFuncs {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { set(o.(T)) },
		UpdateFunc: func(_, o any) { set(o.(T)) },
		DeleteFunc: func(o any) {
			if v, ok := final[T](o); ok && deleted != nil {
				deleted(v)
			}
		},
	}
}

// nodeHandlers returns handlers that call changed when a Node comes, goes, or changes in
// what Pods are placed by: labels, taints, readiness. Status alone changes all the time.
func nodeHandlers(changed func()) cache.ResourceEventHandlerFuncs {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { changed() },
		UpdateFunc: func(before, now any) {
			if placesDiffer(before.(*corev1.Node), now.(*corev1.Node)) {
				changed()
			}
		},
		DeleteFunc: func(any) { changed() },
	}
}

// placesDiffer reports whether two states of a Node may differ in which Pods fit.
func placesDiffer(a, b *corev1.Node) bool {
	return placement.IsReady(a) != placement.IsReady(b) || a.Spec.Unschedulable != b.Spec.Unschedulable ||
		!maps.Equal(a.Labels, b.Labels) || !equality.Semantic.DeepEqual(a.Spec.Taints, b.Spec.Taints) ||
		!equality.Semantic.DeepEqual(a.Status.Allocatable, b.Status.Allocatable)
}

// final returns the object of a delete event, as it was last seen.
func final[T any](o any) (T, bool) {
	if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = gone.Obj
	}
	v, ok := o.(T)
	return v, ok
}

// factory returns the informers of one namespace only.
func (s *controllerContext) factory(namespace string) informers.SharedInformerFactory {
	if f := s.narrow[namespace]; f != nil {
		return f
	}
	f := informers.NewSharedInformerFactoryWithOptions(s.client, 0, informers.WithTransform(slim), informers.WithNamespace(namespace))
	s.narrow[namespace] = f
	return f
}

// slim drops what no controller reads, so that 100,000 Pods fit into memory.
func slim(obj any) (any, error) {
	if pod, ok := obj.(*corev1.Pod); ok {
		return slimPod(pod), nil
	}
	if o, ok := obj.(interface {
		SetManagedFields([]metav1.ManagedFieldsEntry)
	}); ok {
		o.SetManagedFields(nil)
	}
	return obj, nil
}

func nameOf(o interface {
	GetNamespace() string
	GetName() string
}) svc.Name {
	return svc.Name{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// onlyUID restricts a delete to the object with uid: not another one of its name.
func onlyUID(uid types.UID) metav1.DeleteOptions {
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}
}

// ignoreReplaced returns err, or nil if the object of a write is gone, or another
// one of its name is there (a conflict of UIDs).
func ignoreReplaced(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}
