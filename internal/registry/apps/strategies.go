package apps

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/fairlead/fairlead/internal/registry/pod"
	"github.com/fairlead/fairlead/internal/registry/store"
)

type replicaSetStrategy struct{ store.Base }

func replicaSetAttrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	r := obj.(*appsv1.ReplicaSet)
	return r.Labels, fields.Set{
		"metadata.name": r.Name, "metadata.namespace": r.Namespace, "status.replicas": strconv.Itoa(int(r.Status.Replicas)),
	}, nil
}

func (replicaSetStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"status"})
}

func (replicaSetStrategy) PrepareForCreate(_ context.Context, obj runtime.Object) {
	r := obj.(*appsv1.ReplicaSet)
	r.Generation, r.Status = 1, appsv1.ReplicaSetStatus{}
}

func (replicaSetStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	r, before := obj.(*appsv1.ReplicaSet), old.(*appsv1.ReplicaSet)
	r.Status = before.Status
	if !equality.Semantic.DeepEqual(r.Spec, before.Spec) {
		r.Generation = before.Generation + 1
	}
}

func (replicaSetStrategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	r := obj.(*appsv1.ReplicaSet)
	return append(validateMeta(&r.ObjectMeta), validateReplicaSet(&r.Spec, field.NewPath("spec"))...)
}

func (replicaSetStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	r, before := obj.(*appsv1.ReplicaSet), old.(*appsv1.ReplicaSet)
	errs := store.ValidateMetaUpdate(&r.ObjectMeta, &before.ObjectMeta)
	errs = append(errs, validateReplicaSet(&r.Spec, field.NewPath("spec"))...)
	return append(errs, immutableSelector(r.Spec.Selector, before.Spec.Selector)...)
}

func (replicaSetStrategy) WarningsOnCreate(_ context.Context, obj runtime.Object) []string {
	r := obj.(*appsv1.ReplicaSet)
	return append(nameWarnings(r.Name), pod.SpecWarnings(&r.Spec.Template.Spec, templatePath)...)
}

func (replicaSetStrategy) WarningsOnUpdate(_ context.Context, obj, old runtime.Object) []string {
	r := obj.(*appsv1.ReplicaSet)
	if r.Generation == old.(*appsv1.ReplicaSet).Generation {
		return nil
	}
	return pod.SpecWarnings(&r.Spec.Template.Spec, templatePath)
}

type replicaSetStatus struct{ replicaSetStrategy }

func (replicaSetStatus) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"spec"})
}

func (replicaSetStatus) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	obj.(*appsv1.ReplicaSet).Spec = old.(*appsv1.ReplicaSet).Spec
}

func (replicaSetStatus) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	r, before := obj.(*appsv1.ReplicaSet), old.(*appsv1.ReplicaSet)
	s, at := &r.Status, field.NewPath("status")
	errs := store.ValidateMetaUpdate(&r.ObjectMeta, &before.ObjectMeta)
	errs = append(errs, nonnegatives(at, []counter{
		{"replicas", int64(s.Replicas)},
		{"fullyLabeledReplicas", int64(s.FullyLabeledReplicas)},
		{"readyReplicas", int64(s.ReadyReplicas)},
		{"availableReplicas", int64(s.AvailableReplicas)},
		{"observedGeneration", s.ObservedGeneration},
		{"terminatingReplicas", replicas(s.TerminatingReplicas)},
	})...)
	errs = append(errs, atMost(at, s.Replicas, []counter{
		{"fullyLabeledReplicas", int64(s.FullyLabeledReplicas)},
		{"readyReplicas", int64(s.ReadyReplicas)},
		{"availableReplicas", int64(s.AvailableReplicas)},
	})...)
	return append(errs, availableReady(at, s.AvailableReplicas, s.ReadyReplicas)...)
}

func (replicaSetStatus) WarningsOnUpdate(context.Context, runtime.Object, runtime.Object) []string {
	return nil
}

type daemonSetStrategy struct{ store.Base }

func (daemonSetStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"status"})
}

func (daemonSetStrategy) PrepareForCreate(_ context.Context, obj runtime.Object) {
	d := obj.(*appsv1.DaemonSet)
	d.Generation, d.Status = 1, appsv1.DaemonSetStatus{}
	setTemplateGeneration(d, 1)
}

func (daemonSetStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	d, before := obj.(*appsv1.DaemonSet), old.(*appsv1.DaemonSet)
	d.Status = before.Status
	template := templateGeneration(before)
	if !equality.Semantic.DeepEqual(d.Spec.Template, before.Spec.Template) {
		template++
	}
	setTemplateGeneration(d, template)
	if !equality.Semantic.DeepEqual(d.Spec, before.Spec) {
		d.Generation = before.Generation + 1
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

func (daemonSetStrategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	d := obj.(*appsv1.DaemonSet)
	return append(validateMeta(&d.ObjectMeta), validateDaemonSet(&d.Spec, field.NewPath("spec"))...)
}

func (daemonSetStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	d, before := obj.(*appsv1.DaemonSet), old.(*appsv1.DaemonSet)
	errs := store.ValidateMetaUpdate(&d.ObjectMeta, &before.ObjectMeta)
	errs = append(errs, validateDaemonSet(&d.Spec, field.NewPath("spec"))...)
	return append(errs, immutableSelector(d.Spec.Selector, before.Spec.Selector)...)
}

func (daemonSetStrategy) WarningsOnCreate(_ context.Context, obj runtime.Object) []string {
	return pod.SpecWarnings(&obj.(*appsv1.DaemonSet).Spec.Template.Spec, templatePath)
}

func (daemonSetStrategy) WarningsOnUpdate(_ context.Context, obj, old runtime.Object) []string {
	d := obj.(*appsv1.DaemonSet)
	if templateGeneration(d) == templateGeneration(old.(*appsv1.DaemonSet)) {
		return nil
	}
	return pod.SpecWarnings(&d.Spec.Template.Spec, templatePath)
}

type daemonSetStatus struct{ daemonSetStrategy }

func (daemonSetStatus) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"spec"})
}

func (daemonSetStatus) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	obj.(*appsv1.DaemonSet).Spec = old.(*appsv1.DaemonSet).Spec
}

func (daemonSetStatus) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	d, before := obj.(*appsv1.DaemonSet), old.(*appsv1.DaemonSet)
	s, at := &d.Status, field.NewPath("status")
	errs := store.ValidateMetaUpdate(&d.ObjectMeta, &before.ObjectMeta)
	errs = append(errs, nonnegatives(at, []counter{
		{"currentNumberScheduled", int64(s.CurrentNumberScheduled)},
		{"numberMisscheduled", int64(s.NumberMisscheduled)},
		{"desiredNumberScheduled", int64(s.DesiredNumberScheduled)},
		{"numberReady", int64(s.NumberReady)},
		{"observedGeneration", s.ObservedGeneration},
		{"updatedNumberScheduled", int64(s.UpdatedNumberScheduled)},
		{"numberAvailable", int64(s.NumberAvailable)},
		{"numberUnavailable", int64(s.NumberUnavailable)},
		{"collisionCount", replicas(s.CollisionCount)},
	})...)
	return append(errs, notDecremented(at, s.CollisionCount, before.Status.CollisionCount)...)
}

func (daemonSetStatus) WarningsOnUpdate(context.Context, runtime.Object, runtime.Object) []string {
	return nil
}

type revisionStrategy struct{ store.Base }

func (revisionStrategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	r := obj.(*appsv1.ControllerRevision)
	errs := append(validateMeta(&r.ObjectMeta), validateRevision(r)...)
	at := field.NewPath("data")
	var v any
	switch err := json.Unmarshal(r.Data.Raw, &v); {
	case r.Data.Raw == nil:
		errs = append(errs, field.Required(at, "data is mandatory"))
	case err != nil:
		errs = append(errs, field.Invalid(at, "<value omitted>", fmt.Sprintf("error parsing data: %v", err)))
	case v == nil:
		errs = append(errs, field.Required(at, "data is mandatory"))
	default:
		if _, ok := v.(map[string]any); !ok {
			errs = append(errs, field.Required(at, "data must be a valid JSON object"))
		}
	}
	return errs
}

func validateRevision(r *appsv1.ControllerRevision) field.ErrorList {
	if r.Revision < 0 {
		return field.ErrorList{field.Invalid(field.NewPath("revision"), r.Revision, isNegative)}
	}
	return nil
}

func (revisionStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	r, before := obj.(*appsv1.ControllerRevision), old.(*appsv1.ControllerRevision)
	errs := append(store.ValidateMetaUpdate(&r.ObjectMeta, &before.ObjectMeta), validateRevision(r)...)
	if !equality.Semantic.DeepEqual(r.Data, before.Data) {
		errs = append(errs, field.Invalid(field.NewPath("data"), r.Data, "field is immutable"))
	}
	return errs
}
