package registry_test

import (
	"bytes"
	"context"
	"log/slog"
	"net/netip"
	"os"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/registry/store"
	"github.com/fairlead/fairlead/internal/svc"
)

// A body of any bytes, in any encoding, is decoded, defaulted and validated, or
// refused. What was accepted can be shown as a table and encoded again.
func FuzzCreate(f *testing.F) {
	kinds := storagesByKind(f)
	for _, text := range seeds(f) {
		f.Add(text)
		obj, gvk := decode(f, text)
		if kinds[gvk] == nil {
			f.Fatalf("no storage for %s of the seeds", gvk)
		}
		for _, media := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
			f.Add(encode(f, media, obj, gvk.GroupVersion()))
		}
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		obj, gvk, err := decoder().Decode(body, nil, nil)
		if err != nil || kinds[*gvk] == nil {
			return
		}
		k := kinds[*gvk]
		ctx := contextOf(k, obj)
		if err := rest.BeforeCreate(k.create, ctx, obj); err != nil {
			return
		}
		k.create.WarningsOnCreate(ctx, obj)
		if _, err := k.table.ConvertToTable(ctx, obj, &metav1.TableOptions{}); err != nil {
			t.Errorf("no table of %s: %v", gvk, err)
		}
		if again, _ := decode(t, encode(t, runtime.ContentTypeProtobuf, obj, gvk.GroupVersion())); again == nil {
			t.Errorf("%s is lost in protobuf", gvk)
		}
	})
}

// An object that replaces another one of its kind, or its status, is accepted
// or refused.
func FuzzUpdate(f *testing.F) {
	kinds := storagesByKind(f)
	for _, text := range seeds(f) {
		f.Add(text, text)
		obj, gvk := decode(f, text)
		f.Add(text, encode(f, runtime.ContentTypeProtobuf, obj, gvk.GroupVersion()))
		f.Add([]byte("apiVersion: "+gvk.GroupVersion().String()+"\nkind: "+gvk.Kind+"\nmetadata: {name: a, namespace: default}\n"), text)
	}
	f.Fuzz(func(_ *testing.T, before, after []byte) {
		old, gvk, err := decoder().Decode(before, nil, nil)
		if err != nil || kinds[*gvk] == nil {
			return
		}
		obj, gvk2, err := decoder().Decode(after, nil, nil)
		if err != nil || *gvk != *gvk2 {
			return
		}
		k := kinds[*gvk]
		// What is stored has been accepted before.
		if err := rest.BeforeCreate(k.create, contextOf(k, old), old); err != nil {
			return
		}
		name(obj, old)
		for _, s := range k.updates {
			next, ctx := obj.DeepCopyObject(), contextOf(k, old)
			if err := rest.BeforeUpdate(s, ctx, next, old.DeepCopyObject()); err == nil {
				s.WarningsOnUpdate(ctx, next, old)
			}
		}
	})
}

// name makes obj a later write of old.
func name(obj, old runtime.Object) {
	o, err := meta.Accessor(obj)
	if err != nil {
		return
	}
	was, err := meta.Accessor(old)
	if err != nil {
		return
	}
	o.SetName(was.GetName())
	o.SetNamespace(was.GetNamespace())
	o.SetUID(was.GetUID())
	o.SetResourceVersion("1")
	was.SetResourceVersion("1")
}

// kindStorage is what the fuzzers need of the storages of a kind.
type kindStorage struct {
	create  rest.RESTCreateStrategy
	updates []rest.RESTUpdateStrategy
	table   rest.TableConvertor
}

func contextOf(k *kindStorage, obj runtime.Object) context.Context {
	ctx := request.WithRequestInfo(context.Background(), &request.RequestInfo{IsResourceRequest: true, Verb: "create"})
	if !k.create.NamespaceScoped() {
		return ctx
	}
	namespace := metav1.NamespaceDefault
	if o, err := meta.Accessor(obj); err == nil && o.GetNamespace() != "" {
		namespace = o.GetNamespace()
	}
	return request.WithNamespace(ctx, namespace)
}

// storagesByKind builds the storages of all kinds on nothing: deciding about
// an object needs no store.
func storagesByKind(tb testing.TB) map[schema.GroupVersionKind]*kindStorage {
	tb.Helper()
	s, err := registry.New(registry.Options{
		RESTOptions:  nowhere{},
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")},
		NodePorts:    svc.PortRange{First: 30000, Last: 32767}, Alone: true, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		tb.Fatal(err)
	}
	out := map[schema.GroupVersionKind]*kindStorage{}
	for gv, resources := range s.Resources {
		for _, r := range resources {
			whole, ok := r.(interface {
				rest.Creater
				GetCreateStrategy() rest.RESTCreateStrategy
				GetUpdateStrategy() rest.RESTUpdateStrategy
			})
			if !ok {
				continue
			}
			kind, _, err := registry.Scheme.ObjectKinds(whole.New())
			if err != nil {
				tb.Fatal(err)
			}
			for _, k := range kind {
				if k.Version == runtime.APIVersionInternal {
					gvk := gv.WithKind(k.Kind)
					out[gvk] = &kindStorage{whole.GetCreateStrategy(), []rest.RESTUpdateStrategy{whole.GetUpdateStrategy()}, r.(rest.TableConvertor)}
				}
			}
		}
	}
	for gv, resources := range s.Resources {
		for _, r := range resources {
			sub, ok := r.(*store.SubREST)
			if !ok {
				continue
			}
			kind, _, err := registry.Scheme.ObjectKinds(sub.New())
			if err != nil {
				tb.Fatal(err)
			}
			k := out[gv.WithKind(kind[0].Kind)]
			if k == nil {
				tb.Fatalf("%s has a subresource, and no storage of its own: %T", kind, r)
			}
			k.updates = append(k.updates, sub.GetUpdateStrategy())
		}
	}
	if len(out) < 16 {
		tb.Fatalf("only %d kinds: the storages are not as this test expects", len(out))
	}
	return out
}

// nowhere is a back end that keeps nothing.
type nowhere struct{}

func (nowhere) GetRESTOptions(gr schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	config := &storagebackend.ConfigForResource{GroupResource: gr}
	config.Codec = registry.Codecs.LegacyCodec(schema.GroupVersion{Group: gr.Group, Version: "v1"})
	return generic.RESTOptions{
		StorageConfig: config, ResourcePrefix: gr.Group + "/" + gr.Resource,
		Decorator: func(*storagebackend.ConfigForResource, string, func(runtime.Object) (string, error), func() runtime.Object,
			func() runtime.Object, storage.AttrFunc, storage.IndexerFuncs, *cache.Indexers) (storage.Interface, factory.DestroyFunc, error) {
			return nil, func() {}, nil
		},
	}, nil
}

func seeds(tb testing.TB) [][]byte {
	tb.Helper()
	text, err := os.ReadFile("testdata/kinds.yaml")
	if err != nil {
		tb.Fatal(err)
	}
	return bytes.Split(text, []byte("\n---\n"))
}

func decoder() runtime.Decoder { return registry.Codecs.UniversalDecoder() }

func decode(tb testing.TB, body []byte) (runtime.Object, schema.GroupVersionKind) {
	tb.Helper()
	obj, gvk, err := decoder().Decode(body, nil, nil)
	if err != nil {
		tb.Fatalf("%v in\n%s", err, body)
	}
	return obj, *gvk
}

func encode(tb testing.TB, media string, obj runtime.Object, gv schema.GroupVersion) []byte {
	tb.Helper()
	info, ok := runtime.SerializerInfoForMediaType(registry.Codecs.SupportedMediaTypes(), media)
	if !ok {
		tb.Fatalf("no encoder of %s", media)
	}
	out, err := runtime.Encode(registry.Codecs.EncoderForVersion(info.Serializer, gv), obj)
	if err != nil {
		tb.Fatal(err)
	}
	return out
}
