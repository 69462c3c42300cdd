// Package resourcequota stores ResourceQuotas. The API server enforces what Counted
// reports and keeps status.used.
package resourcequota

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// Bytes is the resource that limits the size of all objects of a namespace together,
// in bytes as they are stored.
const Bytes corev1.ResourceName = "fairlead.dev/bytes"

// countPrefix begins the names that limit the number of objects of a kind:
// count/RESOURCE or count/RESOURCE.GROUP.
const countPrefix = "count/"

// Counted reports whether a limit of name is enforced.
func Counted(name corev1.ResourceName) bool {
	switch name {
	case Bytes, corev1.ResourcePods, corev1.ResourceServices, corev1.ResourceConfigMaps, corev1.ResourceSecrets:
		return true
	}
	return strings.HasPrefix(string(name), countPrefix)
}

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
		Validate: func(_ context.Context, q, _ *corev1.ResourceQuota) field.ErrorList { return validateSpec(&q.Spec) },
		Warn:     func(q, _ *corev1.ResourceQuota) []string { return warnings(q) },
	}
}

func validateStatus(_ context.Context, q, _ *corev1.ResourceQuota) field.ErrorList {
	path := field.NewPath("status")
	errs := validateList(q.Status.Hard, path.Child("hard"))
	return append(errs, validateList(q.Status.Used, path.Child("used"))...)
}

func warnings(q *corev1.ResourceQuota) (out []string) {
	for _, name := range slices.Sorted(maps.Keys(q.Spec.Hard)) {
		if !Counted(name) {
			out = append(out, fmt.Sprintf("spec.hard[%s]: not enforced; fairlead limits numbers of objects (count/...) and %s", name, Bytes))
		}
	}
	return out
}

func validateSpec(s *corev1.ResourceQuotaSpec) field.ErrorList {
	path := field.NewPath("spec")
	errs := validateList(s.Hard, path.Child("hard"))
	// Scopes select Pods by what they ask of a node, which is not counted.
	if len(s.Scopes) > 0 {
		errs = append(errs, field.Forbidden(path.Child("scopes"), "scopes are not supported"))
	}
	if s.ScopeSelector != nil {
		errs = append(errs, field.Forbidden(path.Child("scopeSelector"), "scopes are not supported"))
	}
	return errs
}

func validateList(list corev1.ResourceList, path *field.Path) (errs field.ErrorList) {
	for _, name := range slices.Sorted(maps.Keys(list)) {
		at, value := path.Key(string(name)), list[name]
		errs = append(errs, store.Invalids(at, name, utilvalidation.IsQualifiedName(string(name)))...)
		if !strings.Contains(string(name), "/") && !standard(name) {
			errs = append(errs, field.Invalid(at, name, "must be a standard resource for quota"))
		}
		if value.Sign() < 0 {
			errs = append(errs, field.Invalid(at, value.String(), "must be greater than or equal to 0"))
		}
		if Counted(name) && value.MilliValue()%1000 != 0 {
			errs = append(errs, field.Invalid(at, value.String(), "must be an integer"))
		}
	}
	return errs
}

// standard reports whether name is one that Kubernetes knows without a domain.
func standard(name corev1.ResourceName) bool {
	switch name {
	case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory,
		corev1.ResourceRequestsStorage, corev1.ResourceRequestsEphemeralStorage, corev1.ResourceLimitsCPU, corev1.ResourceLimitsMemory,
		corev1.ResourceLimitsEphemeralStorage, corev1.ResourcePods, corev1.ResourceQuotas, corev1.ResourceServices,
		corev1.ResourceReplicationControllers, corev1.ResourceSecrets, corev1.ResourcePersistentVolumeClaims, corev1.ResourceConfigMaps,
		corev1.ResourceServicesNodePorts, corev1.ResourceServicesLoadBalancers:
		return true
	}
	return strings.HasPrefix(string(name), "requests.hugepages-") || strings.HasPrefix(string(name), "hugepages-")
}
