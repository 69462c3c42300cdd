package rbac

import (
	"context"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// Authority decides for the storages whether a request grants more than its
// user has.
type Authority struct {
	Authorizer authorizer.Authorizer
	Rules      *Resolver
}

// NewStorage returns the storages of the four kinds by resource path.
func NewStorage(opts generic.RESTOptionsGetter, a Authority) (map[string]rest.Storage, error) {
	out := map[string]rest.Storage{}
	for _, k := range []struct {
		resource, singular string
		newObj, newList    func() runtime.Object
		strategy           store.Strategy
		table              rest.TableConvertor
		check              check
	}{
		{
			"roles", "role",
			store.Empty[rbacv1.Role], store.Empty[rbacv1.RoleList],
			rules(false, validateRole), roleTable[*rbacv1.Role](), a.checkRole,
		},
		{
			"clusterroles", "clusterrole",
			store.Empty[rbacv1.ClusterRole], store.Empty[rbacv1.ClusterRoleList],
			rules(true, validateClusterRole), roleTable[*rbacv1.ClusterRole](), a.checkClusterRole,
		},
		{
			"rolebindings", "rolebinding",
			store.Empty[rbacv1.RoleBinding], store.Empty[rbacv1.RoleBindingList],
			bindingRules[*rbacv1.RoleBinding](false), bindingTable[*rbacv1.RoleBinding](), a.checkBinding,
		},
		{
			"clusterrolebindings", "clusterrolebinding",
			store.Empty[rbacv1.ClusterRoleBinding], store.Empty[rbacv1.ClusterRoleBindingList],
			bindingRules[*rbacv1.ClusterRoleBinding](true), bindingTable[*rbacv1.ClusterRoleBinding](), a.checkBinding,
		},
	} {
		r, err := store.New(store.Kind{
			Resource: rbacv1.Resource(k.resource), Singular: k.singular, New: k.newObj, NewList: k.newList,
			Strategy: k.strategy, Table: k.table,
		}, opts)
		if err != nil {
			return nil, err
		}
		out[k.resource] = &guarded{r, k.check}
	}
	return out, nil
}

// AddToScheme adds what the kinds need beyond their types.
func AddToScheme(s *runtime.Scheme) error {
	s.AddTypeDefaultingFunc(&rbacv1.RoleBinding{}, func(obj any) {
		b := obj.(*rbacv1.RoleBinding)
		setDefaults(&b.RoleRef, b.Subjects)
	})
	s.AddTypeDefaultingFunc(&rbacv1.ClusterRoleBinding{}, func(obj any) {
		b := obj.(*rbacv1.ClusterRoleBinding)
		setDefaults(&b.RoleRef, b.Subjects)
	})
	for _, kind := range []string{"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"} {
		if err := store.AddFieldLabels(s, rbacv1.SchemeGroupVersion.WithKind(kind)); err != nil {
			return err
		}
	}
	return nil
}

// setDefaults fills in the group that users, groups and roles belong to.
func setDefaults(ref *rbacv1.RoleRef, subjects []rbacv1.Subject) {
	if ref.APIGroup == "" {
		ref.APIGroup = rbacv1.GroupName
	}
	for i := range subjects {
		if s := &subjects[i]; s.APIGroup == "" && (s.Kind == rbacv1.UserKind || s.Kind == rbacv1.GroupKind) {
			s.APIGroup = rbacv1.GroupName
		}
	}
}

// roleTable shows when a role was made, as a time: kubectl has no Age here.
func roleTable[T runtime.Object]() rest.TableConvertor {
	return store.NewTable([]store.Column{{Name: "Created At"}}, func(obj T) []any {
		return []any{created(obj)}
	})
}

func bindingTable[T runtime.Object]() rest.TableConvertor {
	return store.NewTable([]store.Column{
		{Name: "Role"}, {Name: "Age"},
		{Name: "Users", Wide: true}, {Name: "Groups", Wide: true}, {Name: "ServiceAccounts", Wide: true},
	}, func(obj T) []any {
		ref, subjects, age := bindingParts(obj)
		names := map[string][]string{}
		for _, s := range subjects {
			name := s.Name
			if s.Kind == rbacv1.ServiceAccountKind {
				name = s.Namespace + "/" + s.Name
			}
			names[s.Kind] = append(names[s.Kind], name)
		}
		list := func(kind string) string { return strings.Join(names[kind], ", ") }
		return []any{ref.Kind + "/" + ref.Name, age, list(rbacv1.UserKind), list(rbacv1.GroupKind), list(rbacv1.ServiceAccountKind)}
	})
}

func bindingParts(obj runtime.Object) (rbacv1.RoleRef, []rbacv1.Subject, string) {
	switch b := obj.(type) {
	case *rbacv1.RoleBinding:
		return b.RoleRef, b.Subjects, store.Age(b.CreationTimestamp)
	case *rbacv1.ClusterRoleBinding:
		return b.RoleRef, b.Subjects, store.Age(b.CreationTimestamp)
	}
	return rbacv1.RoleRef{}, nil, ""
}

func created(obj runtime.Object) string {
	const layout = "2006-01-02T15:04:05Z"
	switch r := obj.(type) {
	case *rbacv1.Role:
		return r.CreationTimestamp.UTC().Format(layout)
	case *rbacv1.ClusterRole:
		return r.CreationTimestamp.UTC().Format(layout)
	}
	return ""
}

// rules are what the four kinds share; validate checks a whole object. Roles and
// bindings may be created by a PUT, as in Kubernetes.
func rules[T store.Object](clusterScoped bool, validate func(T) field.ErrorList) store.Strategy {
	return store.Rules[T]{
		ClusterScoped: clusterScoped, CreateOnUpdate: true,
		Validate: func(_ context.Context, obj, old T) field.ErrorList {
			errs := validate(obj)
			if none := *new(T); old == none {
				return errs
			}
			return append(errs, store.ValidateMetaUpdate(store.MetaOf(obj), store.MetaOf(old))...)
		},
	}.Strategy()
}

func bindingRules[T store.Object](clusterScoped bool) store.Strategy {
	return store.Rules[T]{
		ClusterScoped: clusterScoped, CreateOnUpdate: true,
		Validate: func(_ context.Context, obj, old T) field.ErrorList {
			b := bindingOf(obj)
			errs := store.ValidateMeta(b.meta, !clusterScoped, validateName)
			errs = append(errs, validateBinding(b, !clusterScoped)...)
			if none := *new(T); old == none {
				return errs
			}
			before := bindingOf(old)
			errs = append(errs, store.ValidateMetaUpdate(b.meta, before.meta)...)
			return append(errs, validation.ValidateImmutableField(b.ref, before.ref, field.NewPath("roleRef"))...)
		},
	}.Strategy()
}
