package pod

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/diff"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/registry/store"
	"github.com/fairlead/fairlead/internal/svc"
)

type strategy struct{ store.Base }

func (strategy) PrepareForCreate(_ context.Context, obj runtime.Object) {
	p := obj.(*corev1.Pod)
	p.Generation = 1
	p.Status = corev1.PodStatus{Phase: corev1.PodPending, QOSClass: qosClass(p)}
}

func (strategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	p, before := obj.(*corev1.Pod), old.(*corev1.Pod)
	p.Status = before.Status
	p.Generation = before.Generation
	keepSecurityLevel(p, before)
	if !equality.Semantic.DeepEqual(p.Spec, before.Spec) {
		p.Generation++
	}
}

// keepSecurityLevel keeps the level under which the Pod was created, as a status is kept.
func keepSecurityLevel(p, before *corev1.Pod) {
	level, ok := before.Annotations[svc.PodSecurityAnnotation]
	switch {
	case !ok:
		delete(p.Annotations, svc.PodSecurityAnnotation)
		return
	case p.Annotations == nil:
		p.Annotations = map[string]string{}
	}
	p.Annotations[svc.PodSecurityAnnotation] = level
}

func (strategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	return validate(obj.(*corev1.Pod))
}

// ValidateUpdate rejects changes of the spec but for the few that Kubernetes
// allows: images, deadlines, additional tolerations.
func (strategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	p, before := obj.(*corev1.Pod), old.(*corev1.Pod)
	errs := store.ValidateMetaUpdate(&p.ObjectMeta, &before.ObjectMeta)
	errs = append(errs, validate(p)...)
	errs = append(errs, registration.ValidateUpdate(p, before)...)
	const mirror = corev1.MirrorPodAnnotationKey
	if now, was := p.Annotations[mirror], before.Annotations[mirror]; now != was { // ValidatePodUpdate of Kubernetes
		errs = append(errs, field.Invalid(field.NewPath("metadata", "annotations").Key(mirror), now,
			"may not add, remove or update mirror pod annotation"))
	}
	return append(errs, validateChange(p, before)...)
}

func (strategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields("v1", []string{"status"})
}

func validateChange(p, before *corev1.Pod) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	if len(p.Spec.Containers) != len(before.Spec.Containers) || len(p.Spec.InitContainers) != len(before.Spec.InitContainers) {
		return append(errs, field.Forbidden(spec.Child("containers"), "pod updates may not add or remove containers"))
	}
	if now, was := p.Spec.ActiveDeadlineSeconds, before.Spec.ActiveDeadlineSeconds; was != nil && (now == nil || *now > *was) {
		errs = append(errs, field.Invalid(spec.Child("activeDeadlineSeconds"), now, "must be less than or equal to previous value"))
	}
	errs = append(errs, validateTolerationChange(p.Spec.Tolerations, before.Spec.Tolerations, spec.Child("tolerations"))...)

	// Put the allowed changes back; what still differs is not allowed.
	same := p.Spec.DeepCopy()
	for i := range same.Containers {
		same.Containers[i].Image = before.Spec.Containers[i].Image
	}
	for i := range same.InitContainers {
		same.InitContainers[i].Image = before.Spec.InitContainers[i].Image
	}
	same.ActiveDeadlineSeconds = before.Spec.ActiveDeadlineSeconds
	same.Tolerations = before.Spec.Tolerations
	if before.Spec.TerminationGracePeriodSeconds != nil && *before.Spec.TerminationGracePeriodSeconds < 0 &&
		same.TerminationGracePeriodSeconds != nil && *same.TerminationGracePeriodSeconds == 1 {
		same.TerminationGracePeriodSeconds = before.Spec.TerminationGracePeriodSeconds
	}
	if !equality.Semantic.DeepEqual(*same, before.Spec) {
		errs = append(errs, field.Forbidden(spec, fmt.Sprintf("pod updates may not change fields other than `spec.containers[*].image`,"+
			"`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"+
			"`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)\n%v", diff.Diff(before.Spec, *same))))
	}
	return errs
}

func validateTolerationChange(now, was []corev1.Toleration, path *field.Path) (errs field.ErrorList) {
	for _, old := range was {
		kept := false
		for _, t := range now {
			t.TolerationSeconds = old.TolerationSeconds // may be changed
			if kept = kept || equality.Semantic.DeepEqual(t, old); kept {
				break
			}
		}
		if !kept {
			return append(errs, field.Forbidden(path, "existing toleration can not be modified except its tolerationSeconds"))
		}
	}
	return nil
}

// CheckGracefulDelete sets how long the processes have to end: what the deletion
// or the Pod asks for, and no time at all where nothing runs.
func (strategy) CheckGracefulDelete(ctx context.Context, obj runtime.Object, options *metav1.DeleteOptions) bool {
	if options == nil {
		return false
	}
	p := obj.(*corev1.Pod)
	asked, ok := askedGrace(ctx)
	if !ok {
		asked = options.GracePeriodSeconds
	}
	period := graceSeconds
	switch {
	case asked != nil:
		period = *asked
	case p.Spec.TerminationGracePeriodSeconds != nil:
		period = *p.Spec.TerminationGracePeriodSeconds
	}
	if period < 0 {
		period = 1
	}
	if p.Spec.NodeName == "" || p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded {
		period = 0
	}
	options.GracePeriodSeconds = ptr.To(period)
	return true
}

// statusStrategy lets the status through and nothing else but metadata.
type statusStrategy struct{ strategy }

func (statusStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	p, before := obj.(*corev1.Pod), old.(*corev1.Pod)
	p.Spec, p.Generation = before.Spec, before.Generation
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = before.DeletionTimestamp, before.DeletionGracePeriodSeconds
	p.OwnerReferences = before.OwnerReferences
	keepSecurityLevel(p, before)
	if p.Status.QOSClass == "" {
		p.Status.QOSClass = before.Status.QOSClass
	}
}

func (statusStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	p, before := obj.(*corev1.Pod), old.(*corev1.Pod)
	errs := store.ValidateMetaUpdate(&p.ObjectMeta, &before.ObjectMeta)
	errs = append(errs, registration.ValidateUpdate(p, before)...)
	return append(errs, validateStatus(&p.Status, &before.Status, field.NewPath("status"))...)
}

func (statusStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields("v1", []string{"spec"}, []string{"metadata", "deletionTimestamp"}, []string{"metadata", "ownerReferences"})
}

// qosClass is how strictly the pod has said what it needs of CPU and memory.
func qosClass(p *corev1.Pod) corev1.PodQOSClass {
	some, every := false, true
	for _, c := range append(p.Spec.Containers[:len(p.Spec.Containers):len(p.Spec.Containers)], p.Spec.InitContainers...) {
		for _, r := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
			limit, hasLimit := c.Resources.Limits[r]
			request, hasRequest := c.Resources.Requests[r]
			some = some || hasLimit && !limit.IsZero() || hasRequest && !request.IsZero()
			every = every && hasLimit && hasRequest && !limit.IsZero() && limit.Cmp(request) == 0
		}
	}
	switch {
	case !some:
		return corev1.PodQOSBestEffort
	case every:
		return corev1.PodQOSGuaranteed
	}
	return corev1.PodQOSBurstable
}

// ephemeralStrategy rejects ephemeral containers (kubectl debug).
type ephemeralStrategy struct{ strategy }

func (ephemeralStrategy) PrepareForUpdate(context.Context, runtime.Object, runtime.Object) {}

func (ephemeralStrategy) ValidateUpdate(context.Context, runtime.Object, runtime.Object) field.ErrorList {
	return field.ErrorList{field.Forbidden(field.NewPath("spec", "ephemeralContainers"),
		"containers cannot be added to a Pod that runs: its processes see the programs of the node, use kubectl exec or a Pod of their own")}
}
