// Package admission stores the kinds of admissionregistration.k8s.io: webhooks, and
// policies of CEL expressions with their bindings. The API server enforces them.
package admission

import (
	"context"
	"fmt"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// apiVersion is that of all kinds here.
const apiVersion = "admissionregistration.k8s.io/v1"

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
		New:     func() runtime.Object { return &validating{} },
		NewList: func() runtime.Object { return &admissionv1.ValidatingWebhookConfigurationList{} },
		Strategy: strategy[*validating]{
			Base: store.ClusterScoped(), spec: func(c *validating) any { return c.Webhooks },
			validate: func(_ context.Context, c, old *validating) field.ErrorList {
				return validateWebhooks(&c.ObjectMeta, validatingHooks(c), validatingHooks(old), old != nil)
			},
		},
		Table: store.NewTable([]store.Column{column, store.AgeColumn()}, func(c *validating) []any {
			return []any{int64(len(c.Webhooks)), store.Age(c.CreationTimestamp)}
		}),
	})
	if err != nil {
		return err
	}
	return add(out, opts, store.Kind{
		Resource: admissionv1.Resource("mutatingwebhookconfigurations"), Singular: "mutatingwebhookconfiguration",
		New:     func() runtime.Object { return &mutating{} },
		NewList: func() runtime.Object { return &admissionv1.MutatingWebhookConfigurationList{} },
		Strategy: strategy[*mutating]{
			Base: store.ClusterScoped(), spec: func(c *mutating) any { return c.Webhooks },
			validate: func(_ context.Context, c, old *mutating) field.ErrorList {
				return validateWebhooks(&c.ObjectMeta, mutatingHooks(c), mutatingHooks(old), old != nil)
			},
		},
		Table: store.NewTable([]store.Column{column, store.AgeColumn()}, func(c *mutating) []any {
			return []any{int64(len(c.Webhooks)), store.Age(c.CreationTimestamp)}
		}),
	})
}

func addValidating(out map[string]rest.Storage, opts generic.RESTOptionsGetter, a Authority) error {
	type policy = admissionv1.ValidatingAdmissionPolicy
	type binding = admissionv1.ValidatingAdmissionPolicyBinding
	kind := func(p *policy) *admissionv1.ParamKind { return p.Spec.ParamKind }
	s := policyStrategy{strategy[*policy]{
		Base: store.ClusterScoped(), spec: func(p *policy) any { return p.Spec }, validate: validatePolicy(a, kind, validateValidatingPolicy),
	}}
	policies, err := newKind(opts, store.Kind{
		Resource: admissionv1.Resource("validatingadmissionpolicies"), Singular: "validatingadmissionpolicy",
		New:      func() runtime.Object { return &policy{} },
		NewList:  func() runtime.Object { return &admissionv1.ValidatingAdmissionPolicyList{} },
		Strategy: s,
		Table: policyTable(store.Column{Name: "Validations", Type: "integer",
			Description: "Validations indicates the number of validation rules defined in this configuration"},
			kind, func(p *policy) int { return len(p.Spec.Validations) }),
	})
	if err != nil {
		return err
	}
	out["validatingadmissionpolicies"] = policies
	out["validatingadmissionpolicies/status"] = store.NewSub(policies, policyStatusStrategy{s})
	target := func(b *binding) (string, *admissionv1.ParamRef) { return b.Spec.PolicyName, b.Spec.ParamRef }
	return add(out, opts, store.Kind{
		Resource: admissionv1.Resource("validatingadmissionpolicybindings"), Singular: "validatingadmissionpolicybinding",
		New:     func() runtime.Object { return &binding{} },
		NewList: func() runtime.Object { return &admissionv1.ValidatingAdmissionPolicyBindingList{} },
		Strategy: strategy[*binding]{
			Base: store.ClusterScoped(), spec: func(b *binding) any { return b.Spec },
			validate: validateBinding(a, target, validateValidatingBinding, kindOf(policies, kind)),
		},
		Table: bindingTable(target),
	})
}

func addMutating(out map[string]rest.Storage, opts generic.RESTOptionsGetter, a Authority) error {
	type policy = admissionv1.MutatingAdmissionPolicy
	type binding = admissionv1.MutatingAdmissionPolicyBinding
	kind := func(p *policy) *admissionv1.ParamKind { return p.Spec.ParamKind }
	policies, err := newKind(opts, store.Kind{
		Resource: admissionv1.Resource("mutatingadmissionpolicies"), Singular: "mutatingadmissionpolicy",
		New:     func() runtime.Object { return &policy{} },
		NewList: func() runtime.Object { return &admissionv1.MutatingAdmissionPolicyList{} },
		Strategy: strategy[*policy]{
			Base: store.ClusterScoped(), spec: func(p *policy) any { return p.Spec }, validate: validatePolicy(a, kind, validateMutatingPolicy),
		},
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
		New:     func() runtime.Object { return &binding{} },
		NewList: func() runtime.Object { return &admissionv1.MutatingAdmissionPolicyBindingList{} },
		Strategy: strategy[*binding]{
			Base: store.ClusterScoped(), spec: func(b *binding) any { return b.Spec },
			validate: validateBinding(a, target, validateMutatingBinding, kindOf(policies, kind)),
		},
		Table: bindingTable(target),
	})
}

// validatePolicy returns the validation of a kind of policies: what validate finds, and
// whether the author may let it read the kind of its parameters.
func validatePolicy[T object](
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
func validateBinding[T object](
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
func kindOf[T object](
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

func policyTable[T object](number store.Column, kind func(T) *admissionv1.ParamKind, count func(T) int) rest.TableConvertor {
	return store.NewTable([]store.Column{number,
		{Name: "ParamKind", Description: "ParamKind specifies the kind of resources used to parameterize this policy"},
		store.AgeColumn(),
	}, func(p T) []any { return []any{int64(count(p)), kindText(kind(p)), store.Age(p.GetCreationTimestamp())} })
}

func bindingTable[T object](target func(T) (string, *admissionv1.ParamRef)) rest.TableConvertor {
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

// object is a pointer to one of the kinds.
type object interface {
	comparable
	runtime.Object
	metav1.Object
}

// strategy is what the kinds share: spec is what counts as a new generation, validate
// checks an object as a replacement of old, nil on create.
type strategy[T object] struct {
	store.Base
	spec     func(T) any
	validate func(ctx context.Context, obj, old T) field.ErrorList
}

// AllowUnconditionalUpdate is false: whoever replaces a rule of admission has seen it.
func (strategy[T]) AllowUnconditionalUpdate(context.Context) bool { return false }

// PrepareForCreate begins to count generations.
func (strategy[T]) PrepareForCreate(_ context.Context, obj runtime.Object) { obj.(T).SetGeneration(1) }

// PrepareForUpdate counts generations.
func (s strategy[T]) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	if now, before := obj.(T), old.(T); !equality.Semantic.DeepEqual(s.spec(now), s.spec(before)) {
		now.SetGeneration(before.GetGeneration() + 1)
	}
}

func (s strategy[T]) Validate(ctx context.Context, obj runtime.Object) field.ErrorList {
	var none T
	return store.Limit(s.validate(ctx, obj.(T), none))
}

func (s strategy[T]) ValidateUpdate(ctx context.Context, obj, old runtime.Object) field.ErrorList {
	return store.Limit(s.validate(ctx, obj.(T), old.(T)))
}

func (strategy[T]) WarningsOnCreate(_ context.Context, obj runtime.Object) []string {
	return warnName(obj.(T).GetName())
}

func (strategy[T]) WarningsOnUpdate(_ context.Context, obj, _ runtime.Object) []string {
	return warnName(obj.(T).GetName())
}

// policyStrategy keeps the status of ValidatingAdmissionPolicies.
type policyStrategy struct {
	strategy[*admissionv1.ValidatingAdmissionPolicy]
}

func (policyStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"status"})
}

func (s policyStrategy) PrepareForCreate(ctx context.Context, obj runtime.Object) {
	obj.(*admissionv1.ValidatingAdmissionPolicy).Status = admissionv1.ValidatingAdmissionPolicyStatus{}
	s.strategy.PrepareForCreate(ctx, obj)
}

func (s policyStrategy) PrepareForUpdate(ctx context.Context, obj, old runtime.Object) {
	obj.(*admissionv1.ValidatingAdmissionPolicy).Status = old.(*admissionv1.ValidatingAdmissionPolicy).Status
	s.strategy.PrepareForUpdate(ctx, obj, old)
}

// policyStatusStrategy lets the status through.
type policyStatusStrategy struct{ policyStrategy }

func (policyStatusStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"metadata"}, []string{"spec"})
}

func (policyStatusStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	p, before := obj.(*admissionv1.ValidatingAdmissionPolicy), old.(*admissionv1.ValidatingAdmissionPolicy)
	p.Spec = before.Spec
	metav1.ResetObjectMetaForStatus(&p.ObjectMeta, &before.ObjectMeta)
}

func (policyStatusStrategy) ValidateUpdate(_ context.Context, obj, _ runtime.Object) field.ErrorList {
	return store.Limit(validatePolicyStatus(&obj.(*admissionv1.ValidatingAdmissionPolicy).Status, field.NewPath("status")))
}

// WarningsOnUpdate warns of nothing: a status has no name.
func (policyStatusStrategy) WarningsOnUpdate(context.Context, runtime.Object, runtime.Object) []string {
	return nil
}

// staticSuffix ends the names that Kubernetes reserves for configurations from files.
const staticSuffix = ".static.k8s.io"

func warnName(name string) []string {
	if !strings.HasSuffix(name, staticSuffix) {
		return nil
	}
	return []string{fmt.Sprintf("metadata.name: names ending with %q are reserved for static manifest-based configurations "+
		"and cannot be managed via the API", staticSuffix)}
}
