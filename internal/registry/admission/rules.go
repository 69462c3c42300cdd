package admission

import (
	"fmt"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// Values of enumerations, in the order in which texts name them.
func failurePolicies() []admissionv1.FailurePolicyType {
	return []admissionv1.FailurePolicyType{admissionv1.Fail, admissionv1.Ignore}
}

func matchPolicies() []admissionv1.MatchPolicyType {
	return []admissionv1.MatchPolicyType{admissionv1.Equivalent, admissionv1.Exact}
}

func reinvocations() []admissionv1.ReinvocationPolicyType {
	return []admissionv1.ReinvocationPolicyType{admissionv1.IfNeededReinvocationPolicy, admissionv1.NeverReinvocationPolicy}
}

func scopes() []admissionv1.ScopeType {
	return []admissionv1.ScopeType{admissionv1.AllScopes, admissionv1.ClusterScope, admissionv1.NamespacedScope}
}

func operations() []admissionv1.OperationType {
	return []admissionv1.OperationType{
		admissionv1.OperationAll, admissionv1.Connect, admissionv1.Create, admissionv1.Delete, admissionv1.Update,
	}
}

// validateEnum checks a value that may be absent.
func validateEnum[T ~string](value *T, allowed []T, path *field.Path) field.ErrorList {
	if value == nil || slices.Contains(allowed, *value) {
		return nil
	}
	return field.ErrorList{field.NotSupported(path, *value, allowed)}
}

// requireEnum checks a value that must be there.
func requireEnum[T ~string](value *T, allowed []T, path *field.Path) field.ErrorList {
	if value == nil {
		return field.ErrorList{field.Required(path, "")}
	}
	return validateEnum(value, allowed, path)
}

// validateWildcard rejects "*" beside other values.
func validateWildcard[T ~string](list []T, what string, path *field.Path) field.ErrorList {
	if len(list) > 1 && slices.Contains(list, "*") {
		return field.ErrorList{field.Invalid(path, list, "if '*' is present, must not specify other "+what)}
	}
	return nil
}

func validateRule(r *admissionv1.RuleWithOperations, path *field.Path) (errs field.ErrorList) {
	at := path.Child("operations")
	if len(r.Operations) == 0 {
		errs = append(errs, field.Required(at, ""))
	}
	errs = append(errs, validateWildcard(r.Operations, "operations", at)...)
	for i := range r.Operations {
		errs = append(errs, validateEnum(&r.Operations[i], operations(), at.Index(i))...)
	}
	if len(r.APIGroups) == 0 {
		errs = append(errs, field.Required(path.Child("apiGroups"), ""))
	}
	errs = append(errs, validateWildcard(r.APIGroups, "API groups", path.Child("apiGroups"))...)
	at = path.Child("apiVersions")
	if len(r.APIVersions) == 0 {
		errs = append(errs, field.Required(at, ""))
	}
	errs = append(errs, validateWildcard(r.APIVersions, "API versions", at)...)
	for i, v := range r.APIVersions {
		if v == "" {
			errs = append(errs, field.Required(at.Index(i), ""))
		}
	}
	errs = append(errs, validateResources(r.Resources, path.Child("resources"))...)
	return append(errs, validateEnum(r.Scope, scopes(), path.Child("scope"))...)
}

// validateResources checks names such as pods, pods/status, pods/*, */status, * and
// */*, of which one must not contain another.
func validateResources(list []string, path *field.Path) (errs field.ErrorList) {
	if len(list) == 0 {
		errs = append(errs, field.Required(path, ""))
	}
	whole, subs := map[string]bool{}, map[string]bool{} // of which all subresources, or resources, are named
	plain := false                                      // whether the last name without subresource is no wildcard
	for i, name := range list {
		if name == "" {
			errs = append(errs, field.Required(path.Index(i), ""))
			continue
		}
		resource, sub, ok := strings.Cut(name, "/")
		if !ok {
			plain = name != "*"
			continue
		}
		if whole[resource] {
			errs = append(errs, field.Invalid(path.Index(i), name, fmt.Sprintf("if '%s/*' is present, must not specify %s", resource, name)))
		}
		if subs[sub] {
			errs = append(errs, field.Invalid(path.Index(i), name, fmt.Sprintf("if '*/%s' is present, must not specify %s", sub, name)))
		}
		whole[resource] = whole[resource] || sub == "*"
		subs[sub] = subs[sub] || resource == "*"
	}
	if len(list) > 1 && slices.Contains(list, "*/*") {
		errs = append(errs, field.Invalid(path, list, "if '*/*' is present, must not specify other resources"))
	}
	if plain && slices.Contains(list, "*") {
		errs = append(errs, field.Invalid(path, list, "if '*' is present, must not specify other resources without subresources"))
	}
	return errs
}

func validateMatch(m *admissionv1.MatchResources, path *field.Path) field.ErrorList {
	if m == nil {
		return nil
	}
	errs := requireEnum(m.MatchPolicy, matchPolicies(), path.Child("matchPolicy"))
	var strict metavalidation.LabelSelectorValidationOptions
	if m.NamespaceSelector == nil {
		errs = append(errs, field.Required(path.Child("namespaceSelector"), ""))
	} else {
		errs = append(errs, metavalidation.ValidateLabelSelector(m.NamespaceSelector, strict, path.Child("namespaceSelector"))...)
	}
	if m.ObjectSelector == nil {
		errs = append(errs, field.Required(path.Child("objectSelector"), ""))
	} else {
		errs = append(errs, metavalidation.ValidateLabelSelector(m.ObjectSelector, strict, path.Child("objectSelector"))...)
	}
	errs = append(errs, validateNamedRules(m.ResourceRules, path.Child("resourceRules"))...)
	return append(errs, validateNamedRules(m.ExcludeResourceRules, path.Child("excludeResourceRules"))...)
}

func validateNamedRules(list []admissionv1.NamedRuleWithOperations, path *field.Path) (errs field.ErrorList) {
	for i := range list {
		names := path.Index(i).Child("resourceNames")
		seen := map[string]bool{}
		for j, name := range list[i].ResourceNames {
			errs = append(errs, store.Invalids(names.Index(j), name, content.IsPathSegmentName(name))...)
			if seen[name] {
				errs = append(errs, field.Duplicate(names.Index(j), name))
			}
			seen[name] = true
		}
		errs = append(errs, validateRule(&list[i].RuleWithOperations, path.Index(i))...)
	}
	return errs
}

// validateMutable rejects operations that leave nothing to mutate.
func validateMutable(m *admissionv1.MatchResources, path *field.Path) (errs field.ErrorList) {
	if m == nil {
		return nil
	}
	allowed := slices.DeleteFunc(operations(), func(o admissionv1.OperationType) bool { return o == admissionv1.Delete })
	for _, r := range m.ResourceRules {
		for i := range r.Operations {
			errs = append(errs, validateEnum(&r.Operations[i], allowed, path.Child("resourceRules", "operations"))...)
		}
	}
	return errs
}

func validateParams(r *admissionv1.ParamRef, path *field.Path) (errs field.ErrorList) {
	if r == nil {
		return nil
	}
	const exclusive = "name and selector are mutually exclusive"
	if r.Name != "" {
		errs = append(errs, store.Invalids(path.Child("name"), r.Name, content.IsPathSegmentName(r.Name))...)
	}
	if r.Name != "" && r.Selector != nil {
		errs = append(errs, field.Forbidden(path.Child("name"), exclusive))
	}
	if r.Selector != nil {
		errs = append(errs,
			metavalidation.ValidateLabelSelector(r.Selector, metavalidation.LabelSelectorValidationOptions{}, path.Child("selector"))...)
	}
	if r.Name != "" && r.Selector != nil {
		errs = append(errs, field.Forbidden(path.Child("selector"), exclusive))
	}
	if r.Name == "" && r.Selector == nil {
		errs = append(errs, field.Required(path, "one of name or selector must be specified"))
	}
	at := path.Child("parameterNotFoundAction")
	if a := r.ParameterNotFoundAction; a == nil || *a == "" {
		return append(errs, field.Required(at, ""))
	}
	return append(errs, validateEnum(r.ParameterNotFoundAction,
		[]admissionv1.ParameterNotFoundActionType{admissionv1.DenyAction, admissionv1.AllowAction}, at)...)
}
