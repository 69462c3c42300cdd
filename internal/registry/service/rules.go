package service

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// rules reject load balancers as validateStrict does if strict is set.
func rules(strict bool) store.Rules[*corev1.Service] {
	return store.Rules[*corev1.Service]{
		APIVersion:     "v1",
		CreateOnUpdate: true, // as Kubernetes has it for Services
		Kept: []store.Part[*corev1.Service]{
			store.Field("status", func(s *corev1.Service) *corev1.ServiceStatus { return &s.Status }),
		},
		Update:     dropForType,
		Generation: func(s *corev1.Service) any { return &s.Spec },
		Validate: func(_ context.Context, s, prev *corev1.Service) field.ErrorList {
			var errs field.ErrorList
			if prev == nil {
				errs = ValidateCreate(s)
			} else {
				errs = ValidateUpdate(s, prev)
			}
			if strict {
				errs = append(errs, validateStrict(s, prev)...)
			}
			return store.Limit(errs)
		},
		Warn: func(s, _ *corev1.Service) []string { return warnings(s) },
	}
}

func statusRules(r store.Rules[*corev1.Service]) store.Rules[*corev1.Service] {
	status := r.Sub(
		func(_ context.Context, s, prev *corev1.Service) field.ErrorList { return ValidateStatusUpdate(s, prev) },
		store.Field("spec", func(s *corev1.Service) *corev1.ServiceSpec { return &s.Spec }))
	status.Update = func(s, prev *corev1.Service) { s.Generation = prev.Generation }
	status.Warn = func(s, _ *corev1.Service) (out []string) {
		path := field.NewPath("status", "loadBalancer", "ingress")
		for i, ing := range s.Status.LoadBalancer.Ingress {
			if ing.IP != "" {
				out = append(out, validation.GetWarningsForIP(path.Index(i), ing.IP)...)
			}
		}
		return out
	}
	return status
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
