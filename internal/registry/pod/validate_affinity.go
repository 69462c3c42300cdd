package pod

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	unversioned "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// The rules and the messages come from pkg/apis/core/validation of Kubernetes.

func validateAffinity(a *corev1.Affinity, at *field.Path) (errs field.ErrorList) {
	if a == nil {
		return nil
	}
	const required, preferred = "requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution"
	if n := a.NodeAffinity; n != nil {
		p := at.Child("nodeAffinity")
		if n.RequiredDuringSchedulingIgnoredDuringExecution != nil {
			errs = append(errs, validateNodeSelector(n.RequiredDuringSchedulingIgnoredDuringExecution, p.Child(required))...)
		}
		for i := range n.PreferredDuringSchedulingIgnoredDuringExecution {
			t, p := &n.PreferredDuringSchedulingIgnoredDuringExecution[i], p.Child(preferred).Index(i)
			errs = append(errs, validateWeight(t.Weight, p.Child("weight"))...)
			errs = append(errs, validateNodeTerm(&t.Preference, false, p.Child("preference"))...)
		}
	}
	pods := func(terms []corev1.PodAffinityTerm, wished []corev1.WeightedPodAffinityTerm, p *field.Path) {
		for i := range terms {
			errs = append(errs, validatePodTerm(&terms[i], p.Child(required).Index(i))...)
		}
		for i := range wished {
			errs = append(errs, validateWeight(wished[i].Weight, p.Child(preferred).Index(i).Child("weight"))...)
			errs = append(errs, validatePodTerm(&wished[i].PodAffinityTerm, p.Child(preferred).Index(i).Child("podAffinityTerm"))...)
		}
	}
	if p := a.PodAffinity; p != nil {
		pods(p.RequiredDuringSchedulingIgnoredDuringExecution, p.PreferredDuringSchedulingIgnoredDuringExecution, at.Child("podAffinity"))
	}
	if p := a.PodAntiAffinity; p != nil {
		pods(p.RequiredDuringSchedulingIgnoredDuringExecution, p.PreferredDuringSchedulingIgnoredDuringExecution, at.Child("podAntiAffinity"))
	}
	return errs
}

func validateWeight(n int32, at *field.Path) field.ErrorList {
	if n < 1 || n > 100 {
		return field.ErrorList{field.Invalid(at, n, "must be in the range 1-100")}
	}
	return nil
}

func validateNodeSelector(s *corev1.NodeSelector, at *field.Path) (errs field.ErrorList) {
	terms := at.Child("nodeSelectorTerms")
	if len(s.NodeSelectorTerms) == 0 {
		return field.ErrorList{field.Required(terms, "must have at least one node selector term")}
	}
	for i := range s.NodeSelectorTerms {
		errs = append(errs, validateNodeTerm(&s.NodeSelectorTerms[i], true, terms.Index(i))...)
	}
	return errs
}

// validateNodeTerm checks a term of a required or a preferred affinity: a preferred one may have values that no
// label can have.
func validateNodeTerm(t *corev1.NodeSelectorTerm, required bool, at *field.Path) (errs field.ErrorList) {
	for i := range t.MatchExpressions {
		errs = append(errs, validateRequirement(&t.MatchExpressions[i], required, at.Child("matchExpressions").Index(i))...)
	}
	for i := range t.MatchFields {
		errs = append(errs, validateFieldRequirement(&t.MatchFields[i], at.Child("matchFields").Index(i))...)
	}
	return errs
}

func validateFieldRequirement(r *corev1.NodeSelectorRequirement, at *field.Path) (errs field.ErrorList) {
	switch {
	case r.Operator != corev1.NodeSelectorOpIn && r.Operator != corev1.NodeSelectorOpNotIn:
		errs = append(errs, field.Invalid(at.Child("operator"), r.Operator, "not a valid selector operator"))
	case len(r.Values) != 1:
		errs = append(errs, field.Required(at.Child("values"),
			"must be only one value when `operator` is 'In' or 'NotIn' for node field selector"))
	}
	if r.Key != metav1.ObjectNameField {
		return append(errs, field.Invalid(at.Child("key"), r.Key, "not a valid field selector key"))
	}
	for i, v := range r.Values {
		errs = append(errs, store.Invalids(at.Child("values").Index(i), v, validation.NameIsDNSSubdomain(v, false))...)
	}
	return errs
}

func validateRequirement(r *corev1.NodeSelectorRequirement, required bool, at *field.Path) (errs field.ErrorList) {
	values := at.Child("values")
	switch r.Operator {
	case corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn:
		if len(r.Values) == 0 {
			errs = append(errs, field.Required(values, "must be specified when `operator` is 'In' or 'NotIn'"))
		}
	case corev1.NodeSelectorOpExists, corev1.NodeSelectorOpDoesNotExist:
		if len(r.Values) > 0 {
			errs = append(errs, field.Forbidden(values, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'"))
		}
	case corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt:
		if len(r.Values) != 1 {
			errs = append(errs, field.Required(values, "must be specified single value when `operator` is 'Lt' or 'Gt'"))
		}
	default:
		errs = append(errs, field.Invalid(at.Child("operator"), r.Operator, "not a valid selector operator"))
	}
	errs = append(errs, unversioned.ValidateLabelName(r.Key, at.Child("key"))...)
	for i, v := range r.Values {
		if required {
			errs = append(errs, store.Invalids(values.Index(i), v, utilvalidation.IsValidLabelValue(v))...)
		}
	}
	return errs
}

func validatePodTerm(t *corev1.PodAffinityTerm, at *field.Path) (errs field.ErrorList) {
	options := unversioned.LabelSelectorValidationOptions{}
	errs = append(errs, unversioned.ValidateLabelSelector(t.LabelSelector, options, at.Child("labelSelector"))...)
	errs = append(errs, unversioned.ValidateLabelSelector(t.NamespaceSelector, options, at.Child("namespaceSelector"))...)
	for _, ns := range t.Namespaces {
		errs = append(errs, store.Invalids(at.Child("namespace"), ns, validation.ValidateNamespaceName(ns, false))...)
	}
	errs = append(errs, validateMatchKeys(t.MatchLabelKeys, t.LabelSelector, at.Child("matchLabelKeys"))...)
	errs = append(errs, validateMatchKeys(t.MismatchLabelKeys, t.LabelSelector, at.Child("mismatchLabelKeys"))...)
	if t.TopologyKey == "" {
		errs = append(errs, field.Required(at.Child("topologyKey"), "can not be empty"))
	}
	return append(errs, unversioned.ValidateLabelName(t.TopologyKey, at.Child("topologyKey"))...)
}

func validateMatchKeys(keys []string, selector *metav1.LabelSelector, at *field.Path) (errs field.ErrorList) {
	if len(keys) > 0 && selector == nil {
		return field.ErrorList{field.Forbidden(at, "must not be specified when labelSelector is not set")}
	}
	for i, k := range keys {
		errs = append(errs, unversioned.ValidateLabelName(k, at.Index(i))...)
	}
	return errs
}

func validateSpread(list []corev1.TopologySpreadConstraint, at *field.Path) (errs field.ErrorList) {
	seen := map[string]bool{}
	for i := range list {
		t, p := &list[i], at.Index(i)
		if t.MaxSkew <= 0 {
			errs = append(errs, field.Invalid(p.Child("maxSkew"), t.MaxSkew, "must be greater than zero"))
		}
		if t.TopologyKey == "" {
			errs = append(errs, field.Required(p.Child("topologyKey"), "can not be empty"))
		} else {
			errs = append(errs, unversioned.ValidateLabelName(t.TopologyKey, p.Child("topologyKey"))...)
		}
		errs = append(errs, oneOf(p.Child("whenUnsatisfiable"), t.WhenUnsatisfiable, corev1.DoNotSchedule, corev1.ScheduleAnyway)...)
		pair := fmt.Sprintf("{%v, %v}", t.TopologyKey, t.WhenUnsatisfiable)
		if seen[pair] {
			errs = append(errs, field.Duplicate(p.Child("{topologyKey, whenUnsatisfiable}"), pair))
		}
		seen[pair] = true
		if d := t.MinDomains; d != nil && *d <= 0 {
			errs = append(errs, field.Invalid(p.Child("minDomains"), *d, "must be greater than zero"))
		} else if d != nil && t.WhenUnsatisfiable != corev1.DoNotSchedule {
			errs = append(errs, field.Invalid(p.Child("minDomains"), *d, fmt.Sprintf("can only use minDomains if whenUnsatisfiable=%s, not %s",
				corev1.DoNotSchedule, t.WhenUnsatisfiable)))
		}
		for name, policy := range map[string]*corev1.NodeInclusionPolicy{
			"nodeAffinityPolicy": t.NodeAffinityPolicy, "nodeTaintsPolicy": t.NodeTaintsPolicy,
		} {
			if policy != nil {
				errs = append(errs, oneOf(p.Child(name), *policy, corev1.NodeInclusionPolicyIgnore, corev1.NodeInclusionPolicyHonor)...)
			}
		}
		errs = append(errs, validateMatchKeys(t.MatchLabelKeys, t.LabelSelector, p.Child("matchLabelKeys"))...)
		errs = append(errs, unversioned.ValidateLabelSelector(t.LabelSelector, unversioned.LabelSelectorValidationOptions{},
			p.Child("labelSelector"))...)
	}
	return errs
}
