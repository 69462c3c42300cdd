package documents

import (
	"fmt"
	"strings"
	"sync"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	openapibuilder "k8s.io/kube-openapi/pkg/builder"
	"k8s.io/kube-openapi/pkg/common/restfuladapter"
	"k8s.io/kube-openapi/pkg/handler"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// swagger is the document of version 2, which describes all kinds.
type swagger struct {
	mu      sync.Mutex
	builtIn *spec.Swagger
	custom  map[string]described // by the name of the definition
	state   string               // of all that is in whole
	whole   *spec.Swagger
}

// described are the kinds of a definition.
type described struct {
	state string
	spec  *spec.Swagger
}

// swagger returns the document of version 2 and what identifies it. The library serves it and asks for it at each request.
func (d *documents) swagger() (*spec.Swagger, string, error) {
	crds, err := d.definitions()
	if err != nil {
		return nil, "", err
	}
	states := []string{d.program}
	for _, crd := range crds {
		states = append(states, state(crd))
	}
	v := &d.v2
	v.mu.Lock()
	defer v.mu.Unlock()
	if now := strings.Join(states, ";"); v.whole == nil || v.state != now {
		if err := d.mergeLocked(crds); err != nil {
			return nil, "", err
		}
		v.state = now
	}
	return v.whole, v.state, nil
}

// mergeLocked builds the document. Definitions that have not changed are not described again.
func (d *documents) mergeLocked(crds []*apiextensionsv1.CustomResourceDefinition) error {
	v := &d.v2
	if v.builtIn == nil {
		built, err := openapibuilder.BuildOpenAPISpecFromRoutes(
			restfuladapter.AdaptWebServices(d.o.Container.RegisteredWebServices()), d.o.V2)
		if err != nil {
			return fmt.Errorf("cannot describe the built-in kinds: %w", err)
		}
		built.Definitions = handler.PruneDefaults(built.Definitions)
		v.builtIn = built
	}
	next := make(map[string]described, len(crds))
	specs := make([]*spec.Swagger, 0, len(crds))
	for _, crd := range crds {
		kinds, ok := v.custom[crd.Name]
		if !ok || kinds.state != state(crd) {
			kinds = described{state(crd), d.describe(crd)}
		}
		next[crd.Name] = kinds
		specs = append(specs, kinds.spec)
	}
	whole, err := builder.MergeSpecs(v.builtIn, specs...)
	if err != nil {
		return fmt.Errorf("cannot merge the descriptions of custom resources: %w", err)
	}
	v.custom, v.whole = next, whole
	return nil
}

// describe returns the served versions of a definition. One that cannot be described is left out.
func (d *documents) describe(crd *apiextensionsv1.CustomResourceDefinition) *spec.Swagger {
	all := &spec.Swagger{}
	for _, version := range crd.Spec.Versions {
		if !version.Served {
			continue
		}
		one, err := builder.BuildOpenAPIV2(crd, version.Name, options(true))
		if err == nil {
			// The built-in kinds have no defaults either: with defaults the two do not merge.
			one.Definitions = handler.PruneDefaults(one.Definitions)
			one, err = builder.MergeSpecs(all, one)
		}
		if err != nil {
			d.undescribed(crd, version.Name, err)
			continue
		}
		all = one
	}
	return all
}

// undescribed logs that the documents lack a version of a definition.
func (d *documents) undescribed(crd *apiextensionsv1.CustomResourceDefinition, version string, err error) {
	d.o.Log.Warn("cannot describe a custom resource in OpenAPI; the document lacks it", "definition", crd.Name, "version", version, "err", err)
}
