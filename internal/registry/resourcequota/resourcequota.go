// Package resourcequota stores ResourceQuotas. The API server enforces the limits of names for which Counted
// reports true, and keeps status.used.
package resourcequota

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// NewStorage returns the storages of ResourceQuotas by resource path.
func NewStorage(opts generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	quotas := rules()
	r, err := store.New(store.Kind{
		Resource:   corev1.Resource("resourcequotas"),
		Singular:   "resourcequota",
		ShortNames: []string{"quota"},
		New:        store.Empty[corev1.ResourceQuota],
		NewList:    store.Empty[corev1.ResourceQuotaList],
		Strategy:   quotas.Strategy(),
		Table: store.NewTable([]store.Column{
			{Name: "Request", Description: "Request represents a minimum amount of cpu/memory that a container may consume."},
			{Name: "Limit", Description: "Limits control the maximum amount of cpu/memory that a container may use " +
				"independent of contention on the node."},
			store.AgeColumn(),
		}, cells),
	}, opts)
	if err != nil {
		return nil, err
	}
	status := quotas.Sub(validateStatus, store.Field("spec", func(q *corev1.ResourceQuota) *corev1.ResourceQuotaSpec { return &q.Spec }))
	status.Warn = quotas.Warn
	return map[string]rest.Storage{
		"resourcequotas":        r,
		"resourcequotas/status": store.NewSub(r, status.Strategy()),
	}, nil
}

func cells(q *corev1.ResourceQuota) []any {
	var requests, limits []string
	for _, name := range slices.Sorted(maps.Keys(q.Status.Hard)) {
		used, hard := q.Status.Used[name], q.Status.Hard[name]
		text := fmt.Sprintf("%s: %s/%s", name, used.String(), hard.String())
		if strings.HasPrefix(string(name), "limits.") {
			limits = append(limits, text)
		} else {
			requests = append(requests, text)
		}
	}
	return []any{strings.Join(requests, ", "), strings.Join(limits, ", "), store.Age(q.CreationTimestamp)}
}

func rules() store.Rules[*corev1.ResourceQuota] {
	return store.Rules[*corev1.ResourceQuota]{
		APIVersion: "v1", Name: validation.NameIsDNSSubdomain,
		Kept: []store.Part[*corev1.ResourceQuota]{
			store.Field("status", func(q *corev1.ResourceQuota) *corev1.ResourceQuotaStatus { return &q.Status }),
		},
		Validate: validate,
		Warn:     func(q, _ *corev1.ResourceQuota) []string { return warnings(q) },
	}
}
