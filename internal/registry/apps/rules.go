package apps

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/registry/pod"
	"github.com/fairlead/fairlead/internal/registry/store"
)

type (
	deployment = *appsv1.Deployment
	replicaSet = *appsv1.ReplicaSet
	daemonSet  = *appsv1.DaemonSet
	revision   = *appsv1.ControllerRevision
)

func deploymentRules() store.Rules[deployment] {
	return store.Rules[deployment]{
		APIVersion: apiVersion, Name: validation.NameIsDNSSubdomain,
		Kept: []store.Part[deployment]{store.Field("status", func(d deployment) *appsv1.DeploymentStatus { return &d.Status })},
		// Annotations count: they are copied to ReplicaSets.
		Generation: func(d deployment) any { return []any{&d.Spec, d.Annotations} },
		Validate: func(_ context.Context, d, before deployment) field.ErrorList {
			errs := validateDeployment(&d.Spec, field.NewPath("spec"))
			if before == nil {
				return errs
			}
			return append(errs, immutableSelector(d.Spec.Selector, before.Spec.Selector)...)
		},
		Warn: func(d, before deployment) []string {
			if before == nil {
				return warningsOnCreate(d.Name, &d.Spec.Template)
			}
			return warningsOnUpdate(d.Generation != before.Generation, &d.Spec.Template)
		},
	}
}

func deploymentStatusRules() store.Rules[deployment] {
	return deploymentRules().Sub(
		func(_ context.Context, d, before deployment) field.ErrorList {
			return validateDeploymentStatus(&d.Status, &before.Status, field.NewPath("status"))
		},
		store.Field("spec", func(d deployment) *appsv1.DeploymentSpec { return &d.Spec }),
		store.Field("metadata.labels", func(d deployment) *map[string]string { return &d.Labels }))
}

func validateDeploymentStatus(s, before *appsv1.DeploymentStatus, at *field.Path) field.ErrorList {
	errs := nonnegatives(at, []counter{
		{"observedGeneration", s.ObservedGeneration},
		{"replicas", int64(s.Replicas)},
		{"updatedReplicas", int64(s.UpdatedReplicas)},
		{"readyReplicas", int64(s.ReadyReplicas)},
		{"availableReplicas", int64(s.AvailableReplicas)},
		{"unavailableReplicas", int64(s.UnavailableReplicas)},
		{"terminatingReplicas", replicas(s.TerminatingReplicas)},
		{"collisionCount", replicas(s.CollisionCount)},
	})
	errs = append(errs, atMost(at, s.Replicas, []counter{
		{"updatedReplicas", int64(s.UpdatedReplicas)},
		{"readyReplicas", int64(s.ReadyReplicas)},
		{"availableReplicas", int64(s.AvailableReplicas)},
	})...)
	errs = append(errs, availableReady(at, s.AvailableReplicas, s.ReadyReplicas)...)
	return append(errs, notDecremented(at, s.CollisionCount, before.CollisionCount)...)
}

func warningsOnCreate(name string, template *corev1.PodTemplateSpec) []string {
	return append(nameWarnings(name), pod.TemplateWarnings(template, templatePath)...)
}

func warningsOnUpdate(changed bool, template *corev1.PodTemplateSpec) []string {
	if !changed {
		return nil
	}
	return pod.TemplateWarnings(template, templatePath)
}

func replicaSetAttrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	r := obj.(*appsv1.ReplicaSet)
	return r.Labels, fields.Set{
		"metadata.name": r.Name, "metadata.namespace": r.Namespace, "status.replicas": strconv.Itoa(int(r.Status.Replicas)),
	}, nil
}

func replicaSetRules() store.Rules[replicaSet] {
	return store.Rules[replicaSet]{
		APIVersion: apiVersion, Name: validation.NameIsDNSSubdomain,
		Kept:       []store.Part[replicaSet]{store.Field("status", func(r replicaSet) *appsv1.ReplicaSetStatus { return &r.Status })},
		Generation: func(r replicaSet) any { return &r.Spec },
		Validate: func(_ context.Context, r, before replicaSet) field.ErrorList {
			errs := validateReplicaSet(&r.Spec, field.NewPath("spec"))
			if before == nil {
				return errs
			}
			return append(errs, immutableSelector(r.Spec.Selector, before.Spec.Selector)...)
		},
		Warn: func(r, before replicaSet) []string {
			if before == nil {
				return warningsOnCreate(r.Name, &r.Spec.Template)
			}
			return warningsOnUpdate(r.Generation != before.Generation, &r.Spec.Template)
		},
	}
}

func replicaSetStatusRules() store.Rules[replicaSet] {
	return replicaSetRules().Sub(func(_ context.Context, r, _ replicaSet) field.ErrorList {
		return validateReplicaSetStatus(&r.Status, field.NewPath("status"))
	}, store.Field("spec", func(r replicaSet) *appsv1.ReplicaSetSpec { return &r.Spec }))
}

func validateReplicaSetStatus(s *appsv1.ReplicaSetStatus, at *field.Path) field.ErrorList {
	errs := nonnegatives(at, []counter{
		{"replicas", int64(s.Replicas)},
		{"fullyLabeledReplicas", int64(s.FullyLabeledReplicas)},
		{"readyReplicas", int64(s.ReadyReplicas)},
		{"availableReplicas", int64(s.AvailableReplicas)},
		{"observedGeneration", s.ObservedGeneration},
		{"terminatingReplicas", replicas(s.TerminatingReplicas)},
	})
	errs = append(errs, atMost(at, s.Replicas, []counter{
		{"fullyLabeledReplicas", int64(s.FullyLabeledReplicas)},
		{"readyReplicas", int64(s.ReadyReplicas)},
		{"availableReplicas", int64(s.AvailableReplicas)},
	})...)
	return append(errs, availableReady(at, s.AvailableReplicas, s.ReadyReplicas)...)
}

func daemonSetRules() store.Rules[daemonSet] {
	return store.Rules[daemonSet]{
		APIVersion: apiVersion, Name: validation.NameIsDNSSubdomain,
		Kept:       []store.Part[daemonSet]{store.Field("status", func(d daemonSet) *appsv1.DaemonSetStatus { return &d.Status })},
		Generation: func(d daemonSet) any { return &d.Spec },
		Create:     func(_ context.Context, d daemonSet) { setTemplateGeneration(d, 1) },
		Update: func(d, before daemonSet) {
			template := templateGeneration(before)
			if !equality.Semantic.DeepEqual(d.Spec.Template, before.Spec.Template) {
				template++
			}
			setTemplateGeneration(d, template)
		},
		Validate: func(_ context.Context, d, before daemonSet) field.ErrorList {
			errs := validateDaemonSet(&d.Spec, field.NewPath("spec"))
			if before == nil {
				return errs
			}
			return append(errs, immutableSelector(d.Spec.Selector, before.Spec.Selector)...)
		},
		Warn: func(d, before daemonSet) []string {
			changed := before == nil || templateGeneration(d) != templateGeneration(before)
			return warningsOnUpdate(changed, &d.Spec.Template)
		},
	}
}

// templateGeneration is how often the template has changed. apps/v1 keeps this field of
// the versions before it as an annotation.
func templateGeneration(d *appsv1.DaemonSet) int64 {
	n, err := strconv.ParseInt(d.Annotations[appsv1.DeprecatedTemplateGeneration], 10, 64)
	if err != nil {
		return 1
	}
	return n
}

func setTemplateGeneration(d *appsv1.DaemonSet, n int64) {
	if d.Annotations == nil {
		d.Annotations = map[string]string{}
	}
	d.Annotations[appsv1.DeprecatedTemplateGeneration] = strconv.FormatInt(n, 10)
}

func daemonSetStatusRules() store.Rules[daemonSet] {
	return daemonSetRules().Sub(func(_ context.Context, d, before daemonSet) field.ErrorList {
		return validateDaemonSetStatus(&d.Status, &before.Status, field.NewPath("status"))
	}, store.Field("spec", func(d daemonSet) *appsv1.DaemonSetSpec { return &d.Spec }))
}

func validateDaemonSetStatus(s, before *appsv1.DaemonSetStatus, at *field.Path) field.ErrorList {
	errs := nonnegatives(at, []counter{
		{"currentNumberScheduled", int64(s.CurrentNumberScheduled)},
		{"numberMisscheduled", int64(s.NumberMisscheduled)},
		{"desiredNumberScheduled", int64(s.DesiredNumberScheduled)},
		{"numberReady", int64(s.NumberReady)},
		{"observedGeneration", s.ObservedGeneration},
		{"updatedNumberScheduled", int64(s.UpdatedNumberScheduled)},
		{"numberAvailable", int64(s.NumberAvailable)},
		{"numberUnavailable", int64(s.NumberUnavailable)},
		{"collisionCount", replicas(s.CollisionCount)},
	})
	return append(errs, notDecremented(at, s.CollisionCount, before.CollisionCount)...)
}

func revisionRules() store.Rules[revision] {
	return store.Rules[revision]{
		Name: validation.NameIsDNSSubdomain,
		Validate: func(_ context.Context, r, before revision) field.ErrorList {
			errs := validateRevision(r)
			switch {
			case before == nil:
				errs = append(errs, validateData(r.Data.Raw, field.NewPath("data"))...)
			case !equality.Semantic.DeepEqual(r.Data, before.Data):
				errs = append(errs, field.Invalid(field.NewPath("data"), r.Data, "field is immutable"))
			}
			return errs
		},
	}
}

func validateRevision(r *appsv1.ControllerRevision) field.ErrorList {
	if r.Revision < 0 {
		return field.ErrorList{field.Invalid(field.NewPath("revision"), r.Revision, isNegative)}
	}
	return nil
}

// validateData checks that data is a JSON object.
func validateData(data []byte, at *field.Path) field.ErrorList {
	var v any
	switch err := json.Unmarshal(data, &v); {
	case data == nil:
		return field.ErrorList{field.Required(at, "data is mandatory")}
	case err != nil:
		return field.ErrorList{field.Invalid(at, "<value omitted>", fmt.Sprintf("error parsing data: %v", err))}
	case v == nil:
		return field.ErrorList{field.Required(at, "data is mandatory")}
	}
	if _, ok := v.(map[string]any); !ok {
		return field.ErrorList{field.Required(at, "data must be a valid JSON object")}
	}
	return nil
}
