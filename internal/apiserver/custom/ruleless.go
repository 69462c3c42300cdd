package custom

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	informers "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions/apiextensions/v1"
	listers "k8s.io/apiextensions-apiserver/pkg/client/listers/apiextensions/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
)

// ruleless is the informer of definitions, which it gives out without the rules of their schemas.
type ruleless struct {
	informers.CustomResourceDefinitionInformer // set before the first request

	mu   sync.Mutex
	made map[string]strippedDefinition // by name
}

// strippedDefinition is a definition of the informer, never changed, and how it is given out.
type strippedDefinition struct {
	from, to *apiextensionsv1.CustomResourceDefinition
	ruled    bool
}

// has reports whether the schemas of a kind have rules.
func (l *ruleless) has(gr schema.GroupResource) bool {
	d, err := l.CustomResourceDefinitionInformer.Lister().Get(gr.String())
	return err == nil && l.of(d).ruled
}

func (l *ruleless) of(d *apiextensionsv1.CustomResourceDefinition) strippedDefinition {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.made[d.Name]
	if s.from != d {
		s = strip(d)
		if l.made == nil {
			l.made = map[string]strippedDefinition{}
		}
		l.made[d.Name] = s
	}
	return s
}

// Lister returns a lister of the definitions without rules.
func (l *ruleless) Lister() listers.CustomResourceDefinitionLister {
	return rulelessLister{l.CustomResourceDefinitionInformer.Lister(), l}
}

// Informer returns an informer, whose handlers get the definitions without rules.
func (l *ruleless) Informer() cache.SharedIndexInformer {
	return rulelessInformer{l.CustomResourceDefinitionInformer.Informer(), l}
}

type rulelessLister struct {
	listers.CustomResourceDefinitionLister
	known *ruleless
}

// Get returns a definition.
func (l rulelessLister) Get(name string) (*apiextensionsv1.CustomResourceDefinition, error) {
	d, err := l.CustomResourceDefinitionLister.Get(name)
	if err != nil {
		return nil, err
	}
	return l.known.of(d).to, nil
}

// List returns the definitions that match.
func (l rulelessLister) List(which labels.Selector) ([]*apiextensionsv1.CustomResourceDefinition, error) {
	list, err := l.CustomResourceDefinitionLister.List(which)
	out := slices.Clone(list)
	for i, d := range out {
		out[i] = l.known.of(d).to
	}
	return out, err
}

type rulelessInformer struct {
	cache.SharedIndexInformer
	known *ruleless
}

// AddEventHandler calls h with each change.
func (i rulelessInformer) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	return i.SharedIndexInformer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { h.OnAdd(i.known.of(o.(*apiextensionsv1.CustomResourceDefinition)).to, false) },
		UpdateFunc: func(old, now any) { // of old only the UID matters
			h.OnUpdate(old, i.known.of(now.(*apiextensionsv1.CustomResourceDefinition)).to)
		},
		DeleteFunc: func(o any) {
			if key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(o); err == nil {
				i.known.mu.Lock()
				delete(i.known.made, key)
				i.known.mu.Unlock()
			}
			h.OnDelete(o)
		},
	})
}

// strip returns d as it is given out: it shares with d what has no rules.
func strip(d *apiextensionsv1.CustomResourceDefinition) strippedDefinition {
	out, ruled := *d, false
	for i := range d.Spec.Versions {
		schema := d.Spec.Versions[i].Schema
		if schema == nil || !hasRules(schema.OpenAPIV3Schema) {
			continue
		}
		if !ruled {
			out.Spec.Versions, ruled = slices.Clone(d.Spec.Versions), true
		}
		bare := withoutRules(schema.OpenAPIV3Schema)
		// The handler goes on with its watches unless the spec is another one: a change of rules ends them, as it does in the library.
		bare.Description = fmt.Sprintf("generation %d", d.Generation)
		out.Spec.Versions[i].Schema = &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: bare}
	}
	// The handler would put it into a queue of definitions to be established, which the first one does.
	if !apihelpers.IsCRDConditionTrue(d, apiextensionsv1.Established) && apihelpers.IsCRDConditionTrue(d, apiextensionsv1.NamesAccepted) {
		out.Status.Conditions = slices.Clone(d.Status.Conditions)
		apihelpers.SetCRDCondition(&out, apiextensionsv1.CustomResourceDefinitionCondition{
			Type: apiextensionsv1.Established, Status: apiextensionsv1.ConditionTrue,
		})
	}
	return strippedDefinition{d, &out, ruled}
}

// hasRules reports whether a schema has rules. Those below allOf, anyOf, oneOf and not do not count: they are rare, and may be compiled.
func hasRules(p *apiextensionsv1.JSONSchemaProps) bool {
	if p == nil {
		return false
	}
	if len(p.XValidations) > 0 || p.Items != nil && hasRules(p.Items.Schema) ||
		p.AdditionalProperties != nil && hasRules(p.AdditionalProperties.Schema) {
		return true
	}
	for name := range p.Properties {
		if child := p.Properties[name]; hasRules(&child) {
			return true
		}
	}
	return false
}

// withoutRules returns a copy of a schema without the rules that hasRules finds. It shares with p what has none.
func withoutRules(p *apiextensionsv1.JSONSchemaProps) *apiextensionsv1.JSONSchemaProps {
	out := *p
	out.XValidations = nil
	if p.Items != nil && hasRules(p.Items.Schema) {
		out.Items = &apiextensionsv1.JSONSchemaPropsOrArray{Schema: withoutRules(p.Items.Schema), JSONSchemas: p.Items.JSONSchemas}
	}
	if p.AdditionalProperties != nil && hasRules(p.AdditionalProperties.Schema) {
		out.AdditionalProperties = &apiextensionsv1.JSONSchemaPropsOrBool{
			Allows: p.AdditionalProperties.Allows, Schema: withoutRules(p.AdditionalProperties.Schema),
		}
	}
	out.Properties = maps.Clone(p.Properties)
	for name, child := range p.Properties {
		if hasRules(&child) {
			out.Properties[name] = *withoutRules(&child)
		}
	}
	return &out
}
