package backend

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"
)

// Wrap returns storages as decorate does, each passed through wrap with what destroys it.
func Wrap(
	decorate generic.StorageDecorator,
	wrap func(*storagebackend.ConfigForResource, storage.Interface, factory.DestroyFunc) (storage.Interface, factory.DestroyFunc),
) generic.StorageDecorator {
	return func(c *storagebackend.ConfigForResource, prefix string, key func(runtime.Object) (string, error),
		newObject, newList func() runtime.Object, attrs storage.AttrFunc, triggers storage.IndexerFuncs, indexers *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		s, destroy, err := decorate(c, prefix, key, newObject, newList, attrs, triggers, indexers)
		if err != nil {
			return s, destroy, err
		}
		s, destroy = wrap(c, s, destroy)
		return s, destroy, nil
	}
}
