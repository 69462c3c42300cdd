package apiserver

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1beta1"
	extensionsserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	listersv1 "k8s.io/apiextensions-apiserver/pkg/client/listers/apiextensions/v1"
	extensionsopenapi "k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/endpoints/discovery"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/registry/generic"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/notfoundhandler"
	"k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corev1listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kube-openapi/pkg/common"

	"github.com/fairlead/fairlead/internal/apiserver/openapi"
	"github.com/fairlead/fairlead/internal/registry"
)

// customResources is the server of CustomResourceDefinitions and of the resources
// they define. The server of the built-in kinds delegates to it what it does not
// serve.
type customResources struct {
	*extensionsserver.CustomResourceDefinitions
	maxBody int64 // bytes
}

// newCustomResources builds the server with the configuration c of the delegating
// one. alone is set if this is the only server of its etcd.
func newCustomResources(
	c genericapiserver.Config, shared informers.SharedInformerFactory, back *backEnd, client kubernetes.Interface, alone bool,
) (*customResources, error) {
	c.PostStartHooks = map[string]genericapiserver.PostStartHookConfigEntry{}
	c.RESTOptionsGetter = definitionBackEnd{back}
	c.MergedResourceConfig = extensionsserver.DefaultAPIResourceConfigSource()
	// The documents of the delegating server describe these kinds too.
	c.SkipOpenAPIInstallation = true
	resolve := webhook.NewDefaultAuthenticationInfoResolverWrapper(nil, nil, c.LoopbackClientConfig, c.TracerProvider)
	extra := extensionsserver.ExtraConfig{
		CRDRESTOptionsGetter: customBackEnd{back},
		ServiceResolver:      serviceResolver{client},
		AuthResolverWrapper:  resolve,
		// With several servers a definition is established after a delay in which
		// all of them learn of it.
		MasterCount: 2,
	}
	if alone {
		extra.MasterCount = 1
	}
	config := extensionsserver.Config{
		GenericConfig: &genericapiserver.RecommendedConfig{Config: c, SharedInformerFactory: shared},
		ExtraConfig:   extra,
	}
	missing := notfoundhandler.New(registry.Codecs, genericapifilters.NoMuxAndDiscoveryIncompleteKey)
	s, err := config.Complete().New(genericapiserver.NewEmptyDelegateWithCustomHandler(missing))
	if err != nil {
		return nil, fmt.Errorf("cannot make the server of custom resources: %w", err)
	}
	return &customResources{s, c.MaxRequestBodyBytes}, nil
}

// join has front, the delegating server, serve the definitions, so that its OpenAPI
// documents and list of groups include them, and keeps the groups of the custom
// resources in that list.
func (r *customResources) join(front *genericapiserver.GenericAPIServer) error {
	for _, ws := range r.GenericAPIServer.Handler.GoRestfulContainer.RegisteredWebServices() {
		if strings.HasPrefix(ws.RootPath(), genericapiserver.APIGroupPrefix+"/"+apiextensions.GroupName) {
			front.Handler.GoRestfulContainer.Add(ws.Filter(rejectDeep(r.maxBody)))
		}
	}
	front.DiscoveryGroupManager.AddGroup(apiGroup(apiextensions.GroupName, []string{"v1"}))
	crds := r.Informers.Apiextensions().V1().CustomResourceDefinitions()
	g := &customGroups{lister: crds.Lister(), to: front.DiscoveryGroupManager, taken: map[string]bool{}, shown: map[string]bool{}}
	builtIn, err := front.DiscoveryGroupManager.Groups(context.Background(), &http.Request{})
	if err != nil {
		return err
	}
	for _, b := range builtIn {
		g.taken[b.Name] = true
	}
	_, err = crds.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { g.update() }, UpdateFunc: func(any, any) { g.update() }, DeleteFunc: func(any) { g.update() },
	})
	return err
}

// describe has the library's controllers add the custom resources to the OpenAPI
// documents of front, which its PrepareRun has made.
func (r *customResources) describe(front *genericapiserver.GenericAPIServer) {
	s := r.GenericAPIServer
	s.StaticOpenAPISpec, s.OpenAPIVersionedService, s.OpenAPIV3VersionedService =
		front.StaticOpenAPISpec, front.OpenAPIVersionedService, front.OpenAPIV3VersionedService
}

// openAPIDefinitions returns the schemas of the built-in kinds and of
// CustomResourceDefinitions.
func openAPIDefinitions(ref common.ReferenceCallback) map[string]common.OpenAPIDefinition {
	all := extensionsopenapi.GetOpenAPIDefinitions(ref)
	maps.Copy(all, openapi.GetOpenAPIDefinitions(ref))
	return all
}

// definitionBackEnd stores CustomResourceDefinitions as kube-apiserver does:
// JSON of the older version, which is shorter, so that the largest ones in use
// stay below etcd's limit of 1.5 MiB.
type definitionBackEnd struct{ *backEnd }

// GetRESTOptions returns the options of one resource.
func (b definitionBackEnd) GetRESTOptions(gr schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	codec := extensionsserver.Codecs.LegacyCodec(v1beta1.SchemeGroupVersion, apiextensionsv1.SchemeGroupVersion)
	return b.options(gr, codec, runtime.NewMultiGroupVersioner(v1beta1.SchemeGroupVersion, schema.GroupKind{Group: v1beta1.GroupName})), nil
}

// customBackEnd stores custom resources: JSON, in the version that their
// definition names, which the storage of each has encoded before.
type customBackEnd struct{ *backEnd }

// GetRESTOptions returns the options of one resource.
func (b customBackEnd) GetRESTOptions(gr schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	return b.options(gr, unstructured.UnstructuredJSONScheme, nil), nil
}

// customGroups adds the groups of established definitions to the list of groups.
// Only the informer's goroutine calls it.
type customGroups struct {
	lister listersv1.CustomResourceDefinitionLister
	to     discovery.GroupManager
	taken  map[string]bool // groups of built-in kinds
	shown  map[string]bool
}

func (g *customGroups) update() {
	crds, err := g.lister.List(labels.Everything())
	if err != nil {
		return // cannot happen: the lister reads from memory
	}
	versions := map[string]map[string]bool{}
	for _, crd := range crds {
		group := crd.Spec.Group
		if g.taken[group] || !apihelpers.IsCRDConditionTrue(crd, apiextensionsv1.Established) {
			continue
		}
		for _, v := range crd.Spec.Versions {
			if v.Served {
				if versions[group] == nil {
					versions[group] = map[string]bool{}
				}
				versions[group][v.Name] = true
			}
		}
	}
	for group := range g.shown {
		if versions[group] == nil {
			g.to.RemoveGroup(group)
			delete(g.shown, group)
		}
	}
	for _, group := range slices.Sorted(maps.Keys(versions)) {
		names := slices.SortedFunc(maps.Keys(versions[group]), func(a, b string) int { return version.CompareKubeAwareVersionStrings(b, a) })
		g.to.AddGroup(apiGroup(group, names))
		g.shown[group] = true
	}
}

// apiGroup returns a group with its versions, the preferred one first.
func apiGroup(name string, versions []string) metav1.APIGroup {
	g := metav1.APIGroup{Name: name}
	for _, v := range versions {
		g.Versions = append(g.Versions, metav1.GroupVersionForDiscovery{GroupVersion: name + "/" + v, Version: v})
	}
	g.PreferredVersion = g.Versions[0]
	return g
}

// resolveTimeout bounds the look-up of the Service of a webhook.
const resolveTimeout = 10 * time.Second

// serviceResolver looks up the Service of a conversion webhook at each call: webhooks
// are few, and a watch of all Services would cost more.
type serviceResolver struct{ client kubernetes.Interface }

// ResolveEndpoint returns the URL of a port of a Service.
func (r serviceResolver) ResolveEndpoint(namespace, name string, port int32) (*url.URL, error) {
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	defer cancel()
	s, err := r.client.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	one := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	if err := one.Add(s); err != nil {
		return nil, err
	}
	return proxy.ResolveCluster(corev1listers.NewServiceLister(one), namespace, name, port)
}
