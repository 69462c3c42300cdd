package networking

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway/fronts"
	"github.com/fairlead/fairlead/internal/registry/store"
)

// classAnnotation named the class of an Ingress before spec.ingressClassName.
const classAnnotation = "kubernetes.io/ingress.class"

// NewIngressStorage returns the storages of Ingresses and IngressClasses by
// resource path. They are kept for whoever implements them.
func NewIngressStorage(opts generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	rules := ingressRules()
	ingress, err := store.New(store.Kind{
		Resource: schema.GroupResource{Group: networkingv1.GroupName, Resource: "ingresses"},
		Singular: "ingress", ShortNames: []string{"ing"},
		New:      store.Empty[networkingv1.Ingress],
		NewList:  store.Empty[networkingv1.IngressList],
		Strategy: rules.Strategy(),
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
		New:      store.Empty[networkingv1.IngressClass],
		NewList:  store.Empty[networkingv1.IngressClassList],
		Strategy: classRules().Strategy(),
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
		"ingresses/status": store.NewSub(ingress, ingressStatusRules(rules).Strategy()),
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

func ingressRules() store.Rules[*networkingv1.Ingress] {
	return store.Rules[*networkingv1.Ingress]{
		APIVersion: apiVersion,
		Kept: []store.Part[*networkingv1.Ingress]{
			store.Field("status", func(i *networkingv1.Ingress) *networkingv1.IngressStatus { return &i.Status }),
		},
		Generation: func(i *networkingv1.Ingress) any { return &i.Spec },
		Validate: func(_ context.Context, i, prev *networkingv1.Ingress) field.ErrorList {
			if prev == nil {
				return validateIngress(i)
			}
			return validateIngressUpdate(i, prev)
		},
		Warn: func(i, prev *networkingv1.Ingress) []string {
			out := append(frontWarnings(i, prev), nginxWarnings(i, prev)...)
			_, annotated := i.Annotations[classAnnotation]
			switch {
			case prev != nil || i.Spec.IngressClassName != nil:
				return out
			case annotated:
				return append(out, fmt.Sprintf("annotation %q is deprecated, please use 'spec.ingressClassName' instead", classAnnotation))
			}
			return append(out, "spec.ingressClassName is not set and no IngressClass is the default: controllers that serve only a class "+
				"do not serve this Ingress (docs/compatibility.md)")
		},
	}
}

// frontWarnings returns why an Ingress has no front if fairlead serves it, if that is new.
func frontWarnings(i, prev *networkingv1.Ingress) []string {
	_, wrong := fronts.Read(i.Annotations)
	if wrong == "" || prev != nil && maps.Equal(i.Annotations, prev.Annotations) {
		return nil
	}
	return []string{strings.ToValidUTF8(wrong[:min(len(wrong), maxNginxWarningBytes)], "")}
}

// Bounds of the warnings about annotations of one Ingress, in number and bytes.
const (
	maxNginxWarnings     = 5
	maxNginxWarningBytes = 400
)

// nginxWarnings returns which annotations of ingress-nginx fairlead does not act on, if they are new. Another controller may.
func nginxWarnings(i, prev *networkingv1.Ingress) (out []string) {
	if prev != nil && maps.Equal(i.Annotations, prev.Annotations) {
		return nil
	}
	o := nginx.Read(i.Annotations)
	all := o.Ignored
	if o.Closed != "" {
		all = append([]string{o.Closed + "; if fairlead serves this Ingress, it answers requests for the paths with 503"}, all...)
	}
	for n, text := range all {
		if n == maxNginxWarnings {
			return append(out, "more annotations have no effect (docs/ingress.md)")
		}
		out = append(out, strings.ToValidUTF8(text[:min(len(text), maxNginxWarningBytes)], ""))
	}
	return out
}

func ingressStatusRules(r store.Rules[*networkingv1.Ingress]) store.Rules[*networkingv1.Ingress] {
	status := r.Sub(
		func(_ context.Context, i, prev *networkingv1.Ingress) field.ErrorList {
			return validateIngressStatus(i, prev)
		},
		store.Field("spec", func(i *networkingv1.Ingress) *networkingv1.IngressSpec { return &i.Spec }))
	status.Warn = func(i, _ *networkingv1.Ingress) (out []string) {
		path := field.NewPath("status", "loadBalancer", "ingress")
		for n, ing := range i.Status.LoadBalancer.Ingress {
			if ing.IP != "" {
				out = append(out, validation.GetWarningsForIP(path.Index(n), ing.IP)...)
			}
		}
		return out
	}
	return status
}

func classRules() store.Rules[*networkingv1.IngressClass] {
	return store.Rules[*networkingv1.IngressClass]{
		ClusterScoped: true,
		Generation:    func(c *networkingv1.IngressClass) any { return &c.Spec },
		Validate: func(_ context.Context, c, prev *networkingv1.IngressClass) field.ErrorList {
			if prev == nil {
				return validateClass(c)
			}
			return validateClassUpdate(c, prev)
		},
	}
}
