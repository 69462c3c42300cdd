// Package store holds what the storages of all kinds share: the construction
// of a generic registry store, the rules that a kind has for its objects, its
// subresources and table columns.
package store

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// Kind describes how one kind is stored and shown.
type Kind struct {
	// Resource is the plural name with its group; Singular the singular name.
	Resource   schema.GroupResource
	Singular   string
	ShortNames []string
	Categories []string

	New, NewList func() runtime.Object
	Strategy     Strategy

	// Attrs gives the labels and the selectable fields of an object; nil means
	// metadata.name and metadata.namespace.
	Attrs storage.AttrFunc
	// Triggers and Indexers let the watch cache find by field at once; optional.
	Triggers storage.IndexerFuncs
	Indexers *cache.Indexers
	// Table shows the columns of kubectl get; nil shows name and creation time.
	Table rest.TableConvertor
}

// Empty returns an empty object of type T, for Kind.New and Kind.NewList.
func Empty[T any, P interface {
	*T
	runtime.Object
}]() runtime.Object {
	return P(new(T))
}

// REST is the storage of a kind. Hooks of the embedded Store (BeginCreate,
// AfterDelete and the like) may be set before the server runs.
type REST struct {
	*genericregistry.Store
	shortNames, categories []string
}

var (
	_ rest.StandardStorage    = (*REST)(nil)
	_ rest.ShortNamesProvider = (*REST)(nil)
	_ rest.CategoriesProvider = (*REST)(nil)
)

// New builds the storage of k on the back end that opts gives.
func New(k Kind, opts generic.RESTOptionsGetter) (*REST, error) {
	s := &genericregistry.Store{
		NewFunc:                   k.New,
		NewListFunc:               k.NewList,
		DefaultQualifiedResource:  k.Resource,
		SingularQualifiedResource: schema.GroupResource{Group: k.Resource.Group, Resource: k.Singular},
		CreateStrategy:            k.Strategy,
		UpdateStrategy:            k.Strategy,
		DeleteStrategy:            k.Strategy,
		ResetFieldsStrategy:       k.Strategy,
		TableConvertor:            k.Table,
	}
	if s.TableConvertor == nil {
		s.TableConvertor = rest.NewDefaultTableConvertor(k.Resource)
	}
	err := s.CompleteWithOptions(&generic.StoreOptions{
		RESTOptions: opts, AttrFunc: k.Attrs, TriggerFunc: k.Triggers, Indexers: k.Indexers,
	})
	if err != nil {
		return nil, err
	}
	return &REST{Store: s, shortNames: k.ShortNames, categories: k.Categories}, nil
}

// ShortNames are the abbreviations kubectl accepts, for example "po".
func (r *REST) ShortNames() []string { return r.shortNames }

// Categories are the groups of kinds this one belongs to, for example "all".
func (r *REST) Categories() []string { return r.categories }

// SubREST serves a subresource that reads and writes the whole object by its
// own rules, for example status. It can neither create nor delete.
type SubREST struct {
	store *genericregistry.Store
}

var (
	_ rest.Patcher             = (*SubREST)(nil)
	_ rest.TableConvertor      = (*SubREST)(nil)
	_ rest.ResetFieldsStrategy = (*SubREST)(nil)
)

// NewSub returns the subresource of parent whose updates follow strategy. It
// takes over the parent's hooks as they are now.
func NewSub(parent *REST, strategy Strategy) *SubREST {
	s := *parent.Store
	s.UpdateStrategy = strategy
	s.ResetFieldsStrategy = strategy
	return &SubREST{store: &s}
}

// New returns an empty object of the kind.
func (r *SubREST) New() runtime.Object { return r.store.New() }

// GetUpdateStrategy returns what decides about updates.
func (r *SubREST) GetUpdateStrategy() rest.RESTUpdateStrategy { return r.store.GetUpdateStrategy() }

// Destroy does nothing: the back end belongs to the parent.
func (r *SubREST) Destroy() {}

// Get returns the whole object.
func (r *SubREST) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	return r.store.Get(ctx, name, options)
}

// Update changes the part of the object that the strategy lets through. An
// object that is not there is never created.
func (r *SubREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	return r.store.Update(ctx, name, info, create, update, false, options)
}

// GetResetFields names the fields that this subresource does not own.
func (r *SubREST) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return r.store.GetResetFields()
}

// ConvertToTable shows the columns of the parent.
func (r *SubREST) ConvertToTable(ctx context.Context, obj, options runtime.Object) (*metav1.Table, error) {
	return r.store.ConvertToTable(ctx, obj, options)
}
