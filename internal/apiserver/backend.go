package apiserver

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/registry/generic"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/egressselector"
	"k8s.io/apiserver/pkg/server/healthz"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"

	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/registry/node"
)

// backEnd stores each resource in etcd: as protobuf, below PREFIX/GROUP/RESOURCE,
// behind a watch cache.
type backEnd struct {
	config     storagebackend.Config
	encryption *encryption
}

var _ generic.RESTOptionsGetter = (*backEnd)(nil)

func newBackEnd(store *etcd, prefix string) *backEnd {
	c := storagebackend.NewDefaultConfig(prefix, nil)
	c.Transport.ServerList = store.endpoints
	if store.dial != nil {
		c.Transport.EgressLookup = func(egressselector.NetworkContext) (utilnet.DialFunc, error) { return store.dial, nil }
	}
	return &backEnd{config: *c}
}

// GetRESTOptions returns the options of one resource.
func (b *backEnd) GetRESTOptions(gr schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
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
	o := b.options(gr, codec, versioner)
	if gr == (schema.GroupResource{Resource: "events"}) || gr == node.KeyClaims() {
		// Events are written often and watched rarely, claims of keys never.
		o.Decorator = generic.UndecoratedStorage
	}
	return o, nil
}

// options returns the options that all resources share.
func (b *backEnd) options(gr schema.GroupResource, codec runtime.Codec, versioner runtime.GroupVersioner) generic.RESTOptions {
	c := b.config.ForResource(gr)
	c.Codec, c.EncodeVersioner = codec, versioner
	c.Transformer = b.encryption.transformer(gr)
	return generic.RESTOptions{
		StorageConfig:           c,
		Decorator:               withSharedWatches(withNearWatches(genericregistry.StorageWithCacher())),
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

// addHealthChecks makes the health of etcd part of the server's.
func (b *backEnd) addHealthChecks(c *genericapiserver.Config) error {
	health, err := factory.CreateHealthCheck(b.config, c.DrainedNotify())
	if err != nil {
		return err
	}
	c.AddHealthChecks(healthz.NamedCheck("etcd", func(*http.Request) error { return health() }))
	return nil
}

// sortedVersions returns the versions of r in order, the core group first.
func sortedVersions(r map[schema.GroupVersion]map[string]rest.Storage) []schema.GroupVersion {
	return slices.SortedFunc(maps.Keys(r), func(a, b schema.GroupVersion) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Version, b.Version))
	})
}
