// Package lease stores Leases: the heartbeats of nodes and servers and the
// locks of leader elections.
package lease

import (
	"context"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// NewStorage returns the storages of Leases by resource path.
func NewStorage(opts generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	r, err := store.New(store.Kind{
		Resource: coordinationv1.Resource("leases"),
		Singular: "lease",
		New:      store.Empty[coordinationv1.Lease],
		NewList:  store.Empty[coordinationv1.LeaseList],
		Strategy: rules().Strategy(),
		Table: store.NewTable([]store.Column{
			{Name: "Holder", Description: coordinationv1.LeaseSpec{}.SwaggerDoc()["holderIdentity"]},
			store.AgeColumn(),
		}, func(l *coordinationv1.Lease) []any {
			holder := ""
			if l.Spec.HolderIdentity != nil {
				holder = *l.Spec.HolderIdentity
			}
			return []any{holder, store.Age(l.CreationTimestamp)}
		}),
	}, opts)
	if err != nil {
		return nil, err
	}
	return map[string]rest.Storage{"leases": r}, nil
}

func rules() store.Rules[*coordinationv1.Lease] {
	return store.Rules[*coordinationv1.Lease]{
		CreateOnUpdate:  true, // a heartbeat needs one request, new or not
		VersionRequired: true, // a lock must not be taken unseen
		// Kubernetes drops the fields of coordinated leader election unless an
		// alpha feature is on.
		Create:   func(_ context.Context, l *coordinationv1.Lease) { dropElection(&l.Spec, &coordinationv1.LeaseSpec{}) },
		Update:   func(l, old *coordinationv1.Lease) { dropElection(&l.Spec, &old.Spec) },
		Validate: validate,
	}
}

// dropElection drops the fields of coordinated leader election that before did
// not have.
func dropElection(s, before *coordinationv1.LeaseSpec) {
	if before.Strategy == nil {
		s.Strategy = nil
	}
	if before.PreferredHolder == nil {
		s.PreferredHolder = nil
	}
}

// validate checks l as a replacement of old, nil on create.
func validate(_ context.Context, l, old *coordinationv1.Lease) field.ErrorList {
	metadata := field.NewPath("metadata")
	var errs field.ErrorList
	if old == nil {
		errs = validation.ValidateObjectMeta(&l.ObjectMeta, true, validation.NameIsDNSSubdomain, metadata)
	} else {
		errs = validation.ValidateObjectMetaUpdate(&l.ObjectMeta, &old.ObjectMeta, metadata)
	}
	return append(errs, validateSpec(&l.Spec, field.NewPath("spec"))...)
}

func validateSpec(s *coordinationv1.LeaseSpec, path *field.Path) (errs field.ErrorList) {
	if s.LeaseDurationSeconds != nil && *s.LeaseDurationSeconds <= 0 {
		errs = append(errs, field.Invalid(path.Child("leaseDurationSeconds"), *s.LeaseDurationSeconds, "must be greater than 0"))
	}
	if s.LeaseTransitions != nil && *s.LeaseTransitions < 0 {
		errs = append(errs, field.Invalid(path.Child("leaseTransitions"), *s.LeaseTransitions, "must be greater than or equal to 0"))
	}
	if s.Strategy != nil {
		errs = append(errs, validateStrategy(*s.Strategy, path.Child("strategy"))...)
	}
	if s.PreferredHolder != nil && *s.PreferredHolder != "" && (s.Strategy == nil || *s.Strategy == "") {
		errs = append(errs, field.Forbidden(path.Child("preferredHolder"), "may only be specified if `strategy` is defined"))
	}
	return errs
}

// validateStrategy accepts the strategy that Kubernetes knows, and any in the
// domain of its implementation.
func validateStrategy(s coordinationv1.CoordinatedLeaseStrategy, path *field.Path) (errs field.ErrorList) {
	if !strings.Contains(string(s), "/") {
		if s != coordinationv1.OldestEmulationVersion {
			errs = append(errs, field.NotSupported(path, s, []coordinationv1.CoordinatedLeaseStrategy{coordinationv1.OldestEmulationVersion}))
		}
		return errs
	}
	errs = append(errs, store.Invalids(path, s, utilvalidation.IsQualifiedName(string(s)))...)
	return errs
}
