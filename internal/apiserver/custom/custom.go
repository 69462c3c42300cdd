// Package custom serves CustomResourceDefinitions and the resources that they define.
package custom

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"strings"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1beta1"
	extensionsserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	extensionsopenapi "k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/registry/generic"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/notfoundhandler"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/informers"
	"k8s.io/kube-openapi/pkg/common"

	"github.com/fairlead/fairlead/internal/apiserver/backend"
	"github.com/fairlead/fairlead/internal/apiserver/openapi"
	"github.com/fairlead/fairlead/internal/apiserver/serve"
	"github.com/fairlead/fairlead/internal/registry"
)

// Server is the server of CustomResourceDefinitions and of the resources
// they define. The server of the built-in kinds delegates to it what it does not
// serve.
type Server struct {
	*extensionsserver.CustomResourceDefinitions
	served  *servedVersions
	maxBody int64 // bytes
	only    bool  // no other server has this etcd
}

// New builds the server with the configuration c of the delegating
// one. only is set if this is the only server of its etcd.
func New(
	c genericapiserver.Config, shared informers.SharedInformerFactory, back *backend.Backend,
	services webhook.ServiceResolver, credentials webhook.AuthenticationInfoResolverWrapper, only bool,
) (*Server, error) {
	c.PostStartHooks = map[string]genericapiserver.PostStartHookConfigEntry{}
	c.RESTOptionsGetter = definitionBackEnd{back}
	c.MergedResourceConfig = extensionsserver.DefaultAPIResourceConfigSource()
	served := newServedVersions(c.AggregatedDiscoveryGroupManager)
	c.AggregatedDiscoveryGroupManager = served
	known := &ruleless{}
	extra := extensionsserver.ExtraConfig{
		CRDRESTOptionsGetter: changingBackEnd{customBackEnd{back}, known},
		ServiceResolver:      services,
		AuthResolverWrapper:  credentials,
		// With several servers a definition is established after a delay in which
		// all of them learn of it.
		MasterCount: 2,
	}
	if only {
		extra.MasterCount = 1
	}
	config := extensionsserver.Config{
		GenericConfig: &genericapiserver.RecommendedConfig{Config: c, SharedInformerFactory: shared},
		ExtraConfig:   extra,
	}
	missing := notfoundhandler.New(registry.Codecs, genericapifilters.NoMuxAndDiscoveryIncompleteKey)
	s, err := config.Complete().New(genericapiserver.NewEmptyDelegateWithCustomHandler(serve.NameUnserved(missing)))
	if err != nil {
		return nil, fmt.Errorf("cannot make the server of custom resources: %w", err)
	}
	known.CustomResourceDefinitionInformer = s.Informers.Apiextensions().V1().CustomResourceDefinitions()
	if err := separateReads(s, &config, known, back); err != nil {
		return nil, fmt.Errorf("cannot make the server of custom resources: %w", err)
	}
	return &Server{s, served, c.MaxRequestBodyBytes, only}, nil
}

// Join makes front, the delegating server, serve the definitions, so that its OpenAPI
// documents and list of groups include them, and keeps the groups of the custom
// resources in that list.
func (r *Server) Join(front *genericapiserver.GenericAPIServer) error {
	for _, ws := range r.GenericAPIServer.Handler.GoRestfulContainer.RegisteredWebServices() {
		if strings.HasPrefix(ws.RootPath(), genericapiserver.APIGroupPrefix+"/"+apiextensions.GroupName) {
			front.Handler.GoRestfulContainer.Add(ws.Filter(rejectDeep(r.maxBody)))
		}
	}
	front.DiscoveryGroupManager.AddGroup(apiGroup(apiextensions.GroupName, []string{"v1"}))
	builtIn, err := front.DiscoveryGroupManager.Groups(context.Background(), &http.Request{})
	if err != nil {
		return err
	}
	r.served.list(front.DiscoveryGroupManager, builtIn)
	return nil
}

// OpenAPIDefinitions returns the schemas of the built-in kinds and of
// CustomResourceDefinitions.
func OpenAPIDefinitions(ref common.ReferenceCallback) map[string]common.OpenAPIDefinition {
	all := extensionsopenapi.GetOpenAPIDefinitions(ref)
	maps.Copy(all, openapi.GetOpenAPIDefinitions(ref))
	return all
}

// definitionBackEnd stores CustomResourceDefinitions as kube-apiserver does:
// JSON of the older version, which is shorter, so that the largest ones in use
// stay below etcd's limit of 1.5 MiB.
type definitionBackEnd struct{ *backend.Backend }

// GetRESTOptions returns the options of one resource.
func (b definitionBackEnd) GetRESTOptions(gr schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	codec := extensionsserver.Codecs.LegacyCodec(v1beta1.SchemeGroupVersion, apiextensionsv1.SchemeGroupVersion)
	return b.Options(gr, codec, runtime.NewMultiGroupVersioner(v1beta1.SchemeGroupVersion, schema.GroupKind{Group: v1beta1.GroupName})), nil
}

// customBackEnd stores custom resources: JSON, in the version that their
// definition names, which the storage of each has encoded before.
type customBackEnd struct{ *backend.Backend }

// GetRESTOptions returns the options of one resource.
func (b customBackEnd) GetRESTOptions(gr schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	return b.Options(gr, unstructured.UnstructuredJSONScheme, nil), nil
}
