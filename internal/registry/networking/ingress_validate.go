package networking

import (
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	netutils "k8s.io/utils/net"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// maxController is the longest name of a controller, in bytes.
const maxController = 250

func validateIngress(i *networkingv1.Ingress) field.ErrorList {
	errs := store.ValidateMeta(&i.ObjectMeta, true, apivalidation.NameIsDNSSubdomain)
	errs = append(errs, validateIngressSpec(&i.Spec, nil, field.NewPath("spec"))...)
	if class, ok := i.Annotations[classAnnotation]; ok && i.Spec.IngressClassName != nil && class != *i.Spec.IngressClassName {
		errs = append(errs, field.Invalid(field.NewPath("annotations").Child(classAnnotation), class,
			"must match `ingressClassName` when both are specified"))
	}
	return errs
}

func validateIngressUpdate(i, old *networkingv1.Ingress) field.ErrorList {
	errs := store.ValidateMetaUpdate(&i.ObjectMeta, &old.ObjectMeta)
	errs = append(errs, store.ValidateMeta(&i.ObjectMeta, true, apivalidation.NameIsDNSSubdomain)...)
	return append(errs, validateIngressSpec(&i.Spec, &old.Spec, field.NewPath("spec"))...)
}

// validateIngressSpec checks s as a replacement of old, nil on create: a TLS
// secret of a bad name that is there already may stay.
func validateIngressSpec(s, old *networkingv1.IngressSpec, at *field.Path) (errs field.ErrorList) {
	if len(s.Rules) == 0 && s.DefaultBackend == nil {
		errs = append(errs, field.Invalid(at, s.Rules, "either `defaultBackend` or `rules` must be specified"))
	}
	if s.DefaultBackend != nil {
		errs = append(errs, validateBackend(s.DefaultBackend, at.Child("defaultBackend"))...)
	}
	for i := range s.Rules {
		errs = append(errs, validateRule(&s.Rules[i], at.Child("rules").Index(i))...)
	}
	errs = append(errs, validateTLS(s.TLS, old != nil && hasBadSecret(old.TLS), at.Child("tls"))...)
	if c := s.IngressClassName; c != nil {
		errs = append(errs, store.Invalids(at.Child("ingressClassName"), *c, apivalidation.NameIsDNSSubdomain(*c, false))...)
	}
	return errs
}

// hostMessages returns the errors of a host, which may begin with "*.".
func hostMessages(host string) []string {
	if strings.Contains(host, "*") {
		return validation.IsWildcardDNS1123Subdomain(host)
	}
	return validation.IsDNS1123Subdomain(host)
}

func secretMessages(name string) []string {
	if name == "" {
		return nil
	}
	return apivalidation.NameIsDNSSubdomain(name, false)
}

func hasBadSecret(tls []networkingv1.IngressTLS) bool {
	for _, t := range tls {
		if len(secretMessages(t.SecretName)) > 0 {
			return true
		}
	}
	return false
}

func validateTLS(tls []networkingv1.IngressTLS, anySecret bool, at *field.Path) (errs field.ErrorList) {
	for i, t := range tls {
		for j, host := range t.Hosts {
			errs = append(errs, store.Invalids(at.Index(i).Child("hosts").Index(j), host, hostMessages(host))...)
		}
		if !anySecret {
			errs = append(errs, store.Invalids(at.Index(i).Child("secretName"), t.SecretName, secretMessages(t.SecretName))...)
		}
	}
	return errs
}

func validateRule(r *networkingv1.IngressRule, at *field.Path) (errs field.ErrorList) {
	if r.Host != "" {
		if netutils.ParseIPSloppy(r.Host) != nil {
			errs = append(errs, field.Invalid(at.Child("host"), r.Host, "must be a DNS name, not an IP address"))
		}
		errs = append(errs, store.Invalids(at.Child("host"), r.Host, hostMessages(r.Host))...)
	}
	if r.HTTP == nil {
		return errs
	}
	paths := at.Child("http", "paths")
	if len(r.HTTP.Paths) == 0 {
		errs = append(errs, field.Required(paths, ""))
	}
	for i := range r.HTTP.Paths {
		errs = append(errs, validatePath(&r.HTTP.Paths[i], paths.Index(i))...)
	}
	return errs
}

func validatePath(p *networkingv1.HTTPIngressPath, at *field.Path) (errs field.ErrorList) {
	if p.PathType == nil {
		return field.ErrorList{field.Required(at.Child("pathType"), "pathType must be specified")}
	}
	where := at.Child("path")
	switch *p.PathType {
	case networkingv1.PathTypeExact, networkingv1.PathTypePrefix:
		if !strings.HasPrefix(p.Path, "/") {
			errs = append(errs, field.Invalid(where, p.Path, "must be an absolute path"))
		}
		for _, s := range []string{"//", "/./", "/../", "%2f", "%2F"} {
			if strings.Contains(p.Path, s) {
				errs = append(errs, field.Invalid(where, p.Path, "must not contain '"+s+"'"))
			}
		}
		for _, s := range []string{"/..", "/."} {
			if strings.HasSuffix(p.Path, s) {
				errs = append(errs, field.Invalid(where, p.Path, "cannot end with '"+s+"'"))
			}
		}
	case networkingv1.PathTypeImplementationSpecific:
		if p.Path != "" && !strings.HasPrefix(p.Path, "/") {
			errs = append(errs, field.Invalid(where, p.Path, "must be an absolute path"))
		}
	default:
		errs = append(errs, field.NotSupported(at.Child("pathType"), *p.PathType, []networkingv1.PathType{
			networkingv1.PathTypeExact, networkingv1.PathTypeImplementationSpecific, networkingv1.PathTypePrefix}))
	}
	return append(errs, validateBackend(&p.Backend, at.Child("backend"))...)
}

// validateBackend wants a Service or another object, not both.
func validateBackend(b *networkingv1.IngressBackend, at *field.Path) (errs field.ErrorList) {
	switch {
	case b.Resource != nil && b.Service != nil:
		return field.ErrorList{field.Invalid(at, "", "cannot set both resource and service backends")}
	case b.Resource != nil:
		return validateReference(b.Resource.APIGroup, b.Resource.Kind, b.Resource.Name, at.Child("resource"))
	case b.Service == nil:
		return field.ErrorList{field.Invalid(at, "", "resource or service backend is required")}
	}
	s, name := b.Service, at.Child("service", "name")
	if s.Name == "" {
		errs = append(errs, field.Required(name, ""))
	} else {
		errs = append(errs, store.Invalids(name, s.Name, apivalidation.NameIsDNSLabel(s.Name, false))...)
	}
	port := at.Child("service", "port")
	switch {
	case s.Port.Name != "" && s.Port.Number != 0:
		errs = append(errs, field.Invalid(at, "", "cannot set both port name & port number"))
	case s.Port.Name != "":
		errs = append(errs, store.Invalids(port.Child("name"), s.Port.Name, validation.IsValidPortName(s.Port.Name))...)
	case s.Port.Number != 0:
		errs = append(errs, store.Invalids(port.Child("number"), s.Port.Number, validation.IsValidPortNum(int(s.Port.Number)))...)
	default:
		errs = append(errs, field.Required(at, "port name or number is required"))
	}
	return errs
}

// validateReference checks what names an object of another kind.
func validateReference(group *string, kind, name string, at *field.Path) (errs field.ErrorList) {
	if group != nil {
		errs = append(errs, store.Invalids(at.Child("apiGroup"), *group, validation.IsDNS1123Subdomain(*group))...)
	}
	for _, f := range []struct{ name, value string }{{"kind", kind}, {"name", name}} {
		if f.value == "" {
			errs = append(errs, field.Required(at.Child(f.name), ""))
		} else {
			errs = append(errs, store.Invalids(at.Child(f.name), f.value, content.IsPathSegmentName(f.value))...)
		}
	}
	return errs
}

func validateIngressStatus(i, old *networkingv1.Ingress) field.ErrorList {
	errs := store.ValidateMetaUpdate(&i.ObjectMeta, &old.ObjectMeta)
	var known []string
	for _, ing := range old.Status.LoadBalancer.Ingress {
		if ing.IP != "" {
			known = append(known, ing.IP)
		}
	}
	path := field.NewPath("status", "loadBalancer", "ingress")
	for n, ing := range i.Status.LoadBalancer.Ingress {
		if ing.IP != "" {
			errs = append(errs, validation.IsValidIPForLegacyField(path.Index(n).Child("ip"), ing.IP, true, known)...)
		}
		if ing.Hostname == "" {
			continue
		}
		host := path.Index(n).Child("hostname")
		errs = append(errs, store.Invalids(host, ing.Hostname, validation.IsDNS1123Subdomain(ing.Hostname))...)
		if netutils.ParseIPSloppy(ing.Hostname) != nil {
			errs = append(errs, field.Invalid(host, ing.Hostname, "must be a DNS name, not an IP address"))
		}
	}
	return errs
}

func validateClass(c *networkingv1.IngressClass) field.ErrorList {
	errs := store.ValidateMeta(&c.ObjectMeta, false, apivalidation.NameIsDNSSubdomain)
	at := field.NewPath("spec", "controller")
	if len(c.Spec.Controller) > maxController {
		errs = append(errs, field.TooLong(at, "", maxController))
	}
	errs = append(errs, validation.IsDomainPrefixedPath(at, c.Spec.Controller)...)
	p := c.Spec.Parameters
	if p == nil {
		return errs
	}
	at = field.NewPath("spec", "parameters")
	errs = append(errs, validateReference(p.APIGroup, p.Kind, p.Name, at)...)
	return append(errs, validateScope(p, at)...)
}

// validateScope: a namespace goes with the scope Namespace, and only with it.
func validateScope(p *networkingv1.IngressClassParametersReference, at *field.Path) field.ErrorList {
	ns := at.Child("namespace")
	if p.Scope == nil {
		return field.ErrorList{field.Required(at.Child("scope"), "")}
	}
	switch *p.Scope {
	case networkingv1.IngressClassParametersReferenceScopeNamespace:
		if p.Namespace == nil {
			return field.ErrorList{field.Required(ns, "`parameters.scope` is set to 'Namespace'")}
		}
		return store.Invalids(ns, *p.Namespace, apivalidation.ValidateNamespaceName(*p.Namespace, false))
	case networkingv1.IngressClassParametersReferenceScopeCluster:
		if p.Namespace != nil {
			return field.ErrorList{field.Forbidden(ns, "`parameters.scope` is set to 'Cluster'")}
		}
		return nil
	}
	return field.ErrorList{field.NotSupported(at.Child("scope"), *p.Scope, []string{
		networkingv1.IngressClassParametersReferenceScopeCluster, networkingv1.IngressClassParametersReferenceScopeNamespace})}
}

func validateClassUpdate(c, old *networkingv1.IngressClass) field.ErrorList {
	errs := store.ValidateMetaUpdate(&c.ObjectMeta, &old.ObjectMeta)
	errs = append(errs, apivalidation.ValidateImmutableField(c.Spec.Controller, old.Spec.Controller, field.NewPath("spec", "controller"))...)
	return append(errs, validateClass(c)...)
}
