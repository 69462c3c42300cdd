// Package namespace stores Namespaces. Deleting one marks it Terminating; it
// leaves the store when its content is gone and its finalizers are removed.
package namespace

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// NewStorage returns the storages of Namespaces by resource path.
func NewStorage(opts generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	all, err := store.New(store.Kind{
		Resource:   corev1.Resource("namespaces"),
		Singular:   "namespace",
		ShortNames: []string{"ns"},
		New:        func() runtime.Object { return &corev1.Namespace{} },
		NewList:    func() runtime.Object { return &corev1.NamespaceList{} },
		Strategy:   strategy{store.ClusterScoped()},
		Attrs:      attrs,
		Table: store.NewTable([]store.Column{
			{Name: "Status", Description: "The status of the namespace"},
			store.AgeColumn(),
		}, func(ns *corev1.Namespace) []any {
			return []any{string(ns.Status.Phase), store.Age(ns.CreationTimestamp)}
		}),
	}, opts)
	if err != nil {
		return nil, err
	}
	all.ShouldDeleteDuringUpdate = goneAfterUpdate
	return map[string]rest.Storage{
		"namespaces":          newREST(all),
		"namespaces/status":   store.NewSub(all, statusStrategy{strategy{store.ClusterScoped()}}),
		"namespaces/finalize": finalizeREST{store.NewSub(all, finalizeStrategy{strategy{store.ClusterScoped()}})},
	}, nil
}

// AddToScheme adds what the kind needs beyond its types.
func AddToScheme(s *runtime.Scheme) error {
	s.AddTypeDefaultingFunc(&corev1.Namespace{}, func(obj any) { setDefaults(obj.(*corev1.Namespace)) })
	return store.AddFieldLabels(s, corev1.SchemeGroupVersion.WithKind("Namespace"), "status.phase", "name")
}

// setDefaults gives every namespace the label with its own name, so that
// selectors can name namespaces (Kubernetes 1.21).
func setDefaults(ns *corev1.Namespace) {
	if ns.Name == "" {
		return
	}
	if ns.Labels == nil {
		ns.Labels = map[string]string{}
	}
	ns.Labels[corev1.LabelMetadataName] = ns.Name
}

func attrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	ns := obj.(*corev1.Namespace)
	return ns.Labels, fields.Set{
		"metadata.name": ns.Name,
		"name":          ns.Name, // kept by Kubernetes for old clients
		"status.phase":  string(ns.Status.Phase),
	}, nil
}

type strategy struct{ store.Base }

func (strategy) PrepareForCreate(_ context.Context, obj runtime.Object) {
	ns := obj.(*corev1.Namespace)
	ns.Status = corev1.NamespaceStatus{Phase: corev1.NamespaceActive}
	for _, f := range ns.Spec.Finalizers {
		if f == corev1.FinalizerKubernetes {
			return
		}
	}
	ns.Spec.Finalizers = append(ns.Spec.Finalizers, corev1.FinalizerKubernetes)
}

func (strategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	ns, before := obj.(*corev1.Namespace), old.(*corev1.Namespace)
	ns.Spec.Finalizers = before.Spec.Finalizers
	ns.Status = before.Status
}

func (strategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	ns := obj.(*corev1.Namespace)
	errs := store.ValidateMeta(&ns.ObjectMeta, false, validation.ValidateNamespaceName)
	// Without an index, as Kubernetes has it.
	return append(errs, validateFinalizers(ns, func(path *field.Path, _ int) *field.Path { return path })...)
}

func (strategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	return store.ValidateMetaUpdate(&obj.(*corev1.Namespace).ObjectMeta, &old.(*corev1.Namespace).ObjectMeta)
}

func (strategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields("v1", []string{"status"})
}

func (strategy) Canonicalize(obj runtime.Object) { setDefaults(obj.(*corev1.Namespace)) }

// validateFinalizers checks spec.finalizers; at gives the path of the i-th.
func validateFinalizers(ns *corev1.Namespace, at func(list *field.Path, i int) *field.Path) (errs field.ErrorList) {
	for i, f := range ns.Spec.Finalizers {
		at := at(field.NewPath("spec", "finalizers"), i)
		errs = append(errs, store.Invalids(at, f, utilvalidation.IsQualifiedName(string(f)))...)
		if e := store.ValidateFinalizer(string(f), at); e != nil {
			errs = append(errs, e)
		}
	}
	return errs
}

// statusStrategy lets the status through and nothing else.
type statusStrategy struct{ strategy }

func (statusStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	obj.(*corev1.Namespace).Spec = old.(*corev1.Namespace).Spec
}

func (statusStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	ns := obj.(*corev1.Namespace)
	errs := store.ValidateMetaUpdate(&ns.ObjectMeta, &old.(*corev1.Namespace).ObjectMeta)
	// The capital letter in the path is Kubernetes'.
	path := field.NewPath("status", "Phase")
	switch deleted := !ns.DeletionTimestamp.IsZero(); {
	case deleted && ns.Status.Phase != corev1.NamespaceTerminating:
		errs = append(errs, field.Invalid(path, ns.Status.Phase, "may only be 'Terminating' if `deletionTimestamp` is not empty"))
	case !deleted && ns.Status.Phase != corev1.NamespaceActive:
		errs = append(errs, field.Invalid(path, ns.Status.Phase, "may only be 'Active' if `deletionTimestamp` is empty"))
	}
	return errs
}

func (statusStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields("v1", []string{"spec"})
}

// finalizeStrategy lets spec.finalizers through.
type finalizeStrategy struct{ strategy }

func (finalizeStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	obj.(*corev1.Namespace).Status = old.(*corev1.Namespace).Status
}

func (finalizeStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	ns := obj.(*corev1.Namespace)
	errs := store.ValidateMetaUpdate(&ns.ObjectMeta, &old.(*corev1.Namespace).ObjectMeta)
	return append(errs, validateFinalizers(ns, (*field.Path).Index)...)
}

func (finalizeStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields("v1", []string{"status"})
}
