package watch

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"
)

// nearContext is a context that knows its own Done channel. The library asks the context
// of a watch for it at each event, and that is below a dozen values of the filters.
type nearContext struct {
	context.Context //nolint:containedctx // a context itself
	done            <-chan struct{}
}

// Done returns the channel of the context.
func (c nearContext) Done() <-chan struct{} { return c.done }

// nearWatches gives the watches of a storage a nearContext.
type nearWatches struct{ storage.Interface }

// Watch watches.
func (s nearWatches) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	return s.Interface.Watch(nearContext{ctx, ctx.Done()}, key, opts)
}

// WithNear returns storages as decorate does, with nearWatches.
func WithNear(decorate generic.StorageDecorator) generic.StorageDecorator {
	return func(c *storagebackend.ConfigForResource, prefix string, key func(runtime.Object) (string, error),
		newObject, newList func() runtime.Object, attrs storage.AttrFunc, triggers storage.IndexerFuncs, indexers *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		s, destroy, err := decorate(c, prefix, key, newObject, newList, attrs, triggers, indexers)
		return nearWatches{s}, destroy, err
	}
}
