package backend

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
)

// sizedStorage answers 413 for an object that is larger than etcd takes, where the library answers 500.
type sizedStorage struct {
	storage.Interface
	codec runtime.Codec
}

// withSize returns storages as decorate does, with sizedStorage.
func withSize(decorate generic.StorageDecorator) generic.StorageDecorator {
	return Wrap(decorate, func(c *storagebackend.ConfigForResource, s storage.Interface, destroy factory.DestroyFunc,
	) (storage.Interface, factory.DestroyFunc) {
		return sizedStorage{s, c.Codec}, destroy
	})
}

// Create stores a new object.
func (s sizedStorage) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	return s.explain(s.Interface.Create(ctx, key, obj, out, ttl), obj)
}

// GuaranteedUpdate changes an object.
func (s sizedStorage) GuaranteedUpdate(ctx context.Context, key string, destination runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, tryUpdate storage.UpdateFunc, cachedExistingObject runtime.Object,
) error {
	var last runtime.Object
	try := func(input runtime.Object, r storage.ResponseMeta) (runtime.Object, *uint64, error) {
		obj, ttl, err := tryUpdate(input, r)
		last = obj
		return obj, ttl, err
	}
	return s.explain(s.Interface.GuaranteedUpdate(ctx, key, destination, ignoreNotFound, preconditions, try, cachedExistingObject), last)
}

// explain returns err, or the error with the size of obj if etcd does not take that.
func (s sizedStorage) explain(err error, obj runtime.Object) error {
	if !tooLarge(err) {
		return err
	}
	limit := "etcd takes 1.5 MiB (1572864 bytes) in one request by default"
	if obj == nil {
		return newSizeError(err, limit)
	}
	size := s.size(obj)
	if m, metaErr := meta.Accessor(obj); metaErr == nil && len(m.GetManagedFields()) > 0 {
		without := obj.DeepCopyObject()
		if m, metaErr := meta.Accessor(without); metaErr == nil {
			m.SetManagedFields(nil)
			return newSizeError(err, fmt.Sprintf("the object has %d bytes as it is stored, %d of them in metadata.managedFields, and %s: "+
				"make it smaller, or several objects of it", size, size-s.size(without), limit))
		}
	}
	return newSizeError(err, fmt.Sprintf("the object has %d bytes as it is stored, and %s: make it smaller, or several objects of it",
		size, limit))
}

// size returns how many bytes an object has in etcd, if it is not encrypted.
func (s sizedStorage) size(obj runtime.Object) int {
	text, err := runtime.Encode(s.codec, obj)
	if err != nil {
		return 0 // cannot happen: it was encoded a moment ago
	}
	return len(text)
}

// tooLarge reports whether err is that of an object larger than etcd takes, or than its client sends.
func tooLarge(err error) bool {
	var etcd rpctypes.EtcdError
	if errors.As(err, &etcd) {
		return errors.Is(etcd, rpctypes.ErrRequestTooLarge)
	}
	return err != nil && strings.Contains(err.Error(), clientLimit)
}

// clientLimit is in the message of etcd's client for a request that is too large to be sent.
const clientLimit = "trying to send message larger than max"

// sizeError is an answer 413 that is an error of etcd's client, too: by that the handlers of create, update and patch know
// that they may try again without managed fields.
type sizeError struct {
	*apierrors.StatusError
	cause error
}

func newSizeError(cause error, message string) error {
	return &sizeError{apierrors.NewRequestEntityTooLargeError(message), cause}
}

// GRPCStatus returns the status that the handlers look for.
func (e *sizeError) GRPCStatus() *grpcstatus.Status {
	return grpcstatus.New(codes.ResourceExhausted, clientLimit)
}

// Unwrap returns the error of etcd.
func (e *sizeError) Unwrap() error { return e.cause }
