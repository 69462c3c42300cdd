package backend

import (
	"context"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"

	"github.com/fairlead/fairlead/internal/tracing"
)

// tracedKinds are the kinds whose changes nodes program.
var tracedKinds = map[schema.GroupResource]string{
	{Resource: "services"}:                                  tracing.Service,
	{Group: "discovery.k8s.io", Resource: "endpointslices"}: tracing.EndpointSlice,
}

// tracedStorage sends a span for each write.
type tracedStorage struct {
	storage.Interface
	kind   string
	tracer *tracing.Tracer
}

// withTraces returns storages as decorate does, with tracedStorage.
func withTraces(kind string, tracer *tracing.Tracer, decorate generic.StorageDecorator) generic.StorageDecorator {
	return Wrap(decorate, func(_ *storagebackend.ConfigForResource, s storage.Interface, destroy factory.DestroyFunc,
	) (storage.Interface, factory.DestroyFunc) {
		return tracedStorage{s, kind, tracer}, destroy
	})
}

// Create stores a new object.
func (s tracedStorage) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	begun := time.Now()
	err := s.Interface.Create(ctx, key, obj, out, ttl)
	if err == nil {
		s.wrote(ctx, "create", out, 0, begun)
	}
	return err
}

// GuaranteedUpdate changes an object.
func (s tracedStorage) GuaranteedUpdate(ctx context.Context, key string, destination runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, tryUpdate storage.UpdateFunc, cachedExistingObject runtime.Object,
) error {
	begun := time.Now()
	var before uint64
	try := func(input runtime.Object, r storage.ResponseMeta) (runtime.Object, *uint64, error) {
		before = r.ResourceVersion
		return tryUpdate(input, r)
	}
	err := s.Interface.GuaranteedUpdate(ctx, key, destination, ignoreNotFound, preconditions, try, cachedExistingObject)
	if err == nil {
		s.wrote(ctx, "update", destination, before, begun)
	}
	return err
}

// Delete removes an object.
func (s tracedStorage) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validate storage.ValidateObjectFunc, cachedExistingObject runtime.Object, opts storage.DeleteOptions,
) error {
	begun := time.Now()
	err := s.Interface.Delete(ctx, key, out, preconditions, validate, cachedExistingObject, opts)
	if err == nil {
		s.wrote(ctx, "delete", out, 0, begun)
	}
	return err
}

// wrote sends the span of a write, unless the object still has the version before it: then nothing was stored.
func (s tracedStorage) wrote(ctx context.Context, verb string, out runtime.Object, before uint64, begun time.Time) {
	stored := time.Now()
	o, err := meta.Accessor(out)
	if err != nil || before > 0 && o.GetResourceVersion() == strconv.FormatUint(before, 10) {
		return
	}
	if received, ok := request.ReceivedTimestampFrom(ctx); ok {
		begun = received
	}
	what := verb + " " + s.kind
	if info, ok := request.RequestInfoFrom(ctx); ok && info.Subresource != "" {
		what += " " + info.Subresource
	}
	s.tracer.Written(tracing.ChangeOf(s.kind, o), what, begun, stored)
}
