// Package documents serves the OpenAPI documents of an API server. Each is built when a client first asks for it: most servers
// are asked for few of them, and building all takes more than a fifth of the processor time of a server's start.
package documents

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/emicklei/go-restful/v3"
	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	listers "k8s.io/apiextensions-apiserver/pkg/client/listers/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/kube-openapi/pkg/cached"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/handler"
)

// Options are the options of Install.
type Options struct {
	// V2 and V3 describe the built-in kinds. Container has their routes; it must not change any more.
	V2        *common.Config
	V3        *common.OpenAPIV3Config
	Container *restful.Container
	// Definitions lists the definitions of custom resources, which the documents include once they are established.
	Definitions listers.CustomResourceDefinitionLister
	Log         *slog.Logger
}

// documents builds the documents, and keeps each that a client has asked for.
type documents struct {
	o       Options
	program string // programID
	// builtIn are the paths of the documents of version 3 of built-in kinds.
	builtIn func() map[string]*source

	mu   sync.Mutex
	kept map[string]*document // of version 3, by path

	v2 swagger
}

// Install serves the documents at the paths of Kubernetes.
func Install(to *mux.PathRecorderMux, o Options) {
	d := &documents{o: o, program: programID(), kept: map[string]*document{}}
	d.builtIn = sync.OnceValue(d.listBuiltIn)
	handler.NewOpenAPIServiceLazy(cached.Func(d.swagger)).RegisterOpenAPIVersionedService("/openapi/v2", to)
	to.HandleFunc(root, d.serveIndex)
	to.HandlePrefix(root+"/", d)
}

// definitions returns the established definitions, in the order of their names.
func (d *documents) definitions() ([]*apiextensionsv1.CustomResourceDefinition, error) {
	all, err := d.o.Definitions.List(labels.Everything())
	if err != nil {
		return nil, fmt.Errorf("cannot list the definitions of custom resources: %w", err)
	}
	established := slices.DeleteFunc(slices.Clone(all), func(crd *apiextensionsv1.CustomResourceDefinition) bool {
		return !apihelpers.IsCRDConditionTrue(crd, apiextensionsv1.Established)
	})
	slices.SortFunc(established, func(a, b *apiextensionsv1.CustomResourceDefinition) int { return cmp.Compare(a.Name, b.Name) })
	return established, nil
}

// state identifies the schemas of a definition.
func state(crd *apiextensionsv1.CustomResourceDefinition) string {
	return fmt.Sprintf("%s,%d", crd.UID, crd.Generation)
}

// options returns how the library describes custom resources.
func options(v2 bool) builder.Options { return builder.Options{V2: v2, IncludeSelectableFields: true} }
