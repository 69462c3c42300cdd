// Package usage measures what objects use of a ResourceQuota. The rules are the ones of the evaluators of kube-apiserver
// (k8s.io/kubernetes, pkg/quota/v1/evaluator/core). In addition, all kinds use fairlead.dev/bytes, and Events are counted.
package usage

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"

	"github.com/fairlead/fairlead/internal/registry/resourcequota"
)

// Evaluator returns what measures the objects of gr, without their bytes.
func Evaluator(gr schema.GroupResource) quota.Evaluator {
	switch gr {
	case corev1.Resource("pods"):
		return pods{generic.NewObjectCountEvaluator(gr, nil, "")}
	case corev1.Resource("services"):
		return services{generic.NewObjectCountEvaluator(gr, nil, corev1.ResourceServices)}
	case corev1.Resource("events"), eventsv1.Resource("events"):
		return newEvents(gr)
	}
	alias := corev1.ResourceName("")
	if name := corev1.ResourceName(gr.Resource); gr.Group == "" && resourcequota.CountOf(name) != "" {
		alias = name
	}
	return generic.NewObjectCountEvaluator(gr, nil, alias)
}

// Sum returns what the objects that r selects use of the resources of r, without their bytes. All are of the kind gr.
func Sum(r *corev1.ResourceQuota, gr schema.GroupResource, objects []runtime.Object) (corev1.ResourceList, error) {
	e := Evaluator(gr)
	matches := generic.MatchesNoScopeFunc
	if gr == corev1.Resource("pods") {
		matches = inScope
	}
	stats, err := generic.CalculateUsageStats(quota.UsageStatsOptions{
		Namespace: r.Namespace, Scopes: r.Spec.Scopes, ScopeSelector: r.Spec.ScopeSelector,
		Resources: e.MatchingResources(quota.ResourceNames(r.Spec.Hard)),
	}, func(string) ([]runtime.Object, error) { return objects, nil }, matches, e.Usage)
	return stats.Used, err
}

// Scoped reports whether r selects only some of the objects of a namespace.
func Scoped(r *corev1.ResourceQuota) bool {
	return len(r.Spec.Scopes) > 0 || r.Spec.ScopeSelector != nil
}

// Size returns the size of an object as it is stored, in bytes.
func Size(o runtime.Object) int64 {
	switch o := o.(type) {
	case interface{ Size() int }: // built-in kinds: protobuf
		return int64(o.Size())
	case *unstructured.Unstructured: // custom resources: JSON
		text, err := o.MarshalJSON()
		if err != nil {
			return 0 // cannot happen: it was decoded from JSON
		}
		return int64(len(text))
	}
	return 0
}

// sized adds bytes to what an evaluator measures.
type sized struct {
	quota.Evaluator
	limited func(namespace string) bool
}

// WithBytes returns e with the bytes of objects. limited reports whether a quota of the namespace limits them.
func WithBytes(e quota.Evaluator, limited func(namespace string) bool) quota.Evaluator {
	return sized{e, limited}
}

// Handles reports whether a may need more of a quota. An update does so where bytes are limited.
func (e sized) Handles(a admission.Attributes) bool {
	if a.GetSubresource() != "" || a.GetOperation() != admission.Update {
		return e.Evaluator.Handles(a)
	}
	return e.Evaluator.Handles(a) || e.limited(a.GetNamespace())
}

// MatchingResources returns the resources of input that the kind uses.
func (e sized) MatchingResources(input []corev1.ResourceName) []corev1.ResourceName {
	return append(e.Evaluator.MatchingResources(input), quota.Intersection(input, []corev1.ResourceName{resourcequota.Bytes})...)
}

// Matches reports whether r limits item. Bytes are limited only in quotas without scopes.
func (e sized) Matches(r *corev1.ResourceQuota, item runtime.Object) (bool, error) {
	if ok, err := e.Evaluator.Matches(r, item); ok || err != nil {
		return ok, err
	}
	_, ok := r.Status.Hard[resourcequota.Bytes]
	return ok && !Scoped(r), nil
}

// Usage returns what the object uses, and its bytes.
func (e sized) Usage(item runtime.Object) (corev1.ResourceList, error) {
	used, err := e.Evaluator.Usage(item)
	if err == nil {
		used[resourcequota.Bytes] = *resource.NewQuantity(Size(item), resource.DecimalSI)
	}
	return used, err
}

// events measures Events, which two groups show. One of either uses both names.
type events struct {
	quota.Evaluator
	names []corev1.ResourceName
}

func newEvents(gr schema.GroupResource) events {
	return events{generic.NewObjectCountEvaluator(gr, nil, ""), []corev1.ResourceName{
		generic.ObjectCountQuotaResourceNameFor(corev1.Resource("events")),
		generic.ObjectCountQuotaResourceNameFor(eventsv1.Resource("events")),
	}}
}

// MatchingResources returns the resources of input that Events use.
func (e events) MatchingResources(input []corev1.ResourceName) []corev1.ResourceName {
	return quota.Intersection(input, e.names)
}

// Matches reports whether r limits Events.
func (e events) Matches(r *corev1.ResourceQuota, item runtime.Object) (bool, error) {
	return generic.Matches(r, item, e.MatchingResources, generic.MatchesNoScopeFunc)
}

// Usage returns one Event.
func (e events) Usage(runtime.Object) (corev1.ResourceList, error) {
	used := corev1.ResourceList{}
	for _, name := range e.names {
		used[name] = *resource.NewQuantity(1, resource.DecimalSI)
	}
	return used, nil
}

// Frees reports whether the update of a makes its object use less than before, so that quotas must be counted again.
func Frees(a admission.Attributes) bool {
	switch now := a.GetObject().(type) {
	case *corev1.Pod:
		was, ok := a.GetOldObject().(*corev1.Pod)
		if ok && a.GetSubresource() == "status" {
			return ended(was) != ended(now)
		}
	case *corev1.Service:
		if was, ok := a.GetOldObject().(*corev1.Service); ok && a.GetSubresource() == "" {
			return less(serviceUsage(now), serviceUsage(was))
		}
	}
	return goes(a.GetObject())
}

// less reports whether now is less than was for any resource of was.
func less(now, was corev1.ResourceList) bool {
	return slices.ContainsFunc(quota.ResourceNames(was), func(name corev1.ResourceName) bool {
		n, w := now[name], was[name]
		return n.Cmp(w) < 0
	})
}
