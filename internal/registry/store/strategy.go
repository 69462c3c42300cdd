package store

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/storage/names"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/fairlead/fairlead/internal/registry/scheme"
)

// Base is the part of a strategy that most kinds share: embed it and replace
// what differs. By default a kind changes and rejects nothing, cannot be
// created by an update, and may be updated without a resource version.
type Base struct {
	runtime.ObjectTyper
	names.NameGenerator
	namespaced bool
}

// Namespaced is the base of a kind that lives in namespaces.
func Namespaced() Base { return Base{scheme.Scheme, names.SimpleNameGenerator, true} }

// ClusterScoped is the base of a kind that lives outside namespaces.
func ClusterScoped() Base { return Base{scheme.Scheme, names.SimpleNameGenerator, false} }

// NamespaceScoped reports whether objects live in a namespace.
func (b Base) NamespaceScoped() bool { return b.namespaced }

// PrepareForCreate changes nothing.
func (Base) PrepareForCreate(context.Context, runtime.Object) {}

// PrepareForUpdate changes nothing.
func (Base) PrepareForUpdate(context.Context, runtime.Object, runtime.Object) {}

// Validate accepts everything.
func (Base) Validate(context.Context, runtime.Object) field.ErrorList { return nil }

// ValidateUpdate accepts everything.
func (Base) ValidateUpdate(context.Context, runtime.Object, runtime.Object) field.ErrorList {
	return nil
}

// WarningsOnCreate warns of nothing.
func (Base) WarningsOnCreate(context.Context, runtime.Object) []string { return nil }

// WarningsOnUpdate warns of nothing.
func (Base) WarningsOnUpdate(context.Context, runtime.Object, runtime.Object) []string { return nil }

// Canonicalize changes nothing.
func (Base) Canonicalize(runtime.Object) {}

// AllowCreateOnUpdate is false: a PUT to a name that is not there answers 404.
func (Base) AllowCreateOnUpdate(context.Context) bool { return false }

// AllowUnconditionalUpdate is true: an update without a resource version
// overwrites whatever is there.
func (Base) AllowUnconditionalUpdate(context.Context) bool { return true }

// ResetFields is the set of field paths, each a list of names such as
// {"status"}, that a strategy for apiVersion puts back on every write; server
// side apply then does not record their writer as the owner.
func ResetFields(apiVersion string, paths ...[]string) map[fieldpath.APIVersion]*fieldpath.Set {
	set := fieldpath.NewSet()
	for _, p := range paths {
		parts := make([]any, len(p))
		for i := range p {
			parts[i] = p[i]
		}
		set.Insert(fieldpath.MakePathOrDie(parts...))
	}
	return map[fieldpath.APIVersion]*fieldpath.Set{fieldpath.APIVersion(apiVersion): set}
}
