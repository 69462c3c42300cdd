package resourcequota

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/registry/store"
)

func validate(_ context.Context, q, before *corev1.ResourceQuota) field.ErrorList {
	path := field.NewPath("spec")
	errs := validateList(q.Spec.Hard, path.Child("hard"))
	errs = append(errs, validateScopes(&q.Spec, path.Child("scopes"))...)
	errs = append(errs, validateSelector(&q.Spec, path.Child("scopeSelector"))...)
	if before == nil {
		return errs
	}
	now, was := slices.Sorted(slices.Values(q.Spec.Scopes)), slices.Sorted(slices.Values(before.Spec.Scopes))
	if !equality.Semantic.DeepEqual(now, was) {
		errs = append(errs, field.Invalid(path.Child("scopes"), q.Spec.Scopes, "field is immutable; delete the quota and create it again"))
	}
	return errs
}

func validateStatus(_ context.Context, q, _ *corev1.ResourceQuota) field.ErrorList {
	path := field.NewPath("status")
	errs := validateList(q.Status.Hard, path.Child("hard"))
	return append(errs, validateList(q.Status.Used, path.Child("used"))...)
}

func warnings(q *corev1.ResourceQuota) (out []string) {
	for _, name := range slices.Sorted(maps.Keys(q.Spec.Hard)) {
		if !Counted(name) {
			out = append(out, fmt.Sprintf("spec.hard[%s]: not enforced; give a resource of Kubernetes, count/RESOURCE.GROUP or %s", name, Bytes))
		}
	}
	return out
}

func validateList(list corev1.ResourceList, path *field.Path) (errs field.ErrorList) {
	for _, name := range slices.Sorted(maps.Keys(list)) {
		at, value := path.Key(string(name)), list[name]
		errs = append(errs, store.Invalids(at, name, utilvalidation.IsQualifiedName(string(name)))...)
		if !strings.Contains(string(name), "/") && !standard(name) {
			errs = append(errs, field.Invalid(at, name, "must be a standard resource for quota"))
		}
		if value.Sign() < 0 {
			errs = append(errs, field.Invalid(at, value.String(), "must be greater than or equal to 0"))
		}
		if isInteger(name) && value.MilliValue()%1000 != 0 {
			errs = append(errs, field.Invalid(at, value.String(), "must be an integer"))
		}
	}
	return errs
}

// scopes are the scopes that are supported, which all select Pods.
func scopes() []corev1.ResourceQuotaScope {
	return []corev1.ResourceQuotaScope{
		corev1.ResourceQuotaScopeBestEffort, corev1.ResourceQuotaScopeCrossNamespacePodAffinity, corev1.ResourceQuotaScopeNotBestEffort,
		corev1.ResourceQuotaScopeNotTerminating, corev1.ResourceQuotaScopePriorityClass, corev1.ResourceQuotaScopeTerminating,
	}
}

// validateScopes checks spec.scopes.
func validateScopes(s *corev1.ResourceQuotaSpec, path *field.Path) (errs field.ErrorList) {
	for i, scope := range s.Scopes {
		errs = append(errs, validateScope(s, scope, path.Index(i))...)
	}
	return append(errs, validatePairs(s.Scopes, path)...)
}

// validateScope checks one scope, and that it can select objects of all resources that s limits.
func validateScope(s *corev1.ResourceQuotaSpec, scope corev1.ResourceQuotaScope, path *field.Path) (errs field.ErrorList) {
	if !slices.Contains(scopes(), scope) {
		return append(errs, field.NotSupported(path, scope, scopes()))
	}
	for _, name := range slices.Sorted(maps.Keys(s.Hard)) {
		if !fits(scope, name) {
			errs = append(errs, field.Invalid(path, scope, fmt.Sprintf("unsupported scope applied to resource %s", name)))
		}
	}
	return errs
}

// fits reports whether a limit of name may have the scope. Names with a domain other than Bytes may, as in Kubernetes: no
// object but a Pod is in a scope.
func fits(scope corev1.ResourceQuotaScope, name corev1.ResourceName) bool {
	switch {
	case name == Bytes:
		return false
	case !standard(name):
		return true
	case scope == corev1.ResourceQuotaScopeBestEffort:
		return name == corev1.ResourcePods
	}
	switch name {
	case corev1.ResourcePods, corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory,
		corev1.ResourceLimitsCPU, corev1.ResourceLimitsMemory:
		return true
	}
	return false
}

// validatePairs rejects scopes that together select nothing.
func validatePairs(have []corev1.ResourceQuotaScope, path *field.Path) (errs field.ErrorList) {
	for _, pair := range [][2]corev1.ResourceQuotaScope{
		{corev1.ResourceQuotaScopeBestEffort, corev1.ResourceQuotaScopeNotBestEffort},
		{corev1.ResourceQuotaScopeTerminating, corev1.ResourceQuotaScopeNotTerminating},
	} {
		if slices.Contains(have, pair[0]) && slices.Contains(have, pair[1]) {
			errs = append(errs, field.Invalid(path, have, fmt.Sprintf("conflicting scopes: %s and %s", pair[0], pair[1])))
		}
	}
	return errs
}

// validateSelector checks spec.scopeSelector.
func validateSelector(s *corev1.ResourceQuotaSpec, path *field.Path) (errs field.ErrorList) {
	if s.ScopeSelector == nil {
		return nil
	}
	path = path.Child("matchExpressions")
	have := slices.Clone(s.Scopes)
	for i, r := range s.ScopeSelector.MatchExpressions {
		at := path.Index(i)
		errs = append(errs, validateScope(s, r.ScopeName, at.Child("scopeName"))...)
		errs = append(errs, validateOperator(r, at)...)
		have = append(have, r.ScopeName)
	}
	return append(errs, validatePairs(have, path)...)
}

// validateOperator checks how r selects within its scope.
func validateOperator(r corev1.ScopedResourceSelectorRequirement, path *field.Path) (errs field.ErrorList) {
	if r.ScopeName != corev1.ResourceQuotaScopePriorityClass && r.Operator != corev1.ScopeSelectorOpExists {
		errs = append(errs, field.Invalid(path.Child("operator"), r.Operator, "must be Exists, except for the scope PriorityClass"))
	}
	switch r.Operator {
	case corev1.ScopeSelectorOpIn, corev1.ScopeSelectorOpNotIn:
		if len(r.Values) == 0 {
			errs = append(errs, field.Required(path.Child("values"), "must be at least one value when the operator is In or NotIn"))
		}
	case corev1.ScopeSelectorOpExists, corev1.ScopeSelectorOpDoesNotExist:
		if len(r.Values) > 0 {
			errs = append(errs, field.Invalid(path.Child("values"), r.Values, "must be no value when the operator is Exists or DoesNotExist"))
		}
	default:
		errs = append(errs, field.NotSupported(path.Child("operator"), r.Operator, []corev1.ScopeSelectorOperator{
			corev1.ScopeSelectorOpDoesNotExist, corev1.ScopeSelectorOpExists, corev1.ScopeSelectorOpIn, corev1.ScopeSelectorOpNotIn}))
	}
	return errs
}
