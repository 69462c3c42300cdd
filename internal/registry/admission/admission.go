// Package admission stores the kinds of admissionregistration.k8s.io: webhooks, and
// policies of CEL expressions with their bindings. The API server enforces them.
package admission

import (
	"context"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission/plugin/manifest"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// NewStorage returns the storages by resource path. a decides who may let a policy
// read parameters.
func NewStorage(opts generic.RESTOptionsGetter, a Authority) (map[string]rest.Storage, error) {
	out := map[string]rest.Storage{}
	for _, add := range []func(map[string]rest.Storage, generic.RESTOptionsGetter, Authority) error{
		addWebhooks, addValidating, addMutating,
	} {
		if err := add(out, opts, a); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func addWebhooks(out map[string]rest.Storage, opts generic.RESTOptionsGetter, _ Authority) error {
	column := store.Column{Name: "Webhooks", Type: "integer",
		Description: "Webhooks indicates the number of webhooks registered in this configuration"}
	type validating = admissionv1.ValidatingWebhookConfiguration
	type mutating = admissionv1.MutatingWebhookConfiguration
	err := add(out, opts, store.Kind{
		Resource: admissionv1.Resource("validatingwebhookconfigurations"), Singular: "validatingwebhookconfiguration",
		New:     store.Empty[validating],
		NewList: store.Empty[admissionv1.ValidatingWebhookConfigurationList],
		Strategy: rules(func(c *validating) any { return c.Webhooks },
			func(_ context.Context, c, old *validating) field.ErrorList {
				return validateWebhooks(&c.ObjectMeta, validatingHooks(c), validatingHooks(old), old != nil)
			}).Strategy(),
		Table: store.NewTable([]store.Column{column, store.AgeColumn()}, func(c *validating) []any {
			return []any{int64(len(c.Webhooks)), store.Age(c.CreationTimestamp)}
		}),
	})
	if err != nil {
		return err
	}
	return add(out, opts, store.Kind{
		Resource: admissionv1.Resource("mutatingwebhookconfigurations"), Singular: "mutatingwebhookconfiguration",
		New:     store.Empty[mutating],
		NewList: store.Empty[admissionv1.MutatingWebhookConfigurationList],
		Strategy: rules(func(c *mutating) any { return c.Webhooks },
			func(_ context.Context, c, old *mutating) field.ErrorList {
				return validateWebhooks(&c.ObjectMeta, mutatingHooks(c), mutatingHooks(old), old != nil)
			}).Strategy(),
		Table: store.NewTable([]store.Column{column, store.AgeColumn()}, func(c *mutating) []any {
			return []any{int64(len(c.Webhooks)), store.Age(c.CreationTimestamp)}
		}),
	})
}

func addValidating(out map[string]rest.Storage, opts generic.RESTOptionsGetter, a Authority) error {
	type policy = admissionv1.ValidatingAdmissionPolicy
	type binding = admissionv1.ValidatingAdmissionPolicyBinding
	kind := func(p *policy) *admissionv1.ParamKind { return p.Spec.ParamKind }
	r := validatingPolicyRules(validatePolicy(a, kind, validateValidatingPolicy))
	policies, err := newKind(opts, store.Kind{
		Resource: admissionv1.Resource("validatingadmissionpolicies"), Singular: "validatingadmissionpolicy",
		New:      store.Empty[policy],
		NewList:  store.Empty[admissionv1.ValidatingAdmissionPolicyList],
		Strategy: r.Strategy(),
		Table: policyTable(store.Column{Name: "Validations", Type: "integer",
			Description: "Validations indicates the number of validation rules defined in this configuration"},
			kind, func(p *policy) int { return len(p.Spec.Validations) }),
	})
	if err != nil {
		return err
	}
	out["validatingadmissionpolicies"] = policies
	out["validatingadmissionpolicies/status"] = store.NewSub(policies, policyStatusRules(r).Strategy())
	target := func(b *binding) (string, *admissionv1.ParamRef) { return b.Spec.PolicyName, b.Spec.ParamRef }
	return add(out, opts, store.Kind{
		Resource: admissionv1.Resource("validatingadmissionpolicybindings"), Singular: "validatingadmissionpolicybinding",
		New:     store.Empty[binding],
		NewList: store.Empty[admissionv1.ValidatingAdmissionPolicyBindingList],
		Strategy: rules(func(b *binding) any { return &b.Spec },
			validateBinding(a, target, validateValidatingBinding, kindOf(policies, kind))).Strategy(),
		Table: bindingTable(target),
	})
}

func addMutating(out map[string]rest.Storage, opts generic.RESTOptionsGetter, a Authority) error {
	type policy = admissionv1.MutatingAdmissionPolicy
	type binding = admissionv1.MutatingAdmissionPolicyBinding
	kind := func(p *policy) *admissionv1.ParamKind { return p.Spec.ParamKind }
	policies, err := newKind(opts, store.Kind{
		Resource: admissionv1.Resource("mutatingadmissionpolicies"), Singular: "mutatingadmissionpolicy",
		New:      store.Empty[policy],
		NewList:  store.Empty[admissionv1.MutatingAdmissionPolicyList],
		Strategy: rules(func(p *policy) any { return &p.Spec }, validatePolicy(a, kind, validateMutatingPolicy)).Strategy(),
		Table: policyTable(store.Column{Name: "Mutations", Type: "integer",
			Description: "Mutation indicates the number of mutations rules defined in this configuration"},
			kind, func(p *policy) int { return len(p.Spec.Mutations) }),
	})
	if err != nil {
		return err
	}
	out["mutatingadmissionpolicies"] = policies
	target := func(b *binding) (string, *admissionv1.ParamRef) { return b.Spec.PolicyName, b.Spec.ParamRef }
	return add(out, opts, store.Kind{
		Resource: admissionv1.Resource("mutatingadmissionpolicybindings"), Singular: "mutatingadmissionpolicybinding",
		New:     store.Empty[binding],
		NewList: store.Empty[admissionv1.MutatingAdmissionPolicyBindingList],
		Strategy: rules(func(b *binding) any { return &b.Spec },
			validateBinding(a, target, validateMutatingBinding, kindOf(policies, kind))).Strategy(),
		Table: bindingTable(target),
	})
}

// validatePolicy returns the validation of a kind of policies: what validate finds, and
// whether the author may let it read the kind of its parameters.
func validatePolicy[T store.Object](
	a Authority, kind func(T) *admissionv1.ParamKind, validate func(p, old T) field.ErrorList,
) func(context.Context, T, T) field.ErrorList {
	return func(ctx context.Context, p, old T) field.ErrorList {
		errs := validate(p, old)
		if none := *new(T); len(errs) == 0 && (old == none || !sameKind(kind(p), kind(old))) {
			errs = a.mayReadKind(ctx, kind(p))
		}
		return errs
	}
}

// validateBinding returns the validation of a kind of bindings: what validate finds, and
// whether the author may let the policy read the parameters. target returns both names.
func validateBinding[T store.Object](
	a Authority, target func(T) (string, *admissionv1.ParamRef), validate func(T) field.ErrorList,
	kindOf func(context.Context, string) (*admissionv1.ParamKind, error),
) func(context.Context, T, T) field.ErrorList {
	return func(ctx context.Context, b, old T) field.ErrorList {
		if errs := validate(b); len(errs) > 0 {
			return errs
		}
		policy, params := target(b)
		if none := *new(T); old != none {
			if p, r := target(old); p == policy && sameParams(r, params) {
				return nil
			}
		}
		return a.mayReadParams(ctx, policy, params, kindOf)
	}
}

// kindOf returns how to find the kind of the parameters of a stored policy.
func kindOf[T store.Object](
	policies *store.REST, kind func(T) *admissionv1.ParamKind,
) func(context.Context, string) (*admissionv1.ParamKind, error) {
	return func(ctx context.Context, name string) (*admissionv1.ParamKind, error) {
		obj, err := policies.Get(ctx, name, &metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		return kind(obj.(T)), nil
	}
}

func newKind(opts generic.RESTOptionsGetter, k store.Kind) (*store.REST, error) {
	k.Categories = []string{"api-extensions"}
	return store.New(k, opts)
}

func add(out map[string]rest.Storage, opts generic.RESTOptionsGetter, k store.Kind) error {
	r, err := newKind(opts, k)
	if err != nil {
		return err
	}
	out[k.Resource.Resource] = r
	return nil
}

func policyTable[T store.Object](number store.Column, kind func(T) *admissionv1.ParamKind, count func(T) int) rest.TableConvertor {
	return store.NewTable([]store.Column{number,
		{Name: "ParamKind", Description: "ParamKind specifies the kind of resources used to parameterize this policy"},
		store.AgeColumn(),
	}, func(p T) []any { return []any{int64(count(p)), kindText(kind(p)), store.Age(p.GetCreationTimestamp())} })
}

func bindingTable[T store.Object](target func(T) (string, *admissionv1.ParamRef)) rest.TableConvertor {
	return store.NewTable([]store.Column{
		{Name: "PolicyName", Description: "PolicyName indicates the policy definition which the policy binding binded to"},
		{Name: "ParamRef", Description: "ParamRef indicates the param resource which sets the configuration param"},
		store.AgeColumn(),
	}, func(b T) []any {
		policy, params := target(b)
		return []any{policy, paramsText(params), store.Age(b.GetCreationTimestamp())}
	})
}

const unset = "<unset>"

func kindText(k *admissionv1.ParamKind) string {
	if k == nil {
		return unset
	}
	return k.APIVersion + "/" + k.Kind
}

func paramsText(r *admissionv1.ParamRef) string {
	switch {
	case r == nil:
		return unset
	case r.Name != "" && r.Namespace != "":
		return r.Namespace + "/" + r.Name
	case r.Name != "":
		return "*/" + r.Name
	case r.Selector != nil:
		return r.Selector.String()
	}
	return unset
}

// rules are what the kinds share: spec returns what counts as a new generation,
// validate checks an object as a replacement of old, nil on create. An update
// needs a resource version: its author has seen the rule that it replaces.
func rules[T store.Object](spec func(T) any, validate func(ctx context.Context, obj, old T) field.ErrorList) store.Rules[T] {
	return store.Rules[T]{
		ClusterScoped: true, VersionRequired: true, Generation: spec,
		Validate: func(ctx context.Context, obj, old T) field.ErrorList {
			errs := store.Limit(validate(ctx, obj, old))
			if none := *new(T); old == none && reserved(obj.GetName()) {
				errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), obj.GetName(), reservedName))
			}
			return errs
		},
		Warn: func(obj, _ T) []string {
			if !reserved(obj.GetName()) { // older servers have accepted such a name
				return nil
			}
			return []string{"metadata.name: " + reservedName}
		},
	}
}

type validatingPolicy = *admissionv1.ValidatingAdmissionPolicy

func validatingPolicyRules(
	validate func(ctx context.Context, p, old validatingPolicy) field.ErrorList,
) store.Rules[validatingPolicy] {
	r := rules(func(p validatingPolicy) any { return &p.Spec }, validate)
	r.APIVersion = admissionv1.SchemeGroupVersion.String()
	r.Kept = []store.Part[validatingPolicy]{
		store.Field("status", func(p validatingPolicy) *admissionv1.ValidatingAdmissionPolicyStatus { return &p.Status }),
	}
	return r
}

func policyStatusRules(r store.Rules[validatingPolicy]) store.Rules[validatingPolicy] {
	return r.Sub(
		func(_ context.Context, p, _ validatingPolicy) field.ErrorList {
			return store.Limit(validatePolicyStatus(&p.Status, field.NewPath("status")))
		},
		store.Part[validatingPolicy]{Path: "metadata", Restore: func(p, old validatingPolicy) {
			metav1.ResetObjectMetaForStatus(&p.ObjectMeta, &old.ObjectMeta)
		}},
		store.Field("spec", func(p validatingPolicy) *admissionv1.ValidatingAdmissionPolicySpec { return &p.Spec }))
}

// reservedName is the answer to a name that is reserved, in the words of kube-apiserver.
const reservedName = `names ending with "` + manifest.StaticConfigSuffix +
	`" are reserved for static manifest-based configurations and cannot be managed via the API`

// reserved reports whether Kubernetes reserves name for configurations that its server reads from files.
func reserved(name string) bool { return strings.HasSuffix(name, manifest.StaticConfigSuffix) }
