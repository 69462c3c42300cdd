package kit

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/placement"
)

// Handlers returns handlers that call set for objects that were added or
// changed, and deleted, unless it is nil, for deleted objects.
func Handlers[T any](set, deleted func(T)) cache.ResourceEventHandlerFuncs {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { set(o.(T)) },
		UpdateFunc: func(_, o any) { set(o.(T)) },
		DeleteFunc: func(o any) {
			if v, ok := Final[T](o); ok && deleted != nil {
				deleted(v)
			}
		},
	}
}

// NodeHandlers returns handlers that call changed when a Node comes, goes, or changes in
// what Pods are placed by: labels, taints, readiness. The status changes all the time.
func NodeHandlers(changed func()) cache.ResourceEventHandlerFuncs {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { changed() },
		UpdateFunc: func(before, now any) {
			if PlacesDiffer(before.(*corev1.Node), now.(*corev1.Node)) {
				changed()
			}
		},
		DeleteFunc: func(any) { changed() },
	}
}

// PlacesDiffer reports whether two states of a Node may differ in which Pods fit.
func PlacesDiffer(a, b *corev1.Node) bool {
	return placement.IsReady(a) != placement.IsReady(b) || a.Spec.Unschedulable != b.Spec.Unschedulable ||
		!maps.Equal(a.Labels, b.Labels) || !equality.Semantic.DeepEqual(a.Spec.Taints, b.Spec.Taints) ||
		!equality.Semantic.DeepEqual(a.Status.Allocatable, b.Status.Allocatable)
}

// Final returns the object of a delete event, as it was last seen.
func Final[T any](o any) (T, bool) {
	if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = gone.Obj
	}
	v, ok := o.(T)
	return v, ok
}

// slim drops what no controller reads, so that 100,000 Pods fit into memory.
func slim(obj any) (any, error) {
	if pod, ok := obj.(*corev1.Pod); ok {
		return SlimPod(pod), nil
	}
	if o, ok := obj.(interface {
		SetManagedFields([]metav1.ManagedFieldsEntry)
	}); ok {
		o.SetManagedFields(nil)
	}
	return obj, nil
}
