package service

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	netutils "k8s.io/utils/net"

	"github.com/fairlead/fairlead/internal/registry/service/allocator"
	"github.com/fairlead/fairlead/internal/registry/store"
)

// ValidateCreate checks a new Service with its defaults and allocated values
// filled in.
func ValidateCreate(svc *corev1.Service) field.ErrorList {
	// A DNS-1123 label: it may begin with a digit (behaviour 9).
	errs := store.ValidateMeta(&svc.ObjectMeta, true, apivalidation.NameIsDNSLabel)
	return append(errs, validate(svc, nil)...)
}

// ValidateUpdate checks svc as a replacement of old.
func ValidateUpdate(svc, old *corev1.Service) field.ErrorList {
	errs := store.ValidateMetaUpdate(&svc.ObjectMeta, &old.ObjectMeta)
	errs = append(errs, validateClusterIPsUpdate(svc, old)...)
	errs = append(errs, validateFamiliesUpdate(svc, old)...)
	path := field.NewPath("spec")
	if old.Spec.Type == corev1.ServiceTypeLoadBalancer && svc.Spec.Type == corev1.ServiceTypeLoadBalancer &&
		!samePtr(old.Spec.LoadBalancerClass, svc.Spec.LoadBalancerClass) {
		errs = append(errs, field.Invalid(path.Child("loadBalancerClass"), svc.Spec.LoadBalancerClass, "may not change once set"))
	}
	if allocator.NeedsHealthCheckPort(old) && allocator.NeedsHealthCheckPort(svc) &&
		old.Spec.HealthCheckNodePort != svc.Spec.HealthCheckNodePort {
		errs = append(errs, field.Forbidden(path.Child("healthCheckNodePort"), "field is immutable"))
	}
	return append(errs, validate(svc, old)...)
}

// ValidateStatusUpdate checks the status of svc.
func ValidateStatusUpdate(svc, old *corev1.Service) field.ErrorList {
	errs := store.ValidateMetaUpdate(&svc.ObjectMeta, &old.ObjectMeta)
	path := field.NewPath("status", "loadBalancer", "ingress")
	ingress := svc.Status.LoadBalancer.Ingress
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer && len(ingress) > 0 {
		return append(errs, field.Forbidden(path, "may only be used when `spec.type` is 'LoadBalancer'"))
	}
	var oldIPs []string
	for _, ing := range old.Status.LoadBalancer.Ingress {
		oldIPs = append(oldIPs, ing.IP)
	}
	for i := range ingress {
		errs = append(errs, validateIngress(&ingress[i], oldIPs, path.Index(i))...)
	}
	return errs
}

func validateIngress(ing *corev1.LoadBalancerIngress, oldIPs []string, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if ing.IP != "" {
		errs = append(errs, validation.IsValidIPForLegacyField(path.Child("ip"), ing.IP, true, oldIPs)...)
	}
	mode := path.Child("ipMode")
	switch {
	case ing.IPMode == nil:
		if ing.IP != "" {
			errs = append(errs, field.Required(mode, "must be specified when `ip` is set"))
		}
	case ing.IP == "":
		errs = append(errs, field.Forbidden(mode, "may not be specified when `ip` is not set"))
	default:
		errs = append(errs, notIn(mode, *ing.IPMode, corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy)...)
	}
	if ing.Hostname != "" {
		host := path.Child("hostname")
		errs = append(errs, store.Invalids(host, ing.Hostname, validation.IsDNS1123Subdomain(ing.Hostname))...)
		if netutils.ParseIPSloppy(ing.Hostname) != nil {
			errs = append(errs, field.Invalid(host, ing.Hostname, "must be a DNS name, not an IP address"))
		}
	}
	return errs
}

// validate checks everything but the metadata. Values that old has already are
// not rejected for their spelling.
func validate(svc, old *corev1.Service) field.ErrorList {
	path := field.NewPath("spec")
	errs := validateTopologyAnnotations(svc)
	errs = append(errs, validateType(svc, path)...)
	errs = append(errs, validatePorts(svc, path.Child("ports"))...)
	if svc.Spec.Selector != nil {
		errs = append(errs, metav1validation.ValidateLabels(svc.Spec.Selector, path.Child("selector"))...)
	}
	errs = append(errs, validateAffinity(svc, path)...)
	errs = append(errs, validateClusterIPs(svc, old)...)
	errs = append(errs, validateExternalIPs(svc, old, path.Child("externalIPs"))...)
	errs = append(errs, validateNodePorts(svc, path.Child("ports"))...)
	errs = append(errs, validateSourceRanges(svc, old, path)...)
	errs = append(errs, validateLoadBalancerFields(svc, path)...)
	errs = append(errs, validatePolicies(svc, path)...)
	return errs
}

func validateTopologyAnnotations(svc *corev1.Service) field.ErrorList {
	hints, oldSet := svc.Annotations[deprecatedHints]
	mode, newSet := svc.Annotations[corev1.AnnotationTopologyMode]
	if oldSet && newSet && hints != mode {
		path := field.NewPath("metadata", "annotations").Key(corev1.AnnotationTopologyMode)
		return field.ErrorList{field.Invalid(path, mode, fmt.Sprintf("must match annotations[%s] when both are specified", deprecatedHints))}
	}
	return nil
}

// validateType checks the type and what each type asks for or rules out
// (behaviours 84 to 88).
func validateType(svc *corev1.Service, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	spec := &svc.Spec
	if len(spec.Ports) == 0 && !allocator.IsHeadless(svc) && spec.Type != corev1.ServiceTypeExternalName {
		errs = append(errs, field.Required(path.Child("ports"), ""))
	}
	if allocator.IsHeadless(svc) && (spec.Type == corev1.ServiceTypeLoadBalancer || spec.Type == corev1.ServiceTypeNodePort) {
		errs = append(errs, field.Invalid(path.Child("clusterIPs").Index(0), spec.ClusterIPs[0],
			fmt.Sprintf("may not be set to 'None' for %s services", spec.Type)))
	}
	if spec.Type == corev1.ServiceTypeExternalName {
		errs = append(errs, validateExternalName(spec, path)...)
	}
	if spec.Type == "" {
		errs = append(errs, field.Required(path.Child("type"), ""))
	} else {
		errs = append(errs, notIn(path.Child("type"), spec.Type, corev1.ServiceTypeClusterIP, corev1.ServiceTypeExternalName,
			corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeNodePort)...)
	}
	return errs
}

// validateExternalName: a DNS name, which may look like an IPv4 address but is
// not taken for one (behaviours 150 to 152).
func validateExternalName(spec *corev1.ServiceSpec, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(spec.ClusterIPs) > 0 {
		errs = append(errs, field.Forbidden(path.Child("clusterIPs"), "may not be set for ExternalName services"))
	}
	if len(spec.IPFamilies) > 0 {
		errs = append(errs, field.Forbidden(path.Child("ipFamilies"), "may not be set for ExternalName services"))
	}
	if spec.IPFamilyPolicy != nil {
		errs = append(errs, field.Forbidden(path.Child("ipFamilyPolicy"), "may not be set for ExternalName services"))
	}
	name := strings.TrimSuffix(spec.ExternalName, ".")
	if name == "" {
		return append(errs, field.Required(path.Child("externalName"), ""))
	}
	return append(errs, store.Invalids(path.Child("externalName"), name, validation.IsDNS1123Subdomain(name))...)
}

// validatePorts checks each port, and that names and pairs of port and protocol
// are not repeated (behaviours 63, 64).
func validatePorts(svc *corev1.Service, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	names := map[string]bool{}
	for i := range svc.Spec.Ports {
		p := &svc.Spec.Ports[i]
		at := path.Index(i)
		switch {
		case p.Name != "":
			errs = append(errs, store.Invalids(at.Child("name"), p.Name, validation.IsDNS1123Label(p.Name))...)
			if names[p.Name] {
				errs = append(errs, field.Duplicate(at.Child("name"), p.Name))
			}
			names[p.Name] = true
		case len(svc.Spec.Ports) > 1:
			errs = append(errs, field.Required(at.Child("name"), ""))
		}
		errs = append(errs, validatePort(p, at)...)
	}
	pairs := map[corev1.ServicePort]bool{}
	for i, p := range svc.Spec.Ports {
		key := corev1.ServicePort{Protocol: p.Protocol, Port: p.Port}
		if pairs[key] {
			errs = append(errs, field.Duplicate(path.Index(i), key))
		}
		pairs[key] = true
	}
	return errs
}

func validatePort(p *corev1.ServicePort, path *field.Path) field.ErrorList {
	errs := store.Invalids(path.Child("port"), p.Port, validation.IsValidPortNum(int(p.Port)))
	if p.Protocol == "" {
		errs = append(errs, field.Required(path.Child("protocol"), ""))
	} else {
		errs = append(errs, notIn(path.Child("protocol"), p.Protocol, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)...)
	}
	if p.TargetPort.Type == intstr.Int {
		errs = append(errs, store.Invalids(path.Child("targetPort"), p.TargetPort.IntVal, validation.IsValidPortNum(p.TargetPort.IntValue()))...)
	} else {
		errs = append(errs, store.Invalids(path.Child("targetPort"), p.TargetPort.StrVal, validation.IsValidPortName(p.TargetPort.StrVal))...)
	}
	if p.AppProtocol != nil { // behaviour 31
		errs = append(errs, store.Invalids(path.Child("appProtocol"), *p.AppProtocol, validation.IsQualifiedName(*p.AppProtocol))...)
	}
	return errs
}

func validateNodePorts(svc *corev1.Service, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	type pair struct {
		protocol corev1.Protocol
		port     int32
	}
	seen := map[pair]bool{}
	for i, p := range svc.Spec.Ports {
		if p.NodePort == 0 {
			continue
		}
		at := path.Index(i).Child("nodePort")
		if svc.Spec.Type == corev1.ServiceTypeClusterIP {
			errs = append(errs, field.Forbidden(at, "may not be used when `type` is 'ClusterIP'"))
		}
		if seen[pair{p.Protocol, p.NodePort}] {
			errs = append(errs, field.Duplicate(at, p.NodePort))
		}
		seen[pair{p.Protocol, p.NodePort}] = true
	}
	return errs
}

// validateAffinity: behaviours 61, 62.
func validateAffinity(svc *corev1.Service, path *field.Path) field.ErrorList {
	affinity, config := svc.Spec.SessionAffinity, svc.Spec.SessionAffinityConfig
	at := path.Child("sessionAffinityConfig")
	switch affinity {
	case "":
		return field.ErrorList{field.Required(path.Child("sessionAffinity"), "")}
	case corev1.ServiceAffinityNone:
		if config != nil {
			return field.ErrorList{field.Forbidden(at, fmt.Sprintf("must not be set when session affinity is %s", affinity))}
		}
		return nil
	case corev1.ServiceAffinityClientIP:
		why := fmt.Sprintf("when session affinity type is %s", affinity)
		ip := at.Child("clientIP")
		switch {
		case config == nil:
			return field.ErrorList{field.Required(at, why)}
		case config.ClientIP == nil:
			return field.ErrorList{field.Required(ip, why)}
		case config.ClientIP.TimeoutSeconds == nil:
			return field.ErrorList{field.Required(ip.Child("timeoutSeconds"), why)}
		}
		if s := *config.ClientIP.TimeoutSeconds; s <= 0 || s > maxAffinitySeconds {
			return field.ErrorList{field.Invalid(ip.Child("timeoutSeconds"), s,
				fmt.Sprintf("must be greater than 0 and less than %d", maxAffinitySeconds))}
		}
		return nil
	}
	return notIn(path.Child("sessionAffinity"), affinity, corev1.ServiceAffinityClientIP, corev1.ServiceAffinityNone)
}

// maxAffinitySeconds is one day.
const maxAffinitySeconds = 86400

func validateExternalIPs(svc, old *corev1.Service, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	var known []string
	if old != nil {
		known = old.Spec.ExternalIPs
	}
	for i, ip := range svc.Spec.ExternalIPs {
		if bad := validation.IsValidIPForLegacyField(path.Index(i), ip, true, known); len(bad) > 0 {
			errs = append(errs, bad...)
			continue
		}
		errs = append(errs, ValidateEndpointIP(ip, path.Index(i))...)
	}
	return errs
}

// ValidateEndpointIP rejects the addresses that may not be a destination of a
// Service: unspecified, loopback and link-local ones (behaviours 24, 158).
func ValidateEndpointIP(ip string, path *field.Path) field.ErrorList {
	a := netutils.ParseIPSloppy(ip)
	if a == nil {
		return field.ErrorList{field.Invalid(path, ip, "must be a valid IP address")}
	}
	var errs field.ErrorList
	if a.IsUnspecified() {
		errs = append(errs, field.Invalid(path, ip, fmt.Sprintf("may not be unspecified (%v)", ip)))
	}
	if a.IsLoopback() {
		errs = append(errs, field.Invalid(path, ip, "may not be in the loopback range (127.0.0.0/8, ::1/128)"))
	}
	if a.IsLinkLocalUnicast() {
		errs = append(errs, field.Invalid(path, ip, "may not be in the link-local range (169.254.0.0/16, fe80::/10)"))
	}
	if a.IsLinkLocalMulticast() {
		errs = append(errs, field.Invalid(path, ip, "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"))
	}
	return errs
}

// validateSourceRanges checks the field, or where it is empty the annotation
// that it replaced (behaviour 101). The capital letter in the path is Kubernetes'.
func validateSourceRanges(svc, old *corev1.Service, path *field.Path) field.ErrorList {
	at := path.Child("LoadBalancerSourceRanges")
	value, annotated := svc.Annotations[corev1.AnnotationLoadBalancerSourceRangesKey]
	ranges, indexed := svc.Spec.LoadBalancerSourceRanges, true
	if len(ranges) == 0 {
		if !annotated {
			return nil
		}
		at, indexed = field.NewPath("metadata", "annotations").Key(corev1.AnnotationLoadBalancerSourceRangesKey), false
		ranges = splitRanges(value)
	}
	var errs field.ErrorList
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
		errs = append(errs, field.Forbidden(at, "may only be used when `type` is 'LoadBalancer'"))
	}
	var known []string
	if old != nil {
		known = append(slices.Clone(old.Spec.LoadBalancerSourceRanges),
			splitRanges(old.Annotations[corev1.AnnotationLoadBalancerSourceRangesKey])...)
	}
	for i := range known {
		known[i] = strings.TrimSpace(known[i])
	}
	for i, r := range ranges {
		where := at
		if indexed {
			where = at.Index(i)
		}
		errs = append(errs, validation.IsValidCIDRForLegacyField(where, strings.TrimSpace(r), true, known)...)
	}
	return errs
}

func splitRanges(s string) []string {
	if s = strings.TrimSpace(s); s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

func validateLoadBalancerFields(svc *corev1.Service, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	spec, isLB := &svc.Spec, svc.Spec.Type == corev1.ServiceTypeLoadBalancer
	const onlyLB = "may only be used when `type` is 'LoadBalancer'"
	switch {
	case spec.AllocateLoadBalancerNodePorts != nil && !isLB:
		errs = append(errs, field.Forbidden(path.Child("allocateLoadBalancerNodePorts"), onlyLB))
	case spec.AllocateLoadBalancerNodePorts == nil && isLB:
		errs = append(errs, field.Required(field.NewPath("allocateLoadBalancerNodePorts"), ""))
	}
	if class := spec.LoadBalancerClass; class != nil {
		if isLB {
			errs = append(errs, store.Invalids(path.Child("loadBalancerClass"), *class, validation.IsQualifiedName(*class))...)
		} else {
			errs = append(errs, field.Forbidden(path.Child("loadBalancerClass"), onlyLB))
		}
	}
	return errs
}

// validatePolicies checks the traffic policies (behaviours 102, 103) and the traffic
// distribution.
func validatePolicies(svc *corev1.Service, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	spec := &svc.Spec
	external := path.Child("externalTrafficPolicy")
	switch {
	case !externallyAccessible(svc):
		if spec.ExternalTrafficPolicy != "" {
			errs = append(errs, field.Invalid(external, spec.ExternalTrafficPolicy, "may only be set for externally-accessible services"))
		}
	case spec.ExternalTrafficPolicy == "":
		errs = append(errs, field.Required(external, ""))
	default:
		errs = append(errs, notIn(external, spec.ExternalTrafficPolicy,
			corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)...)
	}
	health := path.Child("healthCheckNodePort")
	switch {
	case !allocator.NeedsHealthCheckPort(svc):
		if spec.HealthCheckNodePort != 0 {
			errs = append(errs, field.Invalid(health, spec.HealthCheckNodePort,
				"may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"))
		}
	case spec.HealthCheckNodePort == 0:
		errs = append(errs, field.Required(health, ""))
	default:
		errs = append(errs, store.Invalids(health, spec.HealthCheckNodePort, validation.IsValidPortNum(int(spec.HealthCheckNodePort)))...)
	}
	if p := spec.InternalTrafficPolicy; p != nil {
		errs = append(errs, notIn(path.Child("internalTrafficPolicy"), *p,
			corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)...)
	} else if allocator.NeedsNodePort(svc) || spec.Type == corev1.ServiceTypeClusterIP {
		errs = append(errs, field.Required(path.Child("internalTrafficPolicy"), ""))
	}
	if d := spec.TrafficDistribution; d != nil {
		known := []string{
			corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone,
			corev1.ServiceTrafficDistributionPreferSameNode,
		}
		if !slices.Contains(known, *d) {
			errs = append(errs, field.NotSupported(path.Child("trafficDistribution"), *d, known))
		}
	}
	return errs
}

// validateStrict is the rule of Kubernetes before 1.26, for load balancers that
// know no better: the ports of a load balancer have one protocol (behaviour 96),
// and it is not SCTP (behaviour 105) unless a class states that the load balancer is
// not the cluster's own. A Service that breaks the rule already may go on as it is.
func validateStrict(svc, old *corev1.Service) (errs field.ErrorList) {
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil
	}
	protocols := protocolsOf(svc)
	if old != nil && old.Spec.Type == corev1.ServiceTypeLoadBalancer && slices.Equal(protocols, protocolsOf(old)) {
		return nil
	}
	path := field.NewPath("spec", "ports")
	if len(protocols) > 1 {
		errs = append(errs, field.Invalid(path, fmt.Sprint(protocols),
			"must all have one protocol: load balancers of several protocols are switched off by --strict-load-balancers"))
	}
	for i, p := range svc.Spec.Ports {
		if p.Protocol == corev1.ProtocolSCTP && svc.Spec.LoadBalancerClass == nil {
			errs = append(errs, field.NotSupported(path.Index(i).Child("protocol"), p.Protocol,
				[]corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP}))
		}
	}
	return errs
}

// protocolsOf returns the protocols of the ports, each once, in order.
func protocolsOf(svc *corev1.Service) (out []corev1.Protocol) {
	for _, p := range svc.Spec.Ports {
		out = append(out, p.Protocol)
	}
	slices.Sort(out)
	return slices.Compact(out)
}
