package epslice

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	utilnet "k8s.io/utils/net"

	"github.com/fairlead/fairlead/internal/svc"
)

// Ready reports whether the Pod's Ready condition is True.
func Ready(pod *corev1.Pod) bool {
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// Counts reports whether the Pod can be an endpoint of a Service at all: it has
// an address and has not finished. Terminating Pods count until they are deleted.
func Counts(pod *corev1.Pod) bool {
	if pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded {
		return false
	}
	return pod.Status.PodIP != "" || len(pod.Status.PodIPs) > 0
}

// podIPs returns the addresses of the Pod. status.podIPs is authoritative;
// objects written by clients that know only status.podIP count as well.
func podIPs(pod *corev1.Pod) []corev1.PodIP {
	if len(pod.Status.PodIPs) == 0 && pod.Status.PodIP != "" {
		return []corev1.PodIP{{IP: pod.Status.PodIP}}
	}
	return pod.Status.PodIPs
}

// parseIP returns the canonical text of an address and its type. It also takes
// what old clients may have stored: leading zeros in IPv4 and IPv4-mapped IPv6.
func parseIP(s string) (string, discoveryv1.AddressType, bool) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		old, ok := netip.AddrFromSlice(utilnet.ParseIPSloppy(s))
		if !ok {
			return "", "", false
		}
		a = old
	}
	a = a.Unmap().WithZone("")
	kind := discoveryv1.AddressTypeIPv4
	if a.Is6() {
		kind = discoveryv1.AddressTypeIPv6
	}
	// Mostly the text is canonical already, and need not be made again.
	var buffer [64]byte
	if text := a.AppendTo(buffer[:0]); string(text) != s {
		s = string(text)
	}
	return s, kind, true
}

// addressTypes returns the address types slices of the Service have, IPv4
// before IPv6 where there is no order to follow. A Service without
// spec.ipFamilies comes from a server that does not default it: the family of
// its cluster IP, both for a headless one.
func addressTypes(service *corev1.Service) []discoveryv1.AddressType {
	var types []discoveryv1.AddressType
	for _, family := range service.Spec.IPFamilies {
		t := discoveryv1.AddressType(family)
		if (t == discoveryv1.AddressTypeIPv4 || t == discoveryv1.AddressTypeIPv6) && !slices.Contains(types, t) {
			types = append(types, t)
		}
	}
	if len(types) > 0 {
		return types
	}
	if _, t, ok := parseIP(service.Spec.ClusterIP); ok {
		return []discoveryv1.AddressType{t}
	}
	return []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6}
}

// headless reports whether the Service has no virtual IP.
func headless(service *corev1.Service) bool {
	return service.Spec.ClusterIP == "" || service.Spec.ClusterIP == corev1.ClusterIPNone
}

// hostname returns the name the Pod has in the DNS of a headless Service, or
// "".
func hostname(service *corev1.Service, pod *corev1.Pod) string {
	if pod.Spec.Subdomain == service.Name && pod.Namespace == service.Namespace {
		return pod.Spec.Hostname
	}
	return ""
}

func protocolOf(p corev1.Protocol) corev1.Protocol {
	return cmp.Or(p, corev1.ProtocolTCP)
}

// TargetPort returns the number that a service port has on the Pod: the number
// itself, or the container port with that name and protocol. Restartable init
// containers (sidecars) are searched after the containers.
func TargetPort(pod *corev1.Pod, port *corev1.ServicePort) (int32, bool) {
	if port.TargetPort.Type == intstr.Int {
		return port.TargetPort.IntVal, true
	}
	find := func(c *corev1.Container) (int32, bool) {
		for i := range c.Ports {
			p := &c.Ports[i]
			if p.Name == port.TargetPort.StrVal && protocolOf(p.Protocol) == protocolOf(port.Protocol) {
				return p.ContainerPort, true
			}
		}
		return 0, false
	}
	for i := range pod.Spec.Containers {
		if n, ok := find(&pod.Spec.Containers[i]); ok {
			return n, true
		}
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if c.RestartPolicy == nil || *c.RestartPolicy != corev1.ContainerRestartPolicyAlways {
			continue
		}
		if n, ok := find(c); ok {
			return n, true
		}
	}
	return 0, false
}

// portKey identifies a set of ports whatever their order.
type portKey string

func portsKey(ports []discoveryv1.EndpointPort) portKey {
	texts := make([]string, len(ports))
	for i := range ports {
		p := &ports[i]
		var b strings.Builder
		if p.Name != nil {
			b.WriteString(*p.Name)
		}
		b.WriteByte(0)
		if p.Protocol != nil {
			b.WriteString(string(protocolOf(*p.Protocol)))
		} else {
			b.WriteString(string(corev1.ProtocolTCP))
		}
		b.WriteByte(0)
		if p.Port != nil {
			b.WriteString(strconv.Itoa(int(*p.Port)))
		}
		b.WriteByte(0)
		if p.AppProtocol != nil {
			b.WriteByte('=')
			b.WriteString(*p.AppProtocol)
		}
		texts[i] = b.String()
	}
	slices.Sort(texts)
	return portKey(strings.Join(texts, "\x01"))
}

// weighted returns the key of a set of ports for Pods of a weight.
func (k portKey) weighted(weight string) portKey {
	if weight == "" {
		return k
	}
	return k + "\x02" + portKey(weight)
}

// groupKey returns the key of the endpoints that may be in a slice.
func groupKey(s *discoveryv1.EndpointSlice) portKey {
	return portsKey(s.Ports).weighted(s.Annotations[svc.WeightAnnotation])
}

// weightOf returns the weight of a Pod as the annotation of its slices has it, empty for 1.
func weightOf(pod *corev1.Pod) (text string, ok bool) {
	text = pod.Annotations[svc.WeightAnnotation]
	if text == "" {
		return "", true
	}
	n, ok := svc.ParseWeight(text)
	if n == 1 {
		return "", ok
	}
	return strconv.Itoa(n), true
}

// portResolver resolves the ports of one Service for Pod after Pod.
type portResolver struct {
	service *corev1.Service
	// fixed is set when no port is named: every Pod has the same ports.
	fixed   *portSet
	missing map[string]int
}

// portSet is one resolved set of ports. Sets are compared by key.
type portSet struct {
	key   portKey
	ports []discoveryv1.EndpointPort
}

func newPortResolver(service *corev1.Service) *portResolver {
	r := &portResolver{service: service}
	for i := range service.Spec.Ports {
		if service.Spec.Ports[i].TargetPort.Type == intstr.String {
			return r
		}
	}
	r.fixed = r.resolve(nil)
	return r
}

func (r *portResolver) of(pod *corev1.Pod) *portSet {
	if r.fixed != nil {
		return r.fixed
	}
	return r.resolve(pod)
}

func (r *portResolver) resolve(pod *corev1.Pod) *portSet {
	ports := make([]discoveryv1.EndpointPort, 0, len(r.service.Spec.Ports))
	for i := range r.service.Spec.Ports {
		p := &r.service.Spec.Ports[i]
		number, ok := TargetPort(pod, p)
		if !ok {
			if r.missing == nil {
				r.missing = map[string]int{}
			}
			r.missing[p.TargetPort.StrVal]++
			continue
		}
		protocol := protocolOf(p.Protocol)
		ports = append(ports, discoveryv1.EndpointPort{
			Name: &p.Name, Protocol: &protocol, Port: &number, AppProtocol: p.AppProtocol,
		})
	}
	return &portSet{key: portsKey(ports), ports: ports}
}

// endpointKey is what makes an endpoint the same one from plan to plan: where
// it is and whose it is. Everything else about it may change in place.
type endpointKey struct {
	addresses, hostname, namespace, name string
}

func keyOf(e *discoveryv1.Endpoint) endpointKey {
	var k endpointKey
	switch len(e.Addresses) {
	case 0:
	case 1:
		k.addresses = e.Addresses[0]
	default:
		k.addresses = strings.Join(slices.Sorted(slices.Values(e.Addresses)), ",")
	}
	if e.Hostname != nil {
		k.hostname = *e.Hostname
	}
	if e.TargetRef != nil {
		k.namespace, k.name = e.TargetRef.Namespace, e.TargetRef.Name
	}
	return k
}

func compareKeys(a, b endpointKey) int {
	return cmp.Or(strings.Compare(a.name, b.name), strings.Compare(a.addresses, b.addresses),
		strings.Compare(a.hostname, b.hostname), strings.Compare(a.namespace, b.namespace))
}

// sameEndpoint compares what keyOf leaves out, hints aside. The
// resourceVersion of the Pod does not count: it changes with every heartbeat.
func sameEndpoint(a, b *discoveryv1.Endpoint) bool {
	return same(a.NodeName, b.NodeName) && same(a.Zone, b.Zone) &&
		same(a.Conditions.Ready, b.Conditions.Ready) &&
		same(a.Conditions.Serving, b.Conditions.Serving) &&
		same(a.Conditions.Terminating, b.Conditions.Terminating) &&
		sameRef(a.TargetRef, b.TargetRef)
}

func same[T comparable](a, b *T) bool {
	return a == b || a != nil && b != nil && *a == *b
}

func sameRef(a, b *corev1.ObjectReference) bool {
	if a == b || a == nil || b == nil {
		return a == b
	}
	x, y := *a, *b
	x.ResourceVersion, y.ResourceVersion = "", ""
	return x == y
}
