package rbac

import (
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// validateName admits every name that can be one part of a URL's path, such as
// "system:node".
func validateName(name string, _ bool) []string { return content.IsPathSegmentName(name) }

func validateRole(r *rbacv1.Role) field.ErrorList {
	errs := store.ValidateMeta(&r.ObjectMeta, true, validateName)
	errs = append(errs, validateRules(r.Rules, true)...)
	return append(errs, requireVerbs(r.Rules)...)
}

func validateClusterRole(r *rbacv1.ClusterRole) field.ErrorList {
	errs := store.ValidateMeta(&r.ObjectMeta, false, validateName)
	errs = append(errs, validateRules(r.Rules, false)...)
	if r.AggregationRule == nil {
		return append(errs, requireVerbs(r.Rules)...)
	}
	path := field.NewPath("aggregationRule", "clusterRoleSelectors")
	if len(r.AggregationRule.ClusterRoleSelectors) == 0 {
		errs = append(errs, field.Required(path, "at least one clusterRoleSelector required if aggregationRule is non-nil"))
	}
	for i := range r.AggregationRule.ClusterRoleSelectors {
		s := &r.AggregationRule.ClusterRoleSelectors[i]
		errs = append(errs, metavalidation.ValidateLabelSelector(s, metavalidation.LabelSelectorValidationOptions{}, path.Index(i))...)
		if _, err := metav1.LabelSelectorAsSelector(s); err != nil {
			errs = append(errs, field.Invalid(path.Index(i), s, "invalid label selector."))
		}
	}
	return append(errs, requireVerbs(r.Rules)...)
}

// requireVerbs comes last: kube-apiserver names what its types declare after everything else.
func requireVerbs(rules []rbacv1.PolicyRule) (errs field.ErrorList) {
	for i := range rules {
		if len(rules[i].Verbs) == 0 {
			errs = append(errs, field.Required(field.NewPath("rules").Index(i).Child("verbs"), ""))
		}
	}
	return errs
}

func validateRules(rules []rbacv1.PolicyRule, namespaced bool) (errs field.ErrorList) {
	for i, r := range rules {
		errs = append(errs, validateRule(r, namespaced, field.NewPath("rules").Index(i))...)
	}
	return errs
}

func validateRule(r rbacv1.PolicyRule, namespaced bool, path *field.Path) (errs field.ErrorList) {
	if len(r.NonResourceURLs) > 0 {
		urls := path.Child("nonResourceURLs")
		if namespaced {
			errs = append(errs, field.Invalid(urls, r.NonResourceURLs, "namespaced rules cannot apply to non-resource URLs"))
		}
		if len(r.APIGroups)+len(r.Resources)+len(r.ResourceNames) > 0 {
			errs = append(errs, field.Invalid(urls, r.NonResourceURLs, "rules cannot apply to both regular resources and non-resource URLs"))
		}
		return errs
	}
	if len(r.APIGroups) == 0 {
		errs = append(errs, field.Required(path.Child("apiGroups"), "resource rules must supply at least one api group"))
	}
	if len(r.Resources) == 0 {
		errs = append(errs, field.Required(path.Child("resources"), "resource rules must supply at least one resource"))
	}
	return errs
}

// binding is what RoleBinding and ClusterRoleBinding have in common.
type binding struct {
	meta     *metav1.ObjectMeta
	ref      rbacv1.RoleRef
	subjects []rbacv1.Subject
}

func bindingOf(obj runtime.Object) binding {
	switch b := obj.(type) {
	case *rbacv1.RoleBinding:
		return binding{&b.ObjectMeta, b.RoleRef, b.Subjects}
	case *rbacv1.ClusterRoleBinding:
		return binding{&b.ObjectMeta, b.RoleRef, b.Subjects}
	}
	return binding{meta: &metav1.ObjectMeta{}} // no storage of bindings holds anything else
}

func validateBinding(b binding, namespaced bool) (errs field.ErrorList) {
	path := field.NewPath("roleRef")
	if b.ref.APIGroup != rbacv1.GroupName {
		errs = append(errs, field.NotSupported(path.Child("apiGroup"), b.ref.APIGroup, []string{rbacv1.GroupName}))
	}
	kinds := []string{kindClusterRole}
	if namespaced {
		kinds = []string{kindRole, kindClusterRole}
	}
	if b.ref.Kind != kindClusterRole && (b.ref.Kind != kindRole || !namespaced) {
		errs = append(errs, field.NotSupported(path.Child("kind"), b.ref.Kind, kinds))
	}
	for _, msg := range validateName(b.ref.Name, false) {
		if b.ref.Name != "" {
			errs = append(errs, field.Invalid(path.Child("name"), b.ref.Name, msg))
		}
	}
	for i, s := range b.subjects {
		errs = append(errs, validateSubject(s, namespaced, field.NewPath("subjects").Index(i))...)
	}
	return append(errs, requireNames(b)...)
}

// requireNames comes last, as requireVerbs does.
func requireNames(b binding) (errs field.ErrorList) {
	for i, s := range b.subjects {
		if s.Name == "" {
			errs = append(errs, field.Required(field.NewPath("subjects").Index(i).Child("name"), ""))
		}
	}
	if b.ref.Name == "" {
		errs = append(errs, field.Required(field.NewPath("roleRef", "name"), ""))
	}
	return errs
}

func validateSubject(s rbacv1.Subject, namespaced bool, path *field.Path) (errs field.ErrorList) {
	group := rbacv1.GroupName
	switch s.Kind {
	case rbacv1.UserKind, rbacv1.GroupKind:
	case rbacv1.ServiceAccountKind:
		group = ""
		for _, msg := range validation.ValidateServiceAccountName(s.Name, false) {
			if s.Name != "" {
				errs = append(errs, field.Invalid(path.Child("name"), s.Name, msg))
			}
		}
		if !namespaced && s.Namespace == "" {
			errs = append(errs, field.Required(path.Child("namespace"), ""))
		}
	default:
		return append(errs, field.NotSupported(path.Child("kind"), s.Kind,
			[]string{rbacv1.ServiceAccountKind, rbacv1.UserKind, rbacv1.GroupKind}))
	}
	if s.APIGroup != group {
		errs = append(errs, field.NotSupported(path.Child("apiGroup"), s.APIGroup, []string{group}))
	}
	return errs
}
