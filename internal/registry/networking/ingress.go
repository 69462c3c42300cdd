package networking

import (
	"context"
	"fmt"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// classAnnotation named the class of an Ingress before spec.ingressClassName.
const classAnnotation = "kubernetes.io/ingress.class"

// NewIngressStorage returns the storages of Ingresses and IngressClasses by
// resource path. They are kept for whoever implements them.
func NewIngressStorage(opts generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	ingress, err := store.New(store.Kind{
		Resource: schema.GroupResource{Group: networkingv1.GroupName, Resource: "ingresses"},
		Singular: "ingress", ShortNames: []string{"ing"},
		New:      func() runtime.Object { return &networkingv1.Ingress{} },
		NewList:  func() runtime.Object { return &networkingv1.IngressList{} },
		Strategy: ingressStrategy{store.Namespaced()},
		Table: store.NewTable([]store.Column{
			{Name: "Class", Description: "The name of the IngressClass resource that should be used for additional configuration"},
			{Name: "Hosts", Description: "Hosts that incoming requests are matched against before the ingress rule"},
			{Name: "Address", Description: "Address is a list containing ingress points for the load-balancer"},
			{Name: "Ports", Description: "Ports of TLS configurations that open"},
			store.AgeColumn(),
		}, ingressCells),
	}, opts)
	if err != nil {
		return nil, err
	}
	class, err := store.New(store.Kind{
		Resource: schema.GroupResource{Group: networkingv1.GroupName, Resource: "ingressclasses"},
		Singular: "ingressclass",
		New:      func() runtime.Object { return &networkingv1.IngressClass{} },
		NewList:  func() runtime.Object { return &networkingv1.IngressClassList{} },
		Strategy: classStrategy{store.ClusterScoped()},
		Table: store.NewNamelessTable([]store.Column{
			{Name: "Name", IsName: true, Description: metav1.ObjectMeta{}.SwaggerDoc()["name"]},
			{Name: "Controller", Description: "Controller that is responsible for handling this class"},
			{Name: "Parameters", Description: "A reference to a resource with additional parameters"},
			store.AgeColumn(),
		}, classCells),
	}, opts)
	if err != nil {
		return nil, err
	}
	ingress.BeginCreate = giveDefaultClass(class)
	return map[string]rest.Storage{
		"ingresses":        ingress,
		"ingresses/status": store.NewSub(ingress, ingressStatusStrategy{ingressStrategy{store.Namespaced()}}),
		"ingressclasses":   class,
	}, nil
}

// setClassDefaults: parameters are of the whole cluster unless said otherwise.
func setClassDefaults(c *networkingv1.IngressClass) {
	if p := c.Spec.Parameters; p != nil && p.Scope == nil {
		p.Scope = new(networkingv1.IngressClassParametersReferenceScopeCluster)
	}
}

func ingressCells(i *networkingv1.Ingress) []any {
	class := "<none>"
	if i.Spec.IngressClassName != nil {
		class = *i.Spec.IngressClassName
	}
	ports := "80"
	if len(i.Spec.TLS) > 0 {
		ports = "80, 443"
	}
	return []any{class, hostsText(i.Spec.Rules), ingressAddress(i.Status.LoadBalancer.Ingress), ports, store.Age(i.CreationTimestamp)}
}

// hostsText is up to three hosts and how many rules there are beyond, or "*".
func hostsText(rules []networkingv1.IngressRule) string {
	const shown = 3
	var hosts []string
	more := false
	for _, r := range rules {
		more = more || len(hosts) == shown
		if !more && r.Host != "" {
			hosts = append(hosts, r.Host)
		}
	}
	if len(hosts) == 0 {
		return "*"
	}
	text := strings.Join(hosts, ",")
	if more {
		text += fmt.Sprintf(" + %d more...", len(rules)-shown)
	}
	return text
}

func ingressAddress(list []networkingv1.IngressLoadBalancerIngress) string {
	var out []string
	for _, i := range list {
		switch {
		case i.IP != "":
			out = append(out, i.IP)
		case i.Hostname != "":
			out = append(out, i.Hostname)
		}
	}
	slices.Sort(out)
	return strings.Join(slices.Compact(out), ",")
}

func classCells(c *networkingv1.IngressClass) []any {
	name := c.Name
	if c.Annotations[networkingv1.AnnotationIsDefaultIngressClass] == "true" {
		name += " (default)"
	}
	parameters := "<none>"
	if p := c.Spec.Parameters; p != nil {
		parameters = p.Kind
		if p.APIGroup != nil {
			parameters += "." + *p.APIGroup
		}
		parameters += "/" + p.Name
	}
	return []any{name, c.Spec.Controller, parameters, store.Age(c.CreationTimestamp)}
}

type ingressStrategy struct{ store.Base }

func (ingressStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"status"})
}

func (ingressStrategy) PrepareForCreate(_ context.Context, obj runtime.Object) {
	i := obj.(*networkingv1.Ingress)
	i.Generation, i.Status = 1, networkingv1.IngressStatus{}
}

func (ingressStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	i, prev := obj.(*networkingv1.Ingress), old.(*networkingv1.Ingress)
	i.Status = prev.Status
	if !equality.Semantic.DeepEqual(i.Spec, prev.Spec) {
		i.Generation = prev.Generation + 1
	}
}

func (ingressStrategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	return validateIngress(obj.(*networkingv1.Ingress))
}

func (ingressStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	return validateIngressUpdate(obj.(*networkingv1.Ingress), old.(*networkingv1.Ingress))
}

func (ingressStrategy) WarningsOnCreate(_ context.Context, obj runtime.Object) []string {
	i := obj.(*networkingv1.Ingress)
	if _, ok := i.Annotations[classAnnotation]; ok && i.Spec.IngressClassName == nil {
		return []string{fmt.Sprintf("annotation %q is deprecated, please use 'spec.ingressClassName' instead", classAnnotation)}
	}
	return nil
}

type ingressStatusStrategy struct{ ingressStrategy }

func (ingressStatusStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return store.ResetFields(apiVersion, []string{"spec"})
}

func (ingressStatusStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	obj.(*networkingv1.Ingress).Spec = old.(*networkingv1.Ingress).Spec
}

func (ingressStatusStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	return validateIngressStatus(obj.(*networkingv1.Ingress), old.(*networkingv1.Ingress))
}

func (ingressStatusStrategy) WarningsOnUpdate(_ context.Context, obj, _ runtime.Object) (out []string) {
	path := field.NewPath("status", "loadBalancer", "ingress")
	for i, ing := range obj.(*networkingv1.Ingress).Status.LoadBalancer.Ingress {
		if ing.IP != "" {
			out = append(out, validation.GetWarningsForIP(path.Index(i), ing.IP)...)
		}
	}
	return out
}

type classStrategy struct{ store.Base }

func (classStrategy) PrepareForCreate(_ context.Context, obj runtime.Object) {
	obj.(*networkingv1.IngressClass).Generation = 1
}

func (classStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	c, prev := obj.(*networkingv1.IngressClass), old.(*networkingv1.IngressClass)
	if !equality.Semantic.DeepEqual(c.Spec, prev.Spec) {
		c.Generation = prev.Generation + 1
	}
}

func (classStrategy) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	return validateClass(obj.(*networkingv1.IngressClass))
}

func (classStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	return validateClassUpdate(obj.(*networkingv1.IngressClass), old.(*networkingv1.IngressClass))
}
