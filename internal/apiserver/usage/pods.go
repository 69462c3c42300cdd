package usage

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/fairlead/fairlead/internal/registry/resourcequota"
)

// pods measures Pods: their number, and their requests and limits.
type pods struct{ quota.Evaluator }

// Handles reports whether a creates a Pod. The requests and limits of a Pod cannot be changed.
func (pods) Handles(a admission.Attributes) bool {
	return a.GetSubresource() == "" && a.GetOperation() == admission.Create
}

// Constraints returns an error unless each container has what required names of CPU and memory. A Pod that exists
// already may go on without.
func (pods) Constraints(required []corev1.ResourceName, item runtime.Object) error {
	pod, ok := item.(*corev1.Pod)
	if !ok {
		return fmt.Errorf("want a Pod, have %T", item)
	}
	if pod.ResourceVersion != "" {
		return nil
	}
	missing := map[corev1.ResourceName][]string{}
	for _, c := range slices.Concat(pod.Spec.Containers, pod.Spec.InitContainers) {
		used := compute(c.Resources.Requests, c.Resources.Limits)
		for _, name := range required {
			if _, has := used[name]; !has && mustAsk(name) && !slices.Contains(missing[name], c.Name) {
				missing[name] = append(missing[name], c.Name)
			}
		}
	}
	if len(missing) == 0 {
		return nil
	}
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		texts = append(texts, fmt.Sprintf("%s for: %s", name, strings.Join(slices.Sorted(slices.Values(missing[name])), ",")))
	}
	return fmt.Errorf("must specify %s", strings.Join(texts, "; "))
}

// mustAsk reports whether each container must ask for name where a quota limits it.
func mustAsk(name corev1.ResourceName) bool {
	switch name {
	case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory, corev1.ResourceLimitsCPU,
		corev1.ResourceLimitsMemory:
		return true
	}
	return false
}

// Matches reports whether r limits the Pod.
func (p pods) Matches(r *corev1.ResourceQuota, item runtime.Object) (bool, error) {
	return generic.Matches(r, item, p.MatchingResources, inScope)
}

// MatchingResources returns the resources of input that Pods use.
func (pods) MatchingResources(input []corev1.ResourceName) []corev1.ResourceName {
	return slices.DeleteFunc(slices.Clone(input), func(name corev1.ResourceName) bool { return !resourcequota.OfPods(name) })
}

// MatchingScopes returns the scopes in which the Pod is.
func (pods) MatchingScopes(
	item runtime.Object, scopes []corev1.ScopedResourceSelectorRequirement,
) (in []corev1.ScopedResourceSelectorRequirement, _ error) {
	for _, s := range scopes {
		ok, err := inScope(s, item)
		if err != nil {
			return nil, err
		}
		if ok {
			in = append(in, s)
		}
	}
	return in, nil
}

// Usage returns what a Pod uses: no more than its place in the store when it has ended.
func (pods) Usage(item runtime.Object) (corev1.ResourceList, error) {
	pod, ok := item.(*corev1.Pod)
	if !ok {
		return nil, fmt.Errorf("want a Pod, have %T", item)
	}
	used := corev1.ResourceList{}
	if !ended(pod) && !overdue(pod, time.Now()) {
		o := resourcehelper.PodResourcesOptions{}
		used = compute(resourcehelper.PodRequests(pod, o), resourcehelper.PodLimits(pod, o))
		used[corev1.ResourcePods] = *resource.NewQuantity(1, resource.DecimalSI)
	}
	used[resourcequota.CountPods] = *resource.NewQuantity(1, resource.DecimalSI)
	return used, nil
}

// ended reports whether the Pod does not run and will not.
func ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded
}

// overdue reports whether the Pod should have ended after its deletion, as on a node that is lost. A user does not
// pay for it.
func overdue(p *corev1.Pod, now time.Time) bool {
	return p.DeletionTimestamp != nil && p.DeletionGracePeriodSeconds != nil &&
		now.After(p.DeletionTimestamp.Add(time.Duration(*p.DeletionGracePeriodSeconds)*time.Second))
}

// goes reports whether an update removes the last finalizer of an object that is being deleted.
func goes(o runtime.Object) bool {
	m, err := meta.Accessor(o)
	return err == nil && m.GetDeletionTimestamp() != nil && len(m.GetFinalizers()) == 0
}

// compute returns requests and limits under the names of quotas. The short names, such as cpu, are requests.
func compute(requests, limits corev1.ResourceList) corev1.ResourceList {
	used := corev1.ResourceList{}
	for name, amount := range requests {
		for _, n := range []corev1.ResourceName{name, corev1.DefaultResourceRequestsPrefix + name} {
			if resourcequota.OfPods(n) {
				used[n] = amount
			}
		}
	}
	for name, amount := range limits {
		if n := "limits." + name; resourcequota.OfPods(n) {
			used[n] = amount
		}
	}
	return used
}

// inScope reports whether a Pod is in a scope; other objects are in none.
func inScope(s corev1.ScopedResourceSelectorRequirement, item runtime.Object) (bool, error) {
	pod, ok := item.(*corev1.Pod)
	if !ok {
		return false, nil
	}
	hasDeadline := pod.Spec.ActiveDeadlineSeconds != nil
	bestEffort := pod.Status.QOSClass == corev1.PodQOSBestEffort // the storage sets it before admission
	switch s.ScopeName {
	case corev1.ResourceQuotaScopeTerminating:
		return hasDeadline, nil
	case corev1.ResourceQuotaScopeNotTerminating:
		return !hasDeadline, nil
	case corev1.ResourceQuotaScopeBestEffort:
		return bestEffort, nil
	case corev1.ResourceQuotaScopeNotBestEffort:
		return !bestEffort, nil
	case corev1.ResourceQuotaScopePriorityClass:
		return hasPriority(pod.Spec.PriorityClassName, s)
	case corev1.ResourceQuotaScopeCrossNamespacePodAffinity:
		return reachesOut(pod.Spec.Affinity), nil
	}
	return false, nil
}

// hasPriority reports whether the class, "" for none, is one that s selects.
func hasPriority(class string, s corev1.ScopedResourceSelectorRequirement) (bool, error) {
	listed := class != "" && slices.Contains(s.Values, class)
	switch s.Operator {
	case corev1.ScopeSelectorOpExists:
		return class != "", nil
	case corev1.ScopeSelectorOpDoesNotExist:
		return class == "", nil
	case corev1.ScopeSelectorOpIn:
		return listed, nil
	case corev1.ScopeSelectorOpNotIn:
		return !listed, nil
	}
	return false, fmt.Errorf("%q is not an operator of a scope", s.Operator)
}

// reachesOut reports whether an affinity names Pods of other namespaces.
func reachesOut(a *corev1.Affinity) bool {
	if a == nil {
		return false
	}
	var terms []corev1.PodAffinityTerm
	var weighted []corev1.WeightedPodAffinityTerm
	if p := a.PodAffinity; p != nil {
		terms, weighted = append(terms, p.RequiredDuringSchedulingIgnoredDuringExecution...),
			append(weighted, p.PreferredDuringSchedulingIgnoredDuringExecution...)
	}
	if p := a.PodAntiAffinity; p != nil {
		terms, weighted = append(terms, p.RequiredDuringSchedulingIgnoredDuringExecution...),
			append(weighted, p.PreferredDuringSchedulingIgnoredDuringExecution...)
	}
	for _, w := range weighted {
		terms = append(terms, w.PodAffinityTerm)
	}
	return slices.ContainsFunc(terms, func(t corev1.PodAffinityTerm) bool { return len(t.Namespaces) > 0 || t.NamespaceSelector != nil })
}
