// Package namespace stores Namespaces. Deleting one marks it Terminating; it
// leaves the store when its content is gone and its finalizers are removed.
package namespace

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// NewStorage returns the storages of Namespaces by resource path.
func NewStorage(opts generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	namespaces := rules()
	all, err := store.New(store.Kind{
		Resource:   corev1.Resource("namespaces"),
		Singular:   "namespace",
		ShortNames: []string{"ns"},
		New:        store.Empty[corev1.Namespace],
		NewList:    store.Empty[corev1.NamespaceList],
		Strategy:   namespaces.Strategy(),
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
	status := namespaces.Sub(validatePhase,
		store.Field("spec", func(ns *corev1.Namespace) *corev1.NamespaceSpec { return &ns.Spec }))
	finalize := namespaces.Sub(func(_ context.Context, ns, _ *corev1.Namespace) field.ErrorList {
		return validateFinalizers(ns, (*field.Path).Index)
	}, namespaces.Kept...)
	all.ShouldDeleteDuringUpdate = goneAfterUpdate
	return map[string]rest.Storage{
		"namespaces":          newREST(all),
		"namespaces/status":   store.NewSub(all, status.Strategy()),
		"namespaces/finalize": finalizeREST{store.NewSub(all, finalize.Strategy())},
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

func rules() store.Rules[*corev1.Namespace] {
	return store.Rules[*corev1.Namespace]{
		APIVersion: "v1", ClusterScoped: true, Name: validation.ValidateNamespaceName,
		Kept: []store.Part[*corev1.Namespace]{
			store.Field("status", func(ns *corev1.Namespace) *corev1.NamespaceStatus { return &ns.Status }),
		},
		Create: activate,
		Update: func(ns, before *corev1.Namespace) { ns.Spec.Finalizers = before.Spec.Finalizers },
		Validate: func(_ context.Context, ns, before *corev1.Namespace) field.ErrorList {
			if before != nil {
				return nil
			}
			// The path has no index, as in Kubernetes.
			return validateFinalizers(ns, func(path *field.Path, _ int) *field.Path { return path })
		},
		Canonicalize: setDefaults,
	}
}

// activate gives a new Namespace its phase and the finalizer that keeps it
// until its content is deleted.
func activate(_ context.Context, ns *corev1.Namespace) {
	ns.Status.Phase = corev1.NamespaceActive
	if !slices.Contains(ns.Spec.Finalizers, corev1.FinalizerKubernetes) {
		ns.Spec.Finalizers = append(ns.Spec.Finalizers, corev1.FinalizerKubernetes)
	}
}

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

func validatePhase(_ context.Context, ns, _ *corev1.Namespace) field.ErrorList {
	// The capital letter in the path is Kubernetes'.
	path := field.NewPath("status", "Phase")
	switch deleted := !ns.DeletionTimestamp.IsZero(); {
	case deleted && ns.Status.Phase != corev1.NamespaceTerminating:
		return field.ErrorList{field.Invalid(path, ns.Status.Phase, "may only be 'Terminating' if `deletionTimestamp` is not empty")}
	case !deleted && ns.Status.Phase != corev1.NamespaceActive:
		return field.ErrorList{field.Invalid(path, ns.Status.Phase, "may only be 'Active' if `deletionTimestamp` is empty")}
	}
	return nil
}
