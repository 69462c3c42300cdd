package endpoint

import (
	"context"
	"fmt"
	"reflect"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	netutils "k8s.io/utils/net"

	"github.com/fairlead/fairlead/internal/checks"
	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/registry/service"
	"github.com/fairlead/fairlead/internal/registry/store"
	"github.com/fairlead/fairlead/internal/svc"
)

// The limits of Kubernetes v1.37.
const (
	maxTopologyLabels = 16
	maxAddresses      = 100
	maxPorts          = 20000
	maxEndpoints      = 1000
	maxHints          = 8
)

// setSliceDefaults: a port has a name, which may be empty, and a protocol.
func setSliceDefaults(s *discoveryv1.EndpointSlice) {
	for i := range s.Ports {
		p := &s.Ports[i]
		if p.Name == nil {
			p.Name = new("")
		}
		if p.Protocol == nil {
			p.Protocol = new(corev1.ProtocolTCP)
		}
	}
}

func sliceRules() store.Rules[*discoveryv1.EndpointSlice] {
	prepare := func(s *discoveryv1.EndpointSlice) {
		dropTopology(s)
		labelChecked(s)
	}
	return store.Rules[*discoveryv1.EndpointSlice]{
		Create: func(_ context.Context, s *discoveryv1.EndpointSlice) { prepare(s) },
		Update: func(s, _ *discoveryv1.EndpointSlice) { prepare(s) },
		// Labels count: they name the Service.
		Generation: func(s *discoveryv1.EndpointSlice) any { return []any{s.AddressType, s.Endpoints, s.Ports, s.Labels} },
		Validate: func(_ context.Context, s, prev *discoveryv1.EndpointSlice) field.ErrorList {
			errs := validateSlice(s, prev)
			if prev == nil {
				return store.Limit(errs)
			}
			immutable := apivalidation.ValidateImmutableField(s.AddressType, prev.AddressType, field.NewPath("addressType"))
			return store.Limit(append(errs, immutable...))
		},
		Warn: func(s, prev *discoveryv1.EndpointSlice) []string {
			var out []string
			if prev == nil && s.AddressType == discoveryv1.AddressTypeFQDN {
				out = append(out, fmt.Sprintf("%s: FQDN endpoints are deprecated", field.NewPath("spec", "addressType")))
			}
			return append(out, addressWarnings(s)...)
		},
	}
}

// dropTopology removes the deprecated topology, whose values have their own fields now.
// The v1 API accepts it for reading what older versions wrote only.
func dropTopology(s *discoveryv1.EndpointSlice) {
	for i := range s.Endpoints {
		s.Endpoints[i].DeprecatedTopology = nil
	}
}

// labelChecked keeps the label by which nodes find the slices that are checked.
func labelChecked(s *discoveryv1.EndpointSlice) {
	_, has := s.Labels[svc.CheckedLabel]
	_, asks := s.Annotations[svc.CheckAnnotation]
	switch {
	case asks:
		metav1.SetMetaDataLabel(&s.ObjectMeta, svc.CheckedLabel, "true")
	case has:
		delete(s.Labels, svc.CheckedLabel)
	}
}

// addressWarnings warns of addresses in an unusual spelling. The controllers
// never write such, and their slices are large, so those are not looked at.
func addressWarnings(s *discoveryv1.EndpointSlice) []string {
	switch s.Labels[discoveryv1.LabelManagedBy] {
	case epslice.ManagedBySelector, epslice.ManagedByMirroring:
		return nil
	}
	var out []string
	for i, ep := range s.Endpoints {
		for j, a := range ep.Addresses {
			out = append(out, validation.GetWarningsForIP(field.NewPath("endpoints").Index(i).Child("addresses").Index(j), a)...)
		}
	}
	return out
}

func validateSlice(s, old *discoveryv1.EndpointSlice) field.ErrorList {
	errs := store.ValidateMeta(&s.ObjectMeta, true, apivalidation.NameIsDNSSubdomain)
	at := field.NewPath("addressType")
	switch s.AddressType {
	case "":
		errs = append(errs, field.Required(at, ""))
	case discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN:
	default:
		errs = append(errs, field.NotSupported(at, s.AddressType,
			[]discoveryv1.AddressType{discoveryv1.AddressTypeFQDN, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6}))
	}
	errs = append(errs, validateSlicePorts(s.Ports, field.NewPath("ports"))...)
	errs = append(errs, checks.Validate(s)...)
	// Unchanged endpoints may have been accepted by older rules.
	if old == nil || !reflect.DeepEqual(s.Endpoints, old.Endpoints) {
		errs = append(errs, validateSliceEndpoints(s, field.NewPath("endpoints"))...)
	}
	return errs
}

func validateSliceEndpoints(s *discoveryv1.EndpointSlice, path *field.Path) field.ErrorList {
	if n := len(s.Endpoints); n > maxEndpoints {
		return field.ErrorList{field.TooMany(path, n, maxEndpoints)}
	}
	var errs field.ErrorList
	for i := range s.Endpoints {
		ep, at := &s.Endpoints[i], path.Index(i)
		addresses := at.Child("addresses")
		if n := len(ep.Addresses); n == 0 {
			errs = append(errs, field.Required(addresses, ""))
		} else if n > maxAddresses {
			errs = append(errs, field.TooMany(addresses, n, maxAddresses))
		}
		for j, a := range ep.Addresses {
			errs = append(errs, validateSliceAddress(s.AddressType, a, addresses, j)...)
		}
		if ep.NodeName != nil {
			errs = append(errs, store.Invalids(at.Child("nodeName"), *ep.NodeName, apivalidation.NameIsDNSSubdomain(*ep.NodeName, false))...)
		}
		topology := at.Child("deprecatedTopology")
		if n := len(ep.DeprecatedTopology); n > maxTopologyLabels {
			errs = append(errs, field.TooMany(topology, n, maxTopologyLabels))
		}
		errs = append(errs, metav1validation.ValidateLabels(ep.DeprecatedTopology, topology)...)
		if ep.Hostname != nil {
			errs = append(errs, store.Invalids(at.Child("hostname"), *ep.Hostname, validation.IsDNS1123Label(*ep.Hostname))...)
		}
		if ep.Hints != nil {
			errs = append(errs, validateHints(ep.Hints, at.Child("hints"))...)
		}
	}
	return errs
}

// validateSliceAddress checks a, the i-th address of the list at.
func validateSliceAddress(t discoveryv1.AddressType, a string, at *field.Path, i int) field.ErrorList {
	switch t {
	case discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6:
	case discoveryv1.AddressTypeFQDN:
		return validation.IsFullyQualifiedDomainName(at.Index(i), a)
	default:
		return nil // the type is rejected already
	}
	var errs field.ErrorList
	if t == discoveryv1.AddressTypeIPv6 { // one spelling of an address from the first version on
		errs = validation.IsValidIP(at.Index(i), a)
	} else {
		errs = validation.IsValidIPForLegacyField(at.Index(i), a, true, nil)
	}
	if len(errs) > 0 {
		return errs
	}
	if netutils.IsIPv6String(a) != (t == discoveryv1.AddressTypeIPv6) {
		errs = append(errs, field.Invalid(at, a, fmt.Sprintf("must be an %s address", t)))
	}
	return append(errs, service.ValidateEndpointIP(a, at.Index(i))...) // behaviour 24
}

func validateSlicePorts(ports []discoveryv1.EndpointPort, path *field.Path) field.ErrorList {
	if n := len(ports); n > maxPorts {
		return field.ErrorList{field.TooMany(path, n, maxPorts)}
	}
	var errs field.ErrorList
	names := map[string]bool{}
	for i := range ports {
		p, at := &ports[i], path.Index(i)
		name := ""
		if p.Name != nil {
			name = *p.Name
		}
		if name != "" {
			errs = append(errs, store.Invalids(at.Child("name"), name, validation.IsDNS1123Label(name))...)
		}
		if names[name] {
			errs = append(errs, field.Duplicate(at.Child("name"), name))
		}
		names[name] = true
		if p.Protocol == nil {
			errs = append(errs, field.Required(at.Child("protocol"), ""))
		} else {
			errs = append(errs, validateProtocol(*p.Protocol, at.Child("protocol"))...)
		}
		if p.AppProtocol != nil {
			errs = append(errs, store.Invalids(at.Child("appProtocol"), *p.AppProtocol, validation.IsQualifiedName(*p.AppProtocol))...)
		}
	}
	return errs
}

func validateHints(h *discoveryv1.EndpointHints, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	check := func(list string, names []string, valid func(string) []string) {
		at := path.Child(list)
		if len(names) > maxHints {
			errs = append(errs, field.TooMany(at, len(names), maxHints))
			return
		}
		seen := map[string]bool{}
		for i, n := range names {
			name := at.Index(i).Child("name")
			if seen[n] {
				errs = append(errs, field.Duplicate(name, n))
			}
			seen[n] = true
			errs = append(errs, store.Invalids(name, n, valid(n))...)
		}
	}
	var zones, nodes []string
	for _, z := range h.ForZones {
		zones = append(zones, z.Name)
	}
	for _, n := range h.ForNodes {
		nodes = append(nodes, n.Name)
	}
	check("forZones", zones, validation.IsValidLabelValue)
	check("forNodes", nodes, func(s string) []string { return apivalidation.NameIsDNSSubdomain(s, false) })
	return errs
}

// slicePortsText is "80,443"; a port without a number stands for all.
func slicePortsText(ports []discoveryv1.EndpointPort) string {
	var shown []string
	for i, p := range ports {
		if i == shownItems {
			break
		}
		switch {
		case p.Port != nil:
			shown = append(shown, strconv.Itoa(int(*p.Port)))
		case p.Name != nil && *p.Name != "":
			shown = append(shown, *p.Name)
		default:
			shown = append(shown, "*")
		}
	}
	return listText(shown, len(ports), "<unset>")
}

func sliceEndpointsText(eps []discoveryv1.Endpoint) string {
	var shown []string
	n := 0
	for _, ep := range eps {
		for _, a := range ep.Addresses {
			if n++; n <= shownItems {
				shown = append(shown, a)
			}
		}
	}
	return listText(shown, n, "<unset>")
}
