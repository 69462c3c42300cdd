// Package workloads decides what becomes of ReplicaSets, Deployments, DaemonSets and
// PodDisruptionBudgets: pure functions from the objects that there are to the writes that
// bring them to what is asked for. Package controller runs them. The rules, reasons and
// messages follow kube-controller-manager (pkg/controller of Kubernetes v1.37), as
// kubectl and other clients go by them.
package workloads

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/rand"
)

// The kinds that own others.
var (
	DeploymentKind = appsv1.SchemeGroupVersion.WithKind("Deployment") //nolint:gochecknoglobals // constants in all but name
	ReplicaSetKind = appsv1.SchemeGroupVersion.WithKind("ReplicaSet")
	DaemonSetKind  = appsv1.SchemeGroupVersion.WithKind("DaemonSet")
)

// Claims are the objects that an owner has, and the objects to adopt or release.
type Claims[T metav1.Object] struct {
	Owned, Adopt, Release []T
}

// Claim sorts the objects of the owner's namespace that are its own, or nothing's, by its
// selector. An owner that is being deleted adopts and releases nothing.
func Claim[T metav1.Object](owner metav1.Object, selector labels.Selector, list []T) (c Claims[T]) {
	for _, o := range list {
		ref, matches := metav1.GetControllerOfNoCopy(o), selector.Matches(labels.Set(o.GetLabels()))
		switch {
		case ref != nil && ref.UID != owner.GetUID():
		case ref != nil && matches:
			c.Owned = append(c.Owned, o)
		case owner.GetDeletionTimestamp() != nil:
		case ref != nil:
			c.Release = append(c.Release, o)
		case matches && o.GetDeletionTimestamp() == nil:
			c.Adopt = append(c.Adopt, o)
		}
	}
	return c
}

// NewPod returns the Pod that owner, of the given kind, creates from a template.
func NewPod(t *corev1.PodTemplateSpec, owner metav1.Object, kind schema.GroupVersionKind) *corev1.Pod {
	prefix := owner.GetName() + "-"
	if len(validation.NameIsDNSSubdomain(prefix, true)) > 0 {
		prefix = owner.GetName()
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: owner.GetNamespace(), GenerateName: prefix,
			Labels: maps.Clone(t.Labels), Annotations: maps.Clone(t.Annotations), Finalizers: slices.Clone(t.Finalizers),
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(owner, kind)},
		},
		Spec: *t.Spec.DeepCopy(),
	}
}

// hash is a short text that differs between values, and that collisions change.
func hash(value any, collisions *int32) string {
	h := fnv.New32a()
	_ = json.NewEncoder(h).Encode(value) // API types can always be encoded
	if collisions != nil {
		fmt.Fprint(h, *collisions)
	}
	return rand.SafeEncodeString(fmt.Sprint(h.Sum32()))
}

// IsReady reports whether a Pod's condition Ready is true.
func IsReady(p *corev1.Pod) bool { return !readySince(p).IsZero() }

// readySince is when a ready Pod became so; the zero time if it is not ready.
func readySince(p *corev1.Pod) time.Time {
	for i := range p.Status.Conditions {
		if c := &p.Status.Conditions[i]; c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			if c.LastTransitionTime.IsZero() {
				return p.CreationTimestamp.Time.Add(1) // whoever wrote it did not say; not zero
			}
			return c.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

// availableIn is how long it takes until a Pod is available, if it stays ready for
// minReady: 0 if it is, and ok is false if it is not ready.
func availableIn(p *corev1.Pod, minReady int32, now time.Time) (wait time.Duration, ok bool) {
	since := readySince(p)
	if since.IsZero() {
		return 0, false
	}
	return max(0, since.Add(time.Duration(minReady)*time.Second).Sub(now)), true
}

// ended reports whether all of a Pod's containers have ended for good.
func ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// leaving are Pods that have been deleted although the cache does not show it yet.
type leaving = map[types.UID]bool

// active reports whether a Pod runs, or is to run, and stays.
func active(p *corev1.Pod, gone leaving) bool {
	return !ended(p) && p.DeletionTimestamp == nil && !gone[p.UID]
}

// share resolves a number or a percentage of total.
func share(v *intstr.IntOrString, total int, roundUp bool) int {
	if v == nil {
		return 0
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(v, total, roundUp)
	if err != nil {
		return 0 // validation has seen to it
	}
	return n
}

func deref(n *int32) int32 {
	if n == nil {
		return 0
	}
	return *n
}
