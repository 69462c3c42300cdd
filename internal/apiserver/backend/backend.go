// Package backend keeps each resource in the store: its codec, its encryption and its watch cache.
package backend

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/registry/generic"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/egressselector"
	"k8s.io/apiserver/pkg/server/healthz"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"

	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/apiserver/watch"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/registry/node"
	"github.com/fairlead/fairlead/internal/tracing"
)

// Backend stores each resource in etcd: as protobuf, below PREFIX/GROUP/RESOURCE,
// behind a watch cache.
type Backend struct {
	kept       *store.Store
	config     storagebackend.Config
	encryption *encryption
	tracer     *tracing.Tracer // nil for none
}

var _ generic.RESTOptionsGetter = (*Backend)(nil)

// New stores resources in kept, below prefix; tracker learns how many objects each has. After the end of over no storage is made:
// each waits 20 s for a connection to etcd, one after the other for the versions of a custom resource.
func New(
	over context.Context, kept *store.Store, prefix string, tracker flowcontrolrequest.StorageObjectCountTracker,
) *Backend {
	c := storagebackend.NewDefaultConfig(prefix, nil)
	c.Transport.ServerList = kept.Endpoints
	c.Transport.EgressLookup = func(egressselector.NetworkContext) (utilnet.DialFunc, error) {
		if over.Err() != nil {
			return nil, errors.New("the server ends")
		}
		return kept.Dial, nil
	}
	c.StorageObjectCountTracker = tracker
	return &Backend{kept: kept, config: *c}
}

// GetRESTOptions returns the options of one resource.
func (b *Backend) GetRESTOptions(gr schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	gv := schema.GroupVersion{Group: gr.Group, Version: "v1"}
	codec, versioner, err := serverstorage.NewStorageCodec(serverstorage.StorageCodecConfig{
		StorageMediaType:  runtime.ContentTypeProtobuf,
		StorageSerializer: registry.Codecs,
		StorageVersion:    gv,
		MemoryVersion:     schema.GroupVersion{Group: gr.Group, Version: runtime.APIVersionInternal},
		Config:            b.config,
	})
	if err != nil {
		return generic.RESTOptions{}, fmt.Errorf("no storage codec for %s: %w", gr, err)
	}
	o := b.Options(gr, codec, versioner)
	if gr == (schema.GroupResource{Resource: "events"}) || gr == node.KeyClaims() {
		// Events are written often and watched rarely, claims of keys never.
		b.Uncache(&o)
	}
	if kind := tracedKinds[gr]; kind != "" && b.tracer != nil {
		o.Decorator = withTraces(kind, b.tracer, o.Decorator)
	}
	return o, nil
}

// Uncache takes the watch cache out of options.
func (b *Backend) Uncache(o *generic.RESTOptions) {
	o.Decorator = b.reported(withSize(generic.UndecoratedStorage))
}

// Options returns the options that all resources share.
func (b *Backend) Options(gr schema.GroupResource, codec runtime.Codec, versioner runtime.GroupVersioner) generic.RESTOptions {
	c := b.config.ForResource(gr)
	c.Codec, c.EncodeVersioner = codec, versioner
	c.Transformer = b.encryption.transformer(gr)
	return generic.RESTOptions{
		StorageConfig:           c,
		Decorator:               b.reported(withSize(watch.WithShared(watch.WithNear(genericregistry.StorageWithCacher())))),
		DeleteCollectionWorkers: 4,
		// Package controller has the collector that removes the finalizers.
		EnableGarbageCollection: true,
		ResourcePrefix:          resourcePrefix(gr),
		CountMetricPollPeriod:   time.Minute,
	}
}

// resourcePrefix keeps the groups apart: "pods", "discovery.k8s.io/endpointslices".
func resourcePrefix(gr schema.GroupResource) string {
	if gr.Group == "" {
		return gr.Resource
	}
	return gr.Group + "/" + gr.Resource
}

// Trace has spans sent of the writes of all storages that are made from now on.
func (b *Backend) Trace(tracer *tracing.Tracer) { b.tracer = tracer }

// AddHealthChecks makes the health of etcd part of the server's.
func (b *Backend) AddHealthChecks(c *genericapiserver.Config) error {
	health, err := factory.CreateHealthCheck(b.config, c.DrainedNotify())
	if err != nil {
		return err
	}
	c.AddHealthChecks(healthz.NamedCheck("etcd", func(*http.Request) error { return health() }))
	return nil
}
