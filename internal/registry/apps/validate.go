package apps

import (
	"fmt"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	unversioned "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/registry/pod"
	"github.com/fairlead/fairlead/internal/registry/store"
)

// The rules and the messages come from pkg/apis/apps/validation of Kubernetes.

const isNegative = "must be greater than or equal to 0"

// templatePath is where the template of Pods stands.
var templatePath = field.NewPath("spec", "template") //nolint:gochecknoglobals // constant in all but name

func nameWarnings(name string) []string {
	if msgs := utilvalidation.IsDNS1123Label(name); len(msgs) > 0 {
		return []string{fmt.Sprintf("metadata.name: this is used in Pod names and hostnames, which can result in surprising behavior; "+
			"a DNS label is recommended: %v", msgs)}
	}
	return nil
}

func immutableSelector(now, before *metav1.LabelSelector) field.ErrorList {
	return validation.ValidateImmutableField(now, before, field.NewPath("spec", "selector"))
}

func nonnegative(n int64, at *field.Path) field.ErrorList {
	return validation.ValidateNonnegativeField(n, at)
}

// counter is a number of a status by its name.
type counter struct {
	name string
	n    int64
}

func nonnegatives(at *field.Path, list []counter) (errs field.ErrorList) {
	for _, c := range list {
		errs = append(errs, nonnegative(c.n, at.Child(c.name))...)
	}
	return errs
}

func atMost(at *field.Path, limit int32, list []counter) (errs field.ErrorList) {
	for _, c := range list {
		if c.n > int64(limit) {
			errs = append(errs, field.Invalid(at.Child(c.name), c.n, "cannot be greater than status.replicas"))
		}
	}
	return errs
}

func availableReady(at *field.Path, available, ready int32) field.ErrorList {
	if available > ready {
		return field.ErrorList{field.Invalid(at.Child("availableReplicas"), available, "cannot be greater than readyReplicas")}
	}
	return nil
}

func notDecremented(at *field.Path, now, before *int32) field.ErrorList {
	if before == nil || now != nil && *now >= *before {
		return nil
	}
	return field.ErrorList{field.Invalid(at.Child("collisionCount"), replicas(now), "cannot be decremented")}
}

func validateReplicaSet(s *appsv1.ReplicaSetSpec, at *field.Path) field.ErrorList {
	errs := nonnegative(replicas(s.Replicas), at.Child("replicas"))
	errs = append(errs, nonnegative(int64(s.MinReadySeconds), at.Child("minReadySeconds"))...)
	return append(errs, validateSelected(s.Selector, &s.Template, "deployment", at)...)
}

func validateDeployment(s *appsv1.DeploymentSpec, at *field.Path) field.ErrorList {
	errs := nonnegative(replicas(s.Replicas), at.Child("replicas"))
	errs = append(errs, validateSelected(s.Selector, &s.Template, "deployment", at)...)
	errs = append(errs, validateStrategy(&s.Strategy, at.Child("strategy"))...)
	errs = append(errs, nonnegative(int64(s.MinReadySeconds), at.Child("minReadySeconds"))...)
	errs = append(errs, nonnegative(replicas(s.RevisionHistoryLimit), at.Child("revisionHistoryLimit"))...)
	if d, p := s.ProgressDeadlineSeconds, at.Child("progressDeadlineSeconds"); d != nil {
		errs = append(errs, nonnegative(int64(*d), p)...)
		if *d <= s.MinReadySeconds {
			errs = append(errs, field.Invalid(p, *d, "must be greater than minReadySeconds"))
		}
	}
	return errs
}

// validateSelected checks a selector and a template that it must match.
func validateSelected(
	selector *metav1.LabelSelector, template *corev1.PodTemplateSpec, kind string, at *field.Path,
) (errs field.ErrorList) {
	path := at.Child("selector")
	if selector == nil {
		errs = append(errs, field.Required(path, ""))
	} else {
		errs = append(errs, unversioned.ValidateLabelSelector(selector, unversioned.LabelSelectorValidationOptions{}, path)...)
		if len(selector.MatchLabels)+len(selector.MatchExpressions) == 0 {
			errs = append(errs, field.Invalid(path, selector, "empty selector is invalid for "+kind))
		}
	}
	compiled, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return append(errs, field.Invalid(path, selector, "invalid label selector"))
	}
	path = at.Child("template")
	if !compiled.Matches(labels.Set(template.Labels)) {
		errs = append(errs, field.Invalid(path.Child("metadata", "labels"), template.Labels, "`selector` does not match template `labels`"))
	}
	return append(errs, validateTemplate(template, kind, path)...)
}

func validateTemplate(t *corev1.PodTemplateSpec, kind string, at *field.Path) field.ErrorList {
	errs := pod.ValidateTemplate(t, at)
	if t.Spec.RestartPolicy != corev1.RestartPolicyAlways {
		errs = append(errs, field.NotSupported(at.Child("spec", "restartPolicy"), t.Spec.RestartPolicy,
			[]corev1.RestartPolicy{corev1.RestartPolicyAlways}))
	}
	if t.Spec.ActiveDeadlineSeconds != nil {
		set := "ReplicaSet"
		if kind == "daemonset" {
			set = "DaemonSet"
		}
		errs = append(errs, field.Forbidden(at.Child("spec", "activeDeadlineSeconds"), "activeDeadlineSeconds in "+set+" is not Supported"))
	}
	return errs
}

func validateDaemonSet(s *appsv1.DaemonSetSpec, at *field.Path) field.ErrorList {
	errs := validateSelected(s.Selector, &s.Template, "daemonset", at)
	errs = append(errs, nonnegative(int64(s.MinReadySeconds), at.Child("minReadySeconds"))...)
	errs = append(errs, validateUpdateStrategy(&s.UpdateStrategy, at.Child("updateStrategy"))...)
	return append(errs, nonnegative(replicas(s.RevisionHistoryLimit), at.Child("revisionHistoryLimit"))...)
}

func validateStrategy(s *appsv1.DeploymentStrategy, at *field.Path) (errs field.ErrorList) {
	rolling := at.Child("rollingUpdate")
	switch s.Type {
	case appsv1.RecreateDeploymentStrategyType:
		if s.RollingUpdate != nil {
			errs = append(errs, field.Forbidden(rolling, "may not be specified when strategy `type` is 'Recreate'"))
		}
	case appsv1.RollingUpdateDeploymentStrategyType:
		if s.RollingUpdate == nil {
			return append(errs, field.Required(rolling, "this should be defaulted and never be nil"))
		}
		unavailable, surge := orZero(s.RollingUpdate.MaxUnavailable), orZero(s.RollingUpdate.MaxSurge)
		errs = append(errs, validateIntOrPercent(unavailable, rolling.Child("maxUnavailable"))...)
		errs = append(errs, validateIntOrPercent(surge, rolling.Child("maxSurge"))...)
		if shareOf(unavailable) == 0 && shareOf(surge) == 0 {
			errs = append(errs, field.Invalid(rolling.Child("maxUnavailable"), unavailable, "may not be 0 when `maxSurge` is 0"))
		}
		errs = append(errs, atMostAll(unavailable, rolling.Child("maxUnavailable"))...)
	default:
		errs = append(errs, field.NotSupported(at, s.Type, []appsv1.DeploymentStrategyType{
			appsv1.RecreateDeploymentStrategyType, appsv1.RollingUpdateDeploymentStrategyType,
		}))
	}
	return errs
}

func validateUpdateStrategy(s *appsv1.DaemonSetUpdateStrategy, at *field.Path) (errs field.ErrorList) {
	rolling := at.Child("rollingUpdate")
	switch s.Type {
	case appsv1.OnDeleteDaemonSetStrategyType:
	case appsv1.RollingUpdateDaemonSetStrategyType:
		if s.RollingUpdate == nil {
			return append(errs, field.Required(rolling, ""))
		}
		unavailable, surge := orZero(s.RollingUpdate.MaxUnavailable), orZero(s.RollingUpdate.MaxSurge)
		errs = append(errs, validateIntOrPercent(unavailable, rolling.Child("maxUnavailable"))...)
		errs = append(errs, validateIntOrPercent(surge, rolling.Child("maxSurge"))...)
		errs = append(errs, atMostAll(unavailable, rolling.Child("maxUnavailable"))...)
		errs = append(errs, atMostAll(surge, rolling.Child("maxSurge"))...)
		switch some, more := shareOf(unavailable) != 0, shareOf(surge) != 0; {
		case some && more:
			errs = append(errs, field.Invalid(rolling.Child("maxSurge"), surge, "may not be set when maxUnavailable is non-zero"))
		case !some && !more:
			errs = append(errs, field.Required(rolling.Child("maxUnavailable"), "cannot be 0 when maxSurge is 0"))
		}
	default:
		errs = append(errs, field.NotSupported(at, s.Type, []appsv1.DaemonSetUpdateStrategyType{
			appsv1.RollingUpdateDaemonSetStrategyType, appsv1.OnDeleteDaemonSetStrategyType,
		}))
	}
	return errs
}

func orZero(v *intstr.IntOrString) intstr.IntOrString {
	if v == nil {
		return intstr.IntOrString{}
	}
	return *v
}

// ValidateShare checks a number, or a percentage of at most 100.
func ValidateShare(v intstr.IntOrString, at *field.Path) field.ErrorList {
	return append(validateIntOrPercent(v, at), atMostAll(v, at)...)
}

// atMostAll rejects more than 100 percent.
func atMostAll(v intstr.IntOrString, at *field.Path) field.ErrorList {
	if v.Type == intstr.String && shareOf(v) > 100 {
		return field.ErrorList{field.Invalid(at, v, "must not be greater than 100%")}
	}
	return nil
}

func validateIntOrPercent(v intstr.IntOrString, at *field.Path) field.ErrorList {
	if v.Type == intstr.String {
		return store.Invalids(at, v, utilvalidation.IsValidPercent(v.StrVal))
	}
	return nonnegative(int64(v.IntVal), at)
}

// shareOf is the number of v, or that of its percentage; 0 if it is none.
func shareOf(v intstr.IntOrString) int {
	if v.Type == intstr.Int {
		return v.IntValue()
	}
	if len(utilvalidation.IsValidPercent(v.StrVal)) > 0 {
		return 0
	}
	n, _ := strconv.Atoi(v.StrVal[:len(v.StrVal)-1])
	return n
}
