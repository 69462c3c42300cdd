// Package serviceaccount stores ServiceAccounts.
package serviceaccount

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
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
		New:        store.Empty[corev1.ServiceAccount],
		NewList:    store.Empty[corev1.ServiceAccountList],
		Strategy:   store.Rules[*corev1.ServiceAccount]{Name: validation.ValidateServiceAccountName}.Strategy(),
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
