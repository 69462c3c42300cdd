package backend

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"

	"github.com/fairlead/fairlead/internal/apiserver/store"
)

// reportedStorage tells the store which objects were written, so that their reservations end.
type reportedStorage struct {
	storage.Interface
	kept *store.Store
	kind schema.GroupResource
}

// reported returns storages as decorate does, with reportedStorage.
func (b *Backend) reported(decorate generic.StorageDecorator) generic.StorageDecorator {
	return Wrap(decorate, func(c *storagebackend.ConfigForResource, s storage.Interface, destroy factory.DestroyFunc,
	) (storage.Interface, factory.DestroyFunc) {
		return reportedStorage{s, b.kept, c.GroupResource}, destroy
	})
}

// Create stores a new object.
func (s reportedStorage) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	err := s.Interface.Create(ctx, key, obj, out, ttl)
	if err == nil {
		s.kept.Wrote(s.kind, out)
	}
	return err
}

// GuaranteedUpdate changes an object, or creates it.
func (s reportedStorage) GuaranteedUpdate(ctx context.Context, key string, destination runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, tryUpdate storage.UpdateFunc, cachedExistingObject runtime.Object,
) error {
	err := s.Interface.GuaranteedUpdate(ctx, key, destination, ignoreNotFound, preconditions, tryUpdate, cachedExistingObject)
	if err == nil {
		s.kept.Wrote(s.kind, destination)
	}
	return err
}
