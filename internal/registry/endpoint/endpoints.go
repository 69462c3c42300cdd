package endpoint

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/registry/service"
	"github.com/fairlead/fairlead/internal/registry/store"
)

// setEndpointsDefaults: a port without a protocol is TCP.
func setEndpointsDefaults(e *corev1.Endpoints) {
	for i := range e.Subsets {
		for j := range e.Subsets[i].Ports {
			if p := &e.Subsets[i].Ports[j]; p.Protocol == "" {
				p.Protocol = corev1.ProtocolTCP
			}
		}
	}
}

func endpointsRules() store.Rules[*corev1.Endpoints] {
	return store.Rules[*corev1.Endpoints]{
		CreateOnUpdate: true, // as Kubernetes has it for Endpoints
		Validate: func(_ context.Context, e, prev *corev1.Endpoints) field.ErrorList {
			var errs field.ErrorList
			if prev != nil {
				errs = store.ValidateMetaUpdate(&e.ObjectMeta, &prev.ObjectMeta)
			}
			return store.Limit(append(errs, validateEndpoints(e, prev)...))
		},
		Warn: func(e, _ *corev1.Endpoints) []string { return endpointsWarnings(e) },
	}
}

func endpointsWarnings(e *corev1.Endpoints) []string {
	var out []string
	for i := range e.Subsets {
		at := field.NewPath("subsets").Index(i)
		for j := range e.Subsets[i].Addresses {
			out = append(out, validation.GetWarningsForIP(at.Child("addresses").Index(j).Child("ip"), e.Subsets[i].Addresses[j].IP)...)
		}
		for j := range e.Subsets[i].NotReadyAddresses {
			out = append(out, validation.GetWarningsForIP(at.Child("notReadyAddresses").Index(j).Child("ip"),
				e.Subsets[i].NotReadyAddresses[j].IP)...)
		}
	}
	return out
}

// validateEndpoints checks the object. Unchanged subsets are not checked again:
// they may have been accepted by older rules.
func validateEndpoints(e, old *corev1.Endpoints) field.ErrorList {
	errs := store.ValidateMeta(&e.ObjectMeta, true, apivalidation.NameIsDNSSubdomain) // behaviour 20
	if old != nil && equality.Semantic.DeepEqual(e.Subsets, old.Subsets) {
		return errs
	}
	path := field.NewPath("subsets")
	for i := range e.Subsets {
		s, at := &e.Subsets[i], path.Index(i)
		if len(s.Addresses) == 0 && len(s.NotReadyAddresses) == 0 {
			errs = append(errs, field.Required(at, "must specify `addresses` or `notReadyAddresses`"))
		}
		for j := range s.Addresses {
			errs = append(errs, validateAddress(&s.Addresses[j], at.Child("addresses").Index(j))...)
		}
		for j := range s.NotReadyAddresses {
			errs = append(errs, validateAddress(&s.NotReadyAddresses[j], at.Child("notReadyAddresses").Index(j))...)
		}
		for j := range s.Ports {
			errs = append(errs, validatePort(&s.Ports[j], len(s.Ports) > 1, at.Child("ports").Index(j))...)
		}
	}
	return errs
}

func validateAddress(a *corev1.EndpointAddress, at *field.Path) field.ErrorList {
	errs := validation.IsValidIPForLegacyField(at.Child("ip"), a.IP, true, nil)
	if a.Hostname != "" {
		errs = append(errs, store.Invalids(at.Child("hostname"), a.Hostname, validation.IsDNS1123Label(a.Hostname))...)
	}
	if a.NodeName != nil {
		errs = append(errs, store.Invalids(at.Child("nodeName"), *a.NodeName, apivalidation.NameIsDNSSubdomain(*a.NodeName, false))...)
	}
	return append(errs, service.ValidateEndpointIP(a.IP, at.Child("ip"))...) // behaviour 24
}

func validatePort(p *corev1.EndpointPort, nameRequired bool, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	switch {
	case p.Name != "":
		errs = append(errs, store.Invalids(at.Child("name"), p.Name, validation.IsDNS1123Label(p.Name))...)
	case nameRequired:
		errs = append(errs, field.Required(at.Child("name"), ""))
	}
	errs = append(errs, store.Invalids(at.Child("port"), p.Port, validation.IsValidPortNum(int(p.Port)))...)
	if p.Protocol == "" {
		errs = append(errs, field.Required(at.Child("protocol"), ""))
	} else {
		errs = append(errs, validateProtocol(p.Protocol, at.Child("protocol"))...)
	}
	if p.AppProtocol != nil {
		errs = append(errs, store.Invalids(at.Child("appProtocol"), *p.AppProtocol, validation.IsQualifiedName(*p.AppProtocol))...)
	}
	return errs
}

func validateProtocol(p corev1.Protocol, at *field.Path) field.ErrorList {
	switch p {
	case corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP:
		return nil
	}
	return field.ErrorList{field.NotSupported(at, p, []corev1.Protocol{corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP})}
}

// endpointsText is what kubectl get shows: the first three ready addresses with
// each port, and how many more there are.
func endpointsText(e *corev1.Endpoints) string {
	var shown []string
	n := 0
	add := func(s string) {
		if n++; n <= shownItems {
			shown = append(shown, s)
		}
	}
	for i := range e.Subsets {
		s := &e.Subsets[i]
		if len(s.Ports) == 0 {
			for _, a := range s.Addresses {
				add(a.IP)
			}
		}
		for _, p := range s.Ports {
			for _, a := range s.Addresses {
				add(net.JoinHostPort(a.IP, strconv.Itoa(int(p.Port))))
			}
		}
	}
	if len(e.Subsets) == 0 {
		return "<none>"
	}
	return listText(shown, n, "")
}

// shownItems is how many items of a list a table shows.
const shownItems = 3

// listText joins shown, of total items; empty stands for none.
func listText(shown []string, total int, empty string) string {
	text := strings.Join(shown, ",")
	if total > len(shown) {
		return fmt.Sprintf("%s + %d more...", text, total-len(shown))
	}
	if text == "" {
		return empty
	}
	return text
}
