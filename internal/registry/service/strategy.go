package service

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/fairlead/fairlead/internal/registry/store"
)

type strategy struct {
	store.Base
	// strict adds validateStrict.
	strict bool
}

func (strategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields("v1", []string{"status"})
}

func (strategy) PrepareForCreate(_ context.Context, obj runtime.Object) {
	s := obj.(*corev1.Service)
	s.Status, s.Generation = corev1.ServiceStatus{}, 1
}

func (strategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	cur, prev := obj.(*corev1.Service), old.(*corev1.Service)
	cur.Status = prev.Status
	dropForType(cur, prev)
	if cur.Generation = prev.Generation; !equality.Semantic.DeepEqual(cur.Spec, prev.Spec) {
		cur.Generation++
	}
}

func (s strategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	svc := obj.(*corev1.Service)
	errs := ValidateCreate(svc)
	if s.strict {
		errs = append(errs, validateStrict(svc, nil)...)
	}
	return store.Limit(errs)
}

func (s strategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	svc, prev := obj.(*corev1.Service), old.(*corev1.Service)
	errs := ValidateUpdate(svc, prev)
	if s.strict {
		errs = append(errs, validateStrict(svc, prev)...)
	}
	return store.Limit(errs)
}

func (strategy) WarningsOnCreate(_ context.Context, obj runtime.Object) []string {
	return warnings(obj.(*corev1.Service))
}

func (strategy) WarningsOnUpdate(_ context.Context, obj, _ runtime.Object) []string {
	return warnings(obj.(*corev1.Service))
}

// AllowCreateOnUpdate is true, as Kubernetes has it for Services.
func (strategy) AllowCreateOnUpdate(context.Context) bool { return true }

type statusStrategy struct{ strategy }

func (statusStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields("v1", []string{"spec"})
}

func (statusStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	cur, prev := obj.(*corev1.Service), old.(*corev1.Service)
	cur.Spec, cur.Generation = prev.Spec, prev.Generation
}

func (statusStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	return ValidateStatusUpdate(obj.(*corev1.Service), old.(*corev1.Service))
}

func (statusStrategy) WarningsOnUpdate(_ context.Context, obj, _ runtime.Object) []string {
	var out []string
	path := field.NewPath("status", "loadBalancer", "ingress")
	for i, ing := range obj.(*corev1.Service).Status.LoadBalancer.Ingress {
		if ing.IP != "" {
			out = append(out, validation.GetWarningsForIP(path.Index(i), ing.IP)...)
		}
	}
	return out
}

// attrs are the labels and the selectable fields.
func attrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	svc, ok := obj.(*corev1.Service)
	if !ok {
		return nil, nil, fmt.Errorf("not a Service: %T", obj)
	}
	set := generic.ObjectMetaFieldsSet(&svc.ObjectMeta, true)
	set["spec.clusterIP"], set["spec.type"] = svc.Spec.ClusterIP, string(svc.Spec.Type)
	return svc.Labels, set, nil
}
