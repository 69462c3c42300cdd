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
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"

	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/registry/store"
	"github.com/fairlead/fairlead/internal/svc"
)

func rules() store.Rules[*corev1.Pod] {
	return store.Rules[*corev1.Pod]{
		APIVersion: "v1",
		Kept: []store.Part[*corev1.Pod]{
			store.Field("status", func(p *corev1.Pod) *corev1.PodStatus { return &p.Status }),
		},
		Generation: func(p *corev1.Pod) any { return &p.Spec },
		Create: func(_ context.Context, p *corev1.Pod) {
			p.Status = corev1.PodStatus{Phase: corev1.PodPending, QOSClass: qosClass(p)}
		},
		Update: keepSecurityLevel,
		Validate: func(_ context.Context, p, before *corev1.Pod) field.ErrorList {
			if before == nil {
				return validate(p)
			}
			return validateUpdate(p, before)
		},
		Warn: func(p, before *corev1.Pod) []string {
			if before != nil {
				return nil
			}
			return warnings(p)
		},
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

// validateUpdate rejects changes of the spec except the few that Kubernetes
// allows: images, deadlines, additional tolerations.
func validateUpdate(p, before *corev1.Pod) field.ErrorList {
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

// graceful is the strategy of Pods with the time that a deletion gives them.
type graceful struct{ store.Strategy }

var _ rest.RESTGracefulDeleteStrategy = graceful{}

// CheckGracefulDelete sets how long the processes have to end: what the deletion
// or the Pod asks for, and no time at all where nothing runs.
func (graceful) CheckGracefulDelete(ctx context.Context, obj runtime.Object, options *metav1.DeleteOptions) bool {
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

// statusRules accept changes of the status and of metadata only.
func statusRules(r store.Rules[*corev1.Pod]) store.Rules[*corev1.Pod] {
	status := r.Sub(validateStatusUpdate,
		store.Field("spec", func(p *corev1.Pod) *corev1.PodSpec { return &p.Spec }),
		store.Field("metadata.deletionTimestamp", func(p *corev1.Pod) **metav1.Time { return &p.DeletionTimestamp }),
		store.Field("metadata.ownerReferences", func(p *corev1.Pod) *[]metav1.OwnerReference { return &p.OwnerReferences }))
	status.Update = func(p, before *corev1.Pod) {
		p.Generation = before.Generation
		p.DeletionGracePeriodSeconds = before.DeletionGracePeriodSeconds
		keepSecurityLevel(p, before)
		if p.Status.QOSClass == "" {
			p.Status.QOSClass = before.Status.QOSClass
		}
	}
	return status
}

func validateStatusUpdate(_ context.Context, p, before *corev1.Pod) field.ErrorList {
	errs := store.ValidateMetaUpdate(&p.ObjectMeta, &before.ObjectMeta)
	errs = append(errs, registration.ValidateUpdate(p, before)...)
	return append(errs, validateStatus(&p.Status, &before.Status, field.NewPath("status"))...)
}

// qosClass returns the class that follows from the Pod's requests and limits of CPU and memory.
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

// rejectEphemeral rejects ephemeral containers (kubectl debug).
func rejectEphemeral(context.Context, *corev1.Pod, *corev1.Pod) field.ErrorList {
	return field.ErrorList{field.Forbidden(field.NewPath("spec", "ephemeralContainers"),
		"containers cannot be added to a Pod that runs: its processes see the programs of the node, use kubectl exec or another Pod")}
}
