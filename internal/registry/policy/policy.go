// Package policy stores PodDisruptionBudgets and evicts Pods as they allow.
package policy

import (
	"context"

	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	unversioned "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/apps"
	"github.com/fairlead/fairlead/internal/registry/store"
)

// NewStorage returns the storages of PodDisruptionBudgets by resource path.
func NewStorage(opts generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	budgets := rules()
	r, err := store.New(store.Kind{
		Resource: schema.GroupResource{Group: policyv1.GroupName, Resource: "poddisruptionbudgets"},
		Singular: "poddisruptionbudget", ShortNames: []string{"pdb"},
		New:      store.Empty[policyv1.PodDisruptionBudget],
		NewList:  store.Empty[policyv1.PodDisruptionBudgetList],
		Strategy: budgets.Strategy(),
		Table: store.NewTable([]store.Column{
			{Name: "Min Available", Description: "The minimum number of pods that must be available."},
			{Name: "Max Unavailable", Description: "The maximum number of pods that may be unavailable."},
			{Name: "Allowed Disruptions", Type: "integer", Description: "Calculated number of pods that may be disrupted at this time."},
			store.AgeColumn(),
		}, func(b *policyv1.PodDisruptionBudget) []any {
			return []any{
				share(b.Spec.MinAvailable), share(b.Spec.MaxUnavailable), int64(b.Status.DisruptionsAllowed), store.Age(b.CreationTimestamp),
			}
		}),
	}, opts)
	if err != nil {
		return nil, err
	}
	status := budgets.Sub(
		func(_ context.Context, b, _ *policyv1.PodDisruptionBudget) field.ErrorList {
			return validateStatus(&b.Status, field.NewPath("status"))
		},
		store.Field("spec", func(b *policyv1.PodDisruptionBudget) *policyv1.PodDisruptionBudgetSpec { return &b.Spec }))
	return map[string]rest.Storage{
		"poddisruptionbudgets":        r,
		"poddisruptionbudgets/status": store.NewSub(r, status.Strategy()),
	}, nil
}

func share(v *intstr.IntOrString) string {
	if v == nil {
		return "N/A"
	}
	return v.String()
}

func rules() store.Rules[*policyv1.PodDisruptionBudget] {
	return store.Rules[*policyv1.PodDisruptionBudget]{
		APIVersion: policyv1.SchemeGroupVersion.String(), VersionRequired: true, Name: validation.NameIsDNSSubdomain,
		Kept: []store.Part[*policyv1.PodDisruptionBudget]{
			store.Field("status", func(b *policyv1.PodDisruptionBudget) *policyv1.PodDisruptionBudgetStatus { return &b.Status }),
		},
		Generation: func(b *policyv1.PodDisruptionBudget) any { return &b.Spec },
		Validate: func(_ context.Context, b, _ *policyv1.PodDisruptionBudget) field.ErrorList {
			return validateSpec(&b.Spec, field.NewPath("spec"))
		},
	}
}

func validateSpec(s *policyv1.PodDisruptionBudgetSpec, at *field.Path) (errs field.ErrorList) {
	if s.MinAvailable != nil && s.MaxUnavailable != nil {
		errs = append(errs, field.Invalid(at, s, "minAvailable and maxUnavailable cannot be both set"))
	}
	if s.MinAvailable != nil {
		errs = append(errs, apps.ValidateShare(*s.MinAvailable, at.Child("minAvailable"))...)
	}
	if s.MaxUnavailable != nil {
		errs = append(errs, apps.ValidateShare(*s.MaxUnavailable, at.Child("maxUnavailable"))...)
	}
	errs = append(errs, unversioned.ValidateLabelSelector(s.Selector, unversioned.LabelSelectorValidationOptions{}, at.Child("selector"))...)
	if p := s.UnhealthyPodEvictionPolicy; p != nil && *p != policyv1.IfHealthyBudget && *p != policyv1.AlwaysAllow {
		errs = append(errs, field.NotSupported(at.Child("unhealthyPodEvictionPolicy"), *p,
			[]policyv1.UnhealthyPodEvictionPolicyType{policyv1.AlwaysAllow, policyv1.IfHealthyBudget}))
	}
	return errs
}

func validateStatus(s *policyv1.PodDisruptionBudgetStatus, at *field.Path) field.ErrorList {
	errs := unversioned.ValidateConditions(s.Conditions, at.Child("conditions"))
	for _, c := range []struct {
		name string
		n    int32
	}{
		{"disruptionsAllowed", s.DisruptionsAllowed}, {"currentHealthy", s.CurrentHealthy},
		{"desiredHealthy", s.DesiredHealthy}, {"expectedPods", s.ExpectedPods},
	} {
		errs = append(errs, validation.ValidateNonnegativeField(int64(c.n), at.Child(c.name))...)
	}
	return errs
}
