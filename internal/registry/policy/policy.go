// Package policy stores PodDisruptionBudgets and evicts Pods as they allow.
package policy

import (
	"context"

	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/validation"
	unversioned "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/fairlead/fairlead/internal/registry/apps"
	"github.com/fairlead/fairlead/internal/registry/store"
)

const apiVersion = "policy/v1"

// NewStorage returns the storages of PodDisruptionBudgets by resource path.
func NewStorage(opts generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	r, err := store.New(store.Kind{
		Resource: schema.GroupResource{Group: policyv1.GroupName, Resource: "poddisruptionbudgets"},
		Singular: "poddisruptionbudget", ShortNames: []string{"pdb"},
		New:      func() runtime.Object { return &policyv1.PodDisruptionBudget{} },
		NewList:  func() runtime.Object { return &policyv1.PodDisruptionBudgetList{} },
		Strategy: strategy{store.Namespaced()},
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
	return map[string]rest.Storage{
		"poddisruptionbudgets":        r,
		"poddisruptionbudgets/status": store.NewSub(r, statusStrategy{strategy{store.Namespaced()}}),
	}, nil
}

func share(v *intstr.IntOrString) string {
	if v == nil {
		return "N/A"
	}
	return v.String()
}

type strategy struct{ store.Base }

// AllowUnconditionalUpdate is false, as in Kubernetes.
func (strategy) AllowUnconditionalUpdate(context.Context) bool { return false }

func (strategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"status"})
}

func (strategy) PrepareForCreate(_ context.Context, obj runtime.Object) {
	b := obj.(*policyv1.PodDisruptionBudget)
	b.Generation, b.Status = 1, policyv1.PodDisruptionBudgetStatus{}
}

func (strategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	b, before := obj.(*policyv1.PodDisruptionBudget), old.(*policyv1.PodDisruptionBudget)
	b.Status = before.Status
	if !equality.Semantic.DeepEqual(b.Spec, before.Spec) {
		b.Generation = before.Generation + 1
	}
}

func (strategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	b := obj.(*policyv1.PodDisruptionBudget)
	return append(store.ValidateMeta(&b.ObjectMeta, true, validation.NameIsDNSSubdomain), validateSpec(&b.Spec, field.NewPath("spec"))...)
}

func (strategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	b, before := obj.(*policyv1.PodDisruptionBudget), old.(*policyv1.PodDisruptionBudget)
	return append(store.ValidateMetaUpdate(&b.ObjectMeta, &before.ObjectMeta), validateSpec(&b.Spec, field.NewPath("spec"))...)
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

type statusStrategy struct{ strategy }

func (statusStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"spec"})
}

func (statusStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	obj.(*policyv1.PodDisruptionBudget).Spec = old.(*policyv1.PodDisruptionBudget).Spec
}

func (statusStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	b, before := obj.(*policyv1.PodDisruptionBudget), old.(*policyv1.PodDisruptionBudget)
	s, at := &b.Status, field.NewPath("status")
	errs := store.ValidateMetaUpdate(&b.ObjectMeta, &before.ObjectMeta)
	errs = append(errs, unversioned.ValidateConditions(s.Conditions, at.Child("conditions"))...)
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
