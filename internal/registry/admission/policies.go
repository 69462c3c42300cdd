package admission

import (
	"fmt"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	plugincel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/mutating/patch"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/client-go/util/jsonpath"

	"github.com/fairlead/fairlead/internal/registry/store"
)

const (
	maxAuditAnnotations = 20
	// maxAuditExpression bounds the expression of an audit annotation, in bytes: its
	// value may have 10 KiB.
	maxAuditExpression = 5 << 10
)

func validateValidatingPolicy(p, old *admissionv1.ValidatingAdmissionPolicy) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&p.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	s, path := &p.Spec, field.NewPath("spec")
	e := &expressions{params: s.ParamKind != nil}
	common := policySpec{s.FailurePolicy, s.ParamKind, s.MatchConstraints, s.MatchConditions}
	same := false
	if old != nil {
		e.stored = storedExpressions(&old.Spec)
		same = sameKind(s.ParamKind, old.Spec.ParamKind) && equality.Semantic.DeepEqual(s.MatchConditions, old.Spec.MatchConditions)
	}
	errs = append(errs, common.validate(e, same, false, path)...)
	errs = append(errs, e.validateVariables(s.Variables, path.Child("variables"))...)
	if len(s.Validations) == 0 && len(s.AuditAnnotations) == 0 {
		const one = "validations or auditAnnotations must contain at least one item"
		return append(errs, field.Required(path.Child("validations"), one), field.Required(path.Child("auditAnnotations"), one))
	}
	for i := range s.Validations {
		errs = append(errs, e.validateValidation(&s.Validations[i], path.Child("validations").Index(i))...)
	}
	at := path.Child("auditAnnotations")
	if len(s.AuditAnnotations) > maxAuditAnnotations {
		errs = append(errs, field.Invalid(at, s.AuditAnnotations,
			fmt.Sprintf("must not have more than %d auditAnnotations", maxAuditAnnotations)))
	}
	seen := map[string]bool{}
	for i := range s.AuditAnnotations {
		a := &s.AuditAnnotations[i]
		errs = append(errs, e.validateAudit(p.Name, a, at.Index(i))...)
		if seen[a.Key] {
			errs = append(errs, field.Duplicate(at.Index(i).Child("key"), a.Key))
		}
		seen[a.Key] = true
	}
	return errs
}

// storedExpressions returns all expressions of s.
func storedExpressions(s *admissionv1.ValidatingAdmissionPolicySpec) map[string]bool {
	out := map[string]bool{}
	for _, c := range s.MatchConditions {
		out[c.Expression] = true
	}
	for _, v := range s.Variables {
		out[v.Expression] = true
	}
	for _, v := range s.Validations {
		out[v.Expression], out[v.MessageExpression] = true, true
	}
	for _, a := range s.AuditAnnotations {
		out[a.ValueExpression] = true
	}
	return out
}

// policySpec is what both kinds of policies begin with.
type policySpec struct {
	failure    *admissionv1.FailurePolicyType
	params     *admissionv1.ParamKind
	match      *admissionv1.MatchResources
	conditions []admissionv1.MatchCondition
}

// validate checks all but the conditions if those stay the same; mutating policies
// cannot match every operation.
func (s policySpec) validate(e *expressions, same, mutating bool, path *field.Path) field.ErrorList {
	errs := requireEnum(s.failure, failurePolicies(), path.Child("failurePolicy"))
	errs = append(errs, validateParamKind(s.params, path.Child("paramKind"))...)
	at := path.Child("matchConstraints")
	if s.match == nil {
		errs = append(errs, field.Required(at, ""))
	} else {
		errs = append(errs, validateMatch(s.match, at)...)
		if len(s.match.ResourceRules) == 0 {
			errs = append(errs, field.Required(at.Child("resourceRules"), ""))
		}
		if mutating {
			errs = append(errs, validateMutable(s.match, at)...)
		}
	}
	if same {
		return errs
	}
	return append(errs, e.validateConditions(s.conditions, path.Child("matchConditions"))...)
}

func (e *expressions) validateValidation(v *admissionv1.Validation, path *field.Path) (errs field.ErrorList) {
	const blank = "must be non-empty if specified"
	if strings.TrimSpace(v.Expression) == "" {
		errs = append(errs, field.Required(path.Child("expression"), "expression is not specified"))
	} else {
		x := &validating.ValidationCondition{Expression: v.Expression}
		errs = append(errs, e.check(x, v.Expression, e.options(), path.Child("expression"))...)
	}
	at := path.Child("messageExpression")
	if m := v.MessageExpression; strings.TrimSpace(m) != "" {
		options := plugincel.OptionalVariableDeclarations{HasParams: e.params}
		errs = append(errs, e.check(&validating.MessageExpressionCondition{MessageExpression: m}, m, options, at)...)
	} else if m != "" {
		errs = append(errs, field.Invalid(at, m, blank))
	}
	at = path.Child("message")
	if m := strings.TrimSpace(v.Message); m == "" && v.Message != "" {
		errs = append(errs, field.Invalid(at, v.Message, blank))
	} else if strings.ContainsAny(m, "\n\r") {
		errs = append(errs, field.Invalid(at, v.Message, "must not contain line breaks"))
	}
	return append(errs, validateEnum(v.Reason, []metav1.StatusReason{
		metav1.StatusReasonForbidden, metav1.StatusReasonInvalid, metav1.StatusReasonRequestEntityTooLarge,
	}, path.Child("reason"))...)
}

func (e *expressions) validateAudit(policy string, a *admissionv1.AuditAnnotation, path *field.Path) (errs field.ErrorList) {
	if policy == "" {
		errs = append(errs, field.Invalid(path.Child("key"), a.Key, "requires metadata.name be non-empty"))
	} else {
		name := policy + "/" + a.Key
		errs = append(errs, store.Invalids(path.Child("key"), name, validation.IsQualifiedName(name))...)
	}
	at := path.Child("valueExpression")
	switch text := strings.TrimSpace(a.ValueExpression); {
	case text == "":
		return append(errs, field.Required(at, "valueExpression is not specified"))
	case len(text) > maxAuditExpression:
		return append(errs, field.Required(at, fmt.Sprintf("must not exceed %d bytes in length", maxAuditExpression)))
	default:
		return append(errs, e.check(&validating.AuditAnnotationCondition{ValueExpression: text}, a.ValueExpression, e.options(), at)...)
	}
}

func validatePolicyStatus(s *admissionv1.ValidatingAdmissionPolicyStatus, path *field.Path) (errs field.ErrorList) {
	if s.TypeChecking != nil {
		for i, w := range s.TypeChecking.ExpressionWarnings {
			at := path.Child("typeChecking", "expressionWarnings").Index(i)
			if w.Warning == "" {
				errs = append(errs, field.Required(at.Child("warning"), ""))
			}
			ref := strings.TrimSpace(w.FieldRef)
			if ref == "" {
				errs = append(errs, field.Required(at.Child("fieldRef"), ""))
			} else if err := jsonpath.New("spec").Parse("{" + ref + "}"); err != nil {
				errs = append(errs, field.Invalid(at.Child("fieldRef"), ref, fmt.Sprintf("invalid JSONPath: %v", err)))
			}
		}
	}
	return append(errs, metavalidation.ValidateConditions(s.Conditions, path.Child("conditions"))...)
}

func validatePolicyName(name string, path *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(path, "")}
	}
	return store.Invalids(path, name, apivalidation.NameIsDNSSubdomain(name, false))
}

func validateValidatingBinding(b *admissionv1.ValidatingAdmissionPolicyBinding) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&b.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	s, path := &b.Spec, field.NewPath("spec")
	errs = append(errs, validatePolicyName(s.PolicyName, path.Child("policyName"))...)
	errs = append(errs, validateParams(s.ParamRef, path.Child("paramRef"))...)
	errs = append(errs, validateMatch(s.MatchResources, path.Child("matchResources"))...)
	return append(errs, validateActions(s.ValidationActions, path.Child("validationActions"))...)
}

func validateActions(list []admissionv1.ValidationAction, path *field.Path) (errs field.ErrorList) {
	allowed := []admissionv1.ValidationAction{admissionv1.Audit, admissionv1.Deny, admissionv1.Warn}
	for i := range list {
		errs = append(errs, validateEnum(&list[i], allowed, path.Index(i))...)
		if slices.Contains(list[:i], list[i]) {
			errs = append(errs, field.Duplicate(path.Index(i), list[i]))
		}
	}
	if slices.Contains(list, admissionv1.Deny) && slices.Contains(list, admissionv1.Warn) {
		errs = append(errs, field.Invalid(path, list, "must not contain both Deny and Warn "+
			"(repeating the same validation failure information in the API response and headers serves no purpose)"))
	}
	if len(list) == 0 {
		errs = append(errs, field.Required(path, ""))
	}
	return errs
}

func validateMutatingPolicy(p, old *admissionv1.MutatingAdmissionPolicy) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&p.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	s, path := &p.Spec, field.NewPath("spec")
	e := &expressions{params: s.ParamKind != nil}
	common := policySpec{s.FailurePolicy, s.ParamKind, s.MatchConstraints, s.MatchConditions}
	same := false
	if old != nil {
		o := &old.Spec
		e.stored = storedExpressions(&admissionv1.ValidatingAdmissionPolicySpec{MatchConditions: o.MatchConditions, Variables: o.Variables})
		for _, m := range o.Mutations {
			if m.ApplyConfiguration != nil {
				e.stored[m.ApplyConfiguration.Expression] = true
			}
			if m.JSONPatch != nil {
				e.stored[m.JSONPatch.Expression] = true
			}
		}
		same = sameKind(s.ParamKind, o.ParamKind) && equality.Semantic.DeepEqual(s.MatchConditions, o.MatchConditions)
	}
	errs = append(errs, common.validate(e, same, true, path)...)
	errs = append(errs, e.validateVariables(s.Variables, path.Child("variables"))...)
	at := path.Child("mutations")
	if len(s.Mutations) == 0 {
		errs = append(errs, field.Required(at, "mutations must contain at least one item"))
	} else if _, err := e.compose(); err != nil {
		errs = append(errs, field.InternalError(at, err))
	} else {
		for i := range s.Mutations {
			errs = append(errs, e.validateMutation(&s.Mutations[i], at.Index(i))...)
		}
	}
	if s.ReinvocationPolicy == "" {
		return append(errs, field.Required(path.Child("reinvocationPolicy"), ""))
	}
	return append(errs, validateEnum(&s.ReinvocationPolicy, reinvocations(), path.Child("reinvocationPolicy"))...)
}

func (e *expressions) validateMutation(m *admissionv1.Mutation, path *field.Path) (errs field.ErrorList) {
	apply, json := path.Child("applyConfiguration"), path.Child("jsonPatch")
	switch m.PatchType {
	case "":
		return field.ErrorList{field.Required(path.Child("patchType"), "")}
	case admissionv1.PatchTypeJSONPatch:
		if m.JSONPatch == nil {
			errs = append(errs, field.Required(json, "must be specified when patchType is JSONPatch"))
		} else {
			text := strings.TrimSpace(m.JSONPatch.Expression)
			errs = append(errs, e.validatePatch(&patch.JSONPatchCondition{Expression: text}, m.JSONPatch.Expression, json.Child("expression"))...)
		}
		if m.ApplyConfiguration != nil {
			errs = append(errs, field.Invalid(apply, "{applyConfiguration}", "must not be specified when patchType is JSONPatch"))
		}
	case admissionv1.PatchTypeApplyConfiguration:
		if m.ApplyConfiguration == nil {
			errs = append(errs, field.Required(apply, "must be specified when patchType is ApplyConfiguration"))
		} else {
			text := strings.TrimSpace(m.ApplyConfiguration.Expression)
			errs = append(errs,
				e.validatePatch(&patch.ApplyConfigurationCondition{Expression: text}, m.ApplyConfiguration.Expression, apply.Child("expression"))...)
		}
		if m.JSONPatch != nil {
			errs = append(errs, field.Invalid(json, "{jsonPatch}", "must not be specified when patchType is ApplyConfiguration"))
		}
	default:
		return validateEnum(&m.PatchType, []admissionv1.PatchType{admissionv1.PatchTypeApplyConfiguration, admissionv1.PatchTypeJSONPatch},
			path.Child("patchType"))
	}
	return errs
}

func (e *expressions) validatePatch(x plugincel.ExpressionAccessor, text string, path *field.Path) field.ErrorList {
	if x.GetExpression() == "" {
		return field.ErrorList{field.Required(path, "")}
	}
	options := e.options()
	options.HasPatchTypes = true
	return e.check(x, text, options, path)
}

func validateMutatingBinding(b *admissionv1.MutatingAdmissionPolicyBinding) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&b.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	s, path := &b.Spec, field.NewPath("spec")
	errs = append(errs, validatePolicyName(s.PolicyName, path.Child("policyName"))...)
	errs = append(errs, validateParams(s.ParamRef, path.Child("paramRef"))...)
	errs = append(errs, validateMatch(s.MatchResources, path.Child("matchResources"))...)
	return append(errs, validateMutable(s.MatchResources, path.Child("matchResources"))...)
}
