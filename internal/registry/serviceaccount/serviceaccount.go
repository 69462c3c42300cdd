// Package serviceaccount stores ServiceAccounts.
package serviceaccount

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// NewStorage returns the storages of ServiceAccounts by resource path.
func NewStorage(opts generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	r, err := store.New(store.Kind{
		Resource:   corev1.Resource("serviceaccounts"),
		Singular:   "serviceaccount",
		ShortNames: []string{"sa"},
		New:        func() runtime.Object { return &corev1.ServiceAccount{} },
		NewList:    func() runtime.Object { return &corev1.ServiceAccountList{} },
		Strategy:   strategy{store.Namespaced()},
		Table: store.NewTable([]store.Column{
			store.AgeColumn(),
		}, func(sa *corev1.ServiceAccount) []any {
			return []any{store.Age(sa.CreationTimestamp)}
		}),
	}, opts)
	if err != nil {
		return nil, err
	}
	r.Store.ReturnDeletedObject = true
	return map[string]rest.Storage{"serviceaccounts": r}, nil
}

type strategy struct{ store.Base }

func (strategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	return store.ValidateMeta(&obj.(*corev1.ServiceAccount).ObjectMeta, true, validation.ValidateServiceAccountName)
}

func (strategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	return store.ValidateMetaUpdate(&obj.(*corev1.ServiceAccount).ObjectMeta, &old.(*corev1.ServiceAccount).ObjectMeta)
}
