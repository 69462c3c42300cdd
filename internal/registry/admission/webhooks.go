package admission

import (
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/utils/ptr"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// hook is what validating and mutating webhooks have in common; reinvocation is nil
// for validating ones.
type hook struct {
	name         string
	client       admissionv1.WebhookClientConfig
	rules        []admissionv1.RuleWithOperations
	failure      *admissionv1.FailurePolicyType
	match        *admissionv1.MatchPolicyType
	namespaces   *metav1.LabelSelector
	objects      *metav1.LabelSelector
	sideEffects  *admissionv1.SideEffectClass
	timeout      *int32
	versions     []string
	conditions   []admissionv1.MatchCondition
	reinvocation *admissionv1.ReinvocationPolicyType
}

func validatingHooks(c *admissionv1.ValidatingWebhookConfiguration) (out []hook) {
	if c == nil {
		return nil
	}
	for _, h := range c.Webhooks {
		out = append(out, hook{h.Name, h.ClientConfig, h.Rules, h.FailurePolicy, h.MatchPolicy, h.NamespaceSelector, h.ObjectSelector,
			h.SideEffects, h.TimeoutSeconds, h.AdmissionReviewVersions, h.MatchConditions, nil})
	}
	return out
}

func mutatingHooks(c *admissionv1.MutatingWebhookConfiguration) (out []hook) {
	if c == nil {
		return nil
	}
	for _, h := range c.Webhooks {
		out = append(out, hook{h.Name, h.ClientConfig, h.Rules, h.FailurePolicy, h.MatchPolicy, h.NamespaceSelector, h.ObjectSelector,
			h.SideEffects, h.TimeoutSeconds, h.AdmissionReviewVersions, h.MatchConditions, h.ReinvocationPolicy})
	}
	return out
}

// leniency is what a configuration may do wrong because the one that it replaces does,
// by a rule that is younger than it.
type leniency struct {
	sideEffects, versions, names, labels, conditions bool
	stored                                           map[string]bool
}

func leniencyOf(hooks, old []hook) leniency {
	l := leniency{stored: map[string]bool{}, conditions: len(hooks) == len(old)}
	var strict metavalidation.LabelSelectorValidationOptions
	names := map[string]bool{}
	for i, h := range old {
		l.sideEffects = l.sideEffects || h.sideEffects == nil || !slices.Contains(sideEffects(), *h.sideEffects)
		l.versions = l.versions || len(h.versions) > 0 && !slices.ContainsFunc(h.versions, isReviewVersion)
		l.names = l.names || names[h.name]
		names[h.name] = true
		for _, s := range []*metav1.LabelSelector{h.namespaces, h.objects} {
			l.labels = l.labels || s != nil && len(metavalidation.ValidateLabelSelector(s, strict, nil)) > 0
		}
		for _, c := range h.conditions {
			l.stored[c.Expression] = true
		}
		l.conditions = l.conditions && equality.Semantic.DeepEqual(hooks[i].conditions, h.conditions)
	}
	return l
}

// validateWebhooks checks a configuration; update is set if it replaces one with the
// webhooks old.
func validateWebhooks(m *metav1.ObjectMeta, hooks, old []hook, update bool) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(m, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	var may leniency
	if update {
		may = leniencyOf(hooks, old)
	}
	seen := map[string]bool{}
	for i := range hooks {
		h, path := &hooks[i], field.NewPath("webhooks").Index(i)
		errs = append(errs, h.validate(may, path)...)
		errs = append(errs, validateVersions(h.versions, may.versions, path.Child("admissionReviewVersions"))...)
		if !may.names && seen[h.name] && h.name != "" {
			errs = append(errs, field.Duplicate(path.Child("name"), h.name))
		}
		seen[h.name] = true
	}
	return errs
}

// sideEffects are the side effects that new webhooks may have.
func sideEffects() []admissionv1.SideEffectClass {
	return []admissionv1.SideEffectClass{admissionv1.SideEffectClassNone, admissionv1.SideEffectClassNoneOnDryRun}
}

const minTimeout, maxTimeout = 1, 30 // seconds

func (h *hook) validate(may leniency, path *field.Path) field.ErrorList {
	errs := validation.IsFullyQualifiedName(path.Child("name"), h.name)
	for i := range h.rules {
		errs = append(errs, validateRule(&h.rules[i], path.Child("rules").Index(i))...)
	}
	errs = append(errs, validateEnum(h.failure, failurePolicies(), path.Child("failurePolicy"))...)
	errs = append(errs, validateEnum(h.match, matchPolicies(), path.Child("matchPolicy"))...)
	errs = append(errs, validateSideEffects(h.sideEffects, may.sideEffects, path.Child("sideEffects"))...)
	if t := h.timeout; t != nil && (*t < minTimeout || *t > maxTimeout) {
		errs = append(errs, field.Invalid(path.Child("timeoutSeconds"), *t, "the timeout value must be between 1 and 30 seconds"))
	}
	labels := metavalidation.LabelSelectorValidationOptions{AllowInvalidLabelValueInSelector: may.labels}
	if h.namespaces != nil {
		errs = append(errs, metavalidation.ValidateLabelSelector(h.namespaces, labels, path.Child("namespaceSelector"))...)
	}
	if h.objects != nil {
		errs = append(errs, metavalidation.ValidateLabelSelector(h.objects, labels, path.Child("objectSelector"))...)
	}
	errs = append(errs, validateEnum(h.reinvocation, reinvocations(), path.Child("reinvocationPolicy"))...)
	errs = append(errs, validateClient(&h.client, path.Child("clientConfig"))...)
	if !may.conditions {
		e := expressions{stored: may.stored}
		errs = append(errs, e.validateConditions(h.conditions, path.Child("matchConditions"))...)
	}
	return errs
}

func validateSideEffects(s *admissionv1.SideEffectClass, anyClass bool, path *field.Path) field.ErrorList {
	allowed := sideEffects()
	if anyClass {
		allowed = append(allowed, admissionv1.SideEffectClassSome, admissionv1.SideEffectClassUnknown)
	}
	if s == nil {
		var names []string
		for _, a := range allowed {
			names = append(names, string(a))
		}
		return field.ErrorList{field.Required(path, "must specify one of "+strings.Join(names, ", "))}
	}
	return validateEnum(s, allowed, path)
}

func validateClient(c *admissionv1.WebhookClientConfig, path *field.Path) field.ErrorList {
	if (c.URL == nil) == (c.Service == nil) {
		return field.ErrorList{field.Required(path, "exactly one of url or service is required")}
	}
	if c.URL != nil {
		return webhook.ValidateWebhookURL(path.Child("url"), *c.URL, true)
	}
	s := c.Service
	return webhook.ValidateWebhookService(path.Child("service"), s.Namespace, s.Name, s.Path, ptr.Deref(s.Port, defaultPort))
}

// reviewVersions are the versions of AdmissionReview that the server speaks.
const reviewVersions = "v1, v1beta1"

func isReviewVersion(v string) bool { return v == "v1" || v == "v1beta1" }

func validateVersions(list []string, anyVersion bool, path *field.Path) (errs field.ErrorList) {
	if len(list) == 0 {
		return field.ErrorList{field.Required(path, "must specify one of "+reviewVersions)}
	}
	seen := map[string]bool{}
	for i, v := range list {
		if seen[v] {
			errs = append(errs, field.Invalid(path.Index(i), v, "duplicate version"))
			continue
		}
		seen[v] = true
		errs = append(errs, store.Invalids(path.Index(i), v, validation.IsDNS1035Label(v))...)
	}
	if !anyVersion && !slices.ContainsFunc(list, isReviewVersion) {
		errs = append(errs, field.Invalid(path, list, "must include at least one of "+reviewVersions))
	}
	return errs
}
