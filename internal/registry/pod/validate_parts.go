package pod

import (
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// validateProbe checks p; once is set where a single success must be enough, as
// for liveness and startup.
func validateProbe(p *corev1.Probe, once bool, at *field.Path) (errs field.ErrorList) {
	if p == nil {
		return nil
	}
	errs = append(errs, validateHandler(at, []handler{
		{"exec", p.Exec != nil, func(at *field.Path) field.ErrorList { return validateExec(p.Exec, at) }},
		{"httpGet", p.HTTPGet != nil, func(at *field.Path) field.ErrorList { return validateHTTP(p.HTTPGet, at) }},
		{"tcpSocket", p.TCPSocket != nil, func(at *field.Path) field.ErrorList { return validatePort(p.TCPSocket.Port, at.Child("port")) }},
		{"grpc", p.GRPC != nil, func(at *field.Path) field.ErrorList {
			return store.Invalids(at.Child("port"), p.GRPC.Port, utilvalidation.IsValidPortNum(int(p.GRPC.Port)))
		}},
	})...)
	for _, n := range []struct {
		name  string
		value int32
	}{
		{"initialDelaySeconds", p.InitialDelaySeconds}, {"timeoutSeconds", p.TimeoutSeconds}, {"periodSeconds", p.PeriodSeconds},
		{"successThreshold", p.SuccessThreshold}, {"failureThreshold", p.FailureThreshold},
	} {
		if n.value < 0 {
			errs = append(errs, field.Invalid(at.Child(n.name), n.value, "must be greater than or equal to 0"))
		}
	}
	if once && p.SuccessThreshold != 1 {
		errs = append(errs, field.Invalid(at.Child("successThreshold"), p.SuccessThreshold, "must be 1"))
	}
	if g := p.TerminationGracePeriodSeconds; g != nil && *g <= 0 {
		errs = append(errs, field.Invalid(at.Child("terminationGracePeriodSeconds"), *g, "must be greater than 0"))
	}
	return errs
}

func validateLifecycle(h *corev1.LifecycleHandler, at *field.Path) field.ErrorList {
	return validateHandler(at, []handler{
		{"exec", h.Exec != nil, func(at *field.Path) field.ErrorList { return validateExec(h.Exec, at) }},
		{"httpGet", h.HTTPGet != nil, func(at *field.Path) field.ErrorList { return validateHTTP(h.HTTPGet, at) }},
		{"tcpSocket", h.TCPSocket != nil, func(at *field.Path) field.ErrorList { return validatePort(h.TCPSocket.Port, at.Child("port")) }},
		{"sleep", h.Sleep != nil, func(*field.Path) field.ErrorList { return nil }},
	})
}

// handler is one of the ways to act on a container.
type handler struct {
	name  string
	set   bool
	check func(at *field.Path) field.ErrorList
}

// validateHandler wants exactly one of the handlers to be set.
func validateHandler(at *field.Path, handlers []handler) (errs field.ErrorList) {
	found := false
	for _, h := range handlers {
		switch {
		case !h.set:
		case found:
			errs = append(errs, field.Forbidden(at.Child(h.name), "may not specify more than 1 handler type"))
		default:
			found = true
			errs = append(errs, h.check(at.Child(h.name))...)
		}
	}
	if !found {
		errs = append(errs, field.Required(at, "must specify a handler type"))
	}
	return errs
}

func validateExec(e *corev1.ExecAction, at *field.Path) field.ErrorList {
	if len(e.Command) == 0 {
		return field.ErrorList{field.Required(at.Child("command"), "")}
	}
	return nil
}

func validateHTTP(h *corev1.HTTPGetAction, at *field.Path) (errs field.ErrorList) {
	if h.Path == "" {
		errs = append(errs, field.Required(at.Child("path"), ""))
	}
	errs = append(errs, validatePort(h.Port, at.Child("port"))...)
	errs = append(errs, oneOf(at.Child("scheme"), h.Scheme, corev1.URISchemeHTTP, corev1.URISchemeHTTPS)...)
	for _, header := range h.HTTPHeaders {
		errs = append(errs, store.Invalids(at.Child("httpHeaders"), header.Name, utilvalidation.IsHTTPHeaderName(header.Name))...)
	}
	return errs
}

// validatePort checks the number, or the name, of a container's port.
func validatePort(p intstr.IntOrString, at *field.Path) field.ErrorList {
	if p.Type == intstr.Int {
		return store.Invalids(at, p.IntValue(), utilvalidation.IsValidPortNum(p.IntValue()))
	}
	return store.Invalids(at, p.StrVal, utilvalidation.IsValidPortName(p.StrVal))
}

// validateVolumes returns the names of the volumes with what is wrong in them.
// The source of a volume is stored as it is: only sources that the agent mounts
// have an effect.
func validateVolumes(volumes []corev1.Volume, at *field.Path) (map[string]bool, field.ErrorList) {
	names, errs := map[string]bool{}, field.ErrorList{}
	for i, v := range volumes {
		p := at.Index(i)
		switch {
		case v.Name == "":
			errs = append(errs, field.Required(p.Child("name"), ""))
		case names[v.Name]:
			errs = append(errs, field.Duplicate(p.Child("name"), v.Name))
		default:
			errs = append(errs, store.Invalids(p.Child("name"), v.Name, utilvalidation.IsDNS1123Label(v.Name))...)
		}
		names[v.Name] = true
		if h := v.HostPath; h != nil {
			if h.Path == "" {
				errs = append(errs, field.Required(p.Child("hostPath", "path"), ""))
			} else if slices.Contains(strings.Split(h.Path, "/"), "..") {
				errs = append(errs, field.Invalid(p.Child("hostPath", "path"), h.Path, "must not contain '..'"))
			}
		}
		if s := v.Secret; s != nil && s.SecretName == "" {
			errs = append(errs, field.Required(p.Child("secret", "secretName"), ""))
		}
		if c := v.ConfigMap; c != nil {
			if c.Name == "" {
				errs = append(errs, field.Required(p.Child("configMap", "name"), ""))
			}
			for j, item := range c.Items {
				errs = append(errs, validateItem(item, p.Child("configMap", "items").Index(j))...)
			}
		}
	}
	return names, errs
}

func validateItem(item corev1.KeyToPath, at *field.Path) (errs field.ErrorList) {
	if item.Key == "" {
		errs = append(errs, field.Required(at.Child("key"), ""))
	}
	switch {
	case item.Path == "":
		errs = append(errs, field.Required(at.Child("path"), ""))
	case path.IsAbs(item.Path):
		errs = append(errs, field.Invalid(at.Child("path"), item.Path, "must be a relative path"))
	case slices.Contains(strings.Split(item.Path, "/"), ".."):
		errs = append(errs, field.Invalid(at.Child("path"), item.Path, "must not contain '..'"))
	}
	return errs
}
