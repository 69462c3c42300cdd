package review

import (
	"context"
	"errors"
	"fmt"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// decide asks whether u may do what one of the two attributes say.
func (a Answers) decide(ctx context.Context, u user.Info, r *authorizationv1.ResourceAttributes,
	n *authorizationv1.NonResourceAttributes) authorizationv1.SubjectAccessReviewStatus {
	record := authorizer.AttributesRecord{User: u}
	if r != nil {
		record.Verb, record.Namespace, record.Name = r.Verb, r.Namespace, r.Name
		record.APIGroup, record.APIVersion, record.Resource, record.Subresource = r.Group, r.Version, r.Resource, r.Subresource
		record.ResourceRequest = true
		if record.APIVersion == "" {
			record.APIVersion = "*"
		}
		record.FieldSelectorRequirements, record.FieldSelectorParsingErr = fieldSelector(r.FieldSelector)
		record.LabelSelectorRequirements, record.LabelSelectorParsingErr = labelSelector(r.LabelSelector)
	} else {
		record.Verb, record.Path = n.Verb, n.Path
	}
	d, reason, err := a.Authorizer.Authorize(ctx, record)
	var problems []string
	if err != nil {
		problems = append(problems, err.Error())
	}
	for _, s := range []struct {
		name string
		some bool
		err  error
	}{
		{"fieldSelector", len(record.FieldSelectorRequirements) > 0, record.FieldSelectorParsingErr},
		{"labelSelector", len(record.LabelSelectorRequirements) > 0, record.LabelSelectorParsingErr},
	} {
		if s.err != nil {
			partially := ""
			if s.some {
				partially = "partially "
			}
			problems = append(problems, fmt.Sprintf("spec.resourceAttributes.%s %signored due to parse error", s.name, partially))
		}
	}
	return authorizationv1.SubjectAccessReviewStatus{
		Allowed: d == authorizer.DecisionAllow, Denied: d == authorizer.DecisionDeny,
		Reason: reason, EvaluationError: strings.Join(problems, "; "),
	}
}

// fieldSelector keeps the requirements that can be understood: to leave one
// out asks for more, never for less.
func fieldSelector(s *authorizationv1.FieldSelectorAttributes) (fields.Requirements, error) {
	if s == nil {
		return nil, nil
	}
	if s.RawSelector != "" {
		parsed, err := fields.ParseSelector(s.RawSelector)
		if err != nil {
			return nil, err
		}
		return parsed.Requirements(), nil
	}
	var out fields.Requirements
	var errs []error
	for _, r := range s.Requirements {
		op := selection.Equals
		switch r.Operator {
		case metav1.FieldSelectorOpIn:
		case metav1.FieldSelectorOpNotIn:
			op = selection.NotEquals
		default:
			errs = append(errs, fmt.Errorf("operator %q is not supported", r.Operator))
			continue
		}
		if len(r.Values) != 1 {
			errs = append(errs, errors.New("a field selector has one value"))
			continue
		}
		out = append(out, fields.Requirement{Field: r.Key, Operator: op, Value: r.Values[0]})
	}
	return out, errors.Join(errs...)
}

// labelSelector is fieldSelector for labels.
func labelSelector(s *authorizationv1.LabelSelectorAttributes) (labels.Requirements, error) {
	if s == nil {
		return nil, nil
	}
	if s.RawSelector != "" {
		parsed, err := labels.Parse(s.RawSelector)
		if err != nil {
			return nil, err
		}
		out, _ := parsed.Requirements()
		return out, nil
	}
	operators := map[metav1.LabelSelectorOperator]selection.Operator{
		metav1.LabelSelectorOpIn: selection.In, metav1.LabelSelectorOpNotIn: selection.NotIn,
		metav1.LabelSelectorOpExists: selection.Exists, metav1.LabelSelectorOpDoesNotExist: selection.DoesNotExist,
	}
	var out labels.Requirements
	var errs []error
	for _, r := range s.Requirements {
		op, ok := operators[r.Operator]
		if !ok {
			errs = append(errs, fmt.Errorf("operator %q is not supported", r.Operator))
			continue
		}
		one, err := labels.NewRequirement(r.Key, op, r.Values)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, *one)
	}
	return out, errors.Join(errs...)
}

func subjectOf(s authorizationv1.SubjectAccessReviewSpec) user.Info {
	u := &user.DefaultInfo{Name: s.User, UID: s.UID, Groups: s.Groups}
	for k, v := range s.Extra {
		if u.Extra == nil {
			u.Extra = map[string][]string{}
		}
		u.Extra[k] = v
	}
	return u
}

func userInfo(u user.Info) authenticationv1.UserInfo {
	out := authenticationv1.UserInfo{Username: u.GetName(), UID: u.GetUID(), Groups: u.GetGroups()}
	for k, v := range u.GetExtra() {
		if out.Extra == nil {
			out.Extra = map[string]authenticationv1.ExtraValue{}
		}
		out.Extra[k] = v
	}
	return out
}

func validateSubject(s authorizationv1.SubjectAccessReviewSpec) field.ErrorList {
	errs := validateAttributes(s.ResourceAttributes, s.NonResourceAttributes)
	if s.User == "" && len(s.Groups) == 0 {
		errs = append(errs, field.Invalid(field.NewPath("spec", "user"), s.User, "at least one of user or group must be specified"))
	}
	return errs
}

func validateLocal(r *authorizationv1.LocalSubjectAccessReview) field.ErrorList {
	errs := append(validateSubject(r.Spec), validateEmptyMeta(r.ObjectMeta, " except for namespace")...)
	if a := r.Spec.ResourceAttributes; a != nil && a.Namespace != r.Namespace {
		errs = append(errs, field.Invalid(field.NewPath("spec.resourceAttributes.namespace"), a.Namespace, "must match metadata.namespace"))
	}
	if r.Spec.NonResourceAttributes != nil {
		errs = append(errs, field.Invalid(field.NewPath("spec.nonResourceAttributes"), r.Spec.NonResourceAttributes,
			"disallowed on this kind of request"))
	}
	return errs
}

func validateAttributes(r *authorizationv1.ResourceAttributes, n *authorizationv1.NonResourceAttributes) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	if r != nil && n != nil {
		errs = append(errs, field.Invalid(spec.Child("nonResourceAttributes"), n, "cannot be specified in combination with resourceAttributes"))
	}
	if r == nil && n == nil {
		errs = append(errs, field.Invalid(spec.Child("resourceAttributes"), n,
			"exactly one of nonResourceAttributes or resourceAttributes must be specified"))
	}
	if r == nil {
		return errs
	}
	if s, path := r.FieldSelector, spec.Child("resourceAttributes", "fieldSelector"); s != nil {
		errs = append(errs, validateSelector(s.RawSelector, len(s.Requirements), path)...)
		for i, q := range s.Requirements {
			errs = append(errs, metavalidation.ValidateFieldSelectorRequirement(q,
				metavalidation.FieldSelectorValidationOptions{AllowUnknownOperatorInRequirement: true}, path.Child("requirements").Index(i))...)
		}
	}
	if s, path := r.LabelSelector, spec.Child("resourceAttributes", "labelSelector"); s != nil {
		errs = append(errs, validateSelector(s.RawSelector, len(s.Requirements), path)...)
		for i, q := range s.Requirements {
			errs = append(errs, metavalidation.ValidateLabelSelectorRequirement(q,
				metavalidation.LabelSelectorValidationOptions{AllowUnknownOperatorInRequirement: true}, path.Child("requirements").Index(i))...)
		}
	}
	return errs
}

func validateSelector(raw string, requirements int, path *field.Path) (errs field.ErrorList) {
	if raw != "" && requirements > 0 {
		errs = append(errs, field.Invalid(path.Child("rawSelector"), raw, "may not specified at the same time as requirements"))
	}
	if raw == "" && requirements == 0 {
		errs = append(errs, field.Required(path.Child("requirements"),
			fmt.Sprintf("when %s is specified, requirements or rawSelector is required", path)))
	}
	return errs
}

// validateEmptyMeta: a review is no object with a name.
func validateEmptyMeta(m metav1.ObjectMeta, but string) field.ErrorList {
	shown := m
	m.ManagedFields = nil
	if but != "" {
		m.Namespace = ""
	}
	if equality.Semantic.DeepEqual(m, metav1.ObjectMeta{}) {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata"), shown, "must be empty"+but)}
}
