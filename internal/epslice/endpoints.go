package epslice

import (
	"cmp"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// MaxEndpointsAddresses is how many addresses an Endpoints object holds at most;
// beyond, it is truncated and annotated so (behaviour 28).
const MaxEndpointsAddresses = 1000

// Endpoints returns the Endpoints object of a Service with a selector as it
// must be, or nil if current is right already. current is nil if there is none
// yet. Only addresses of the Service's first family are in it. Terminating
// Pods are not, unless not ready addresses are published.
func Endpoints(service *corev1.Service, pods []*corev1.Pod, current *corev1.Endpoints, trigger time.Time) *corev1.Endpoints {
	subsets := endpointSubsets(service, pods)
	over := truncate(subsets)
	labels := endpointsLabels(service)
	if current != nil {
		_, marked := current.Annotations[corev1.EndpointsOverCapacity]
		if marked == over && sameLabels(current.Labels, labels) && sameSubsets(current.Subsets, subsets) {
			return nil
		}
	}
	out := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Namespace: service.Namespace, Name: service.Name}}
	if current != nil {
		out.ObjectMeta = current.ObjectMeta
	}
	out.Labels = labels
	out.Annotations = setTrigger(out.Annotations, trigger)
	if _, marked := out.Annotations[corev1.EndpointsOverCapacity]; marked != over {
		out.Annotations = maps.Clone(out.Annotations)
		if over {
			if out.Annotations == nil {
				out.Annotations = map[string]string{}
			}
			out.Annotations[corev1.EndpointsOverCapacity] = "truncated"
		} else {
			delete(out.Annotations, corev1.EndpointsOverCapacity)
		}
	}
	out.Subsets = subsets
	return out
}

func endpointsLabels(service *corev1.Service) map[string]string {
	labels := make(map[string]string, len(service.Labels)+2)
	maps.Copy(labels, service.Labels)
	delete(labels, corev1.IsHeadlessService)
	if headless(service) {
		labels[corev1.IsHeadlessService] = ""
	}
	labels[LabelEndpointsManagedBy] = EndpointsManagedBy
	return labels
}

// sameLabels does not mind a missing managed-by label: objects of controllers
// before v1.33 do not have it and are not rewritten for its sake.
func sameLabels(current, want map[string]string) bool {
	if maps.Equal(current, want) {
		return true
	}
	if _, ok := current[LabelEndpointsManagedBy]; ok || len(current) != len(want)-1 {
		return false
	}
	without := maps.Clone(want)
	delete(without, LabelEndpointsManagedBy)
	return maps.Equal(current, without)
}

// packed is an address on its way into a subset.
type packed struct {
	address corev1.EndpointAddress
	ip      netip.Addr
	uid     types.UID
	ready   bool
	ports   *endpointsPorts
}

type endpointsPorts struct {
	key   string
	ports []corev1.EndpointPort
}

// endpointSubsets packs the addresses by their set of ports: each address is in
// one subset, subsets and what is in them are sorted.
func endpointSubsets(service *corev1.Service, pods []*corev1.Pod) []corev1.EndpointSubset {
	resolver, want := newPortResolver(service), firstFamily(service)
	ports := map[portKey]*endpointsPorts{}
	room := make([]packed, len(pods))
	refs := make([]corev1.ObjectReference, len(pods))
	all := make([]*packed, 0, len(pods))
	for _, pod := range pods {
		if !Counts(pod) || pod.DeletionTimestamp != nil && !service.Spec.PublishNotReadyAddresses {
			continue
		}
		text, ok := firstIP(want, pod)
		if !ok {
			continue
		}
		set := resolver.of(pod)
		if len(set.ports) == 0 && (len(service.Spec.Ports) > 0 || service.Spec.ClusterIP != corev1.ClusterIPNone) {
			continue
		}
		converted := ports[set.key]
		if converted == nil {
			converted = toEndpointsPorts(set.ports)
			ports[set.key] = converted
		}
		n := len(all)
		refs[n] = corev1.ObjectReference{Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
		room[n] = packed{
			address: corev1.EndpointAddress{IP: text, Hostname: hostname(service, pod), NodeName: &pod.Spec.NodeName, TargetRef: &refs[n]},
			ip:      addrOf(text), uid: pod.UID, ports: converted,
			ready: service.Spec.PublishNotReadyAddresses || Ready(pod),
		}
		all = append(all, &room[n])
	}
	return pack(all)
}

// firstFamily returns the type of address that the Service's Endpoints have,
// or "" for a headless Service that does not say.
func firstFamily(service *corev1.Service) discoveryv1.AddressType {
	if len(service.Spec.IPFamilies) > 0 {
		return discoveryv1.AddressType(service.Spec.IPFamilies[0])
	}
	_, t, _ := parseIP(service.Spec.ClusterIP)
	return t
}

// firstIP returns the Pod's first address of the wanted type.
func firstIP(want discoveryv1.AddressType, pod *corev1.Pod) (string, bool) {
	for _, ip := range podIPs(pod) {
		if text, t, ok := parseIP(ip.IP); ok && (t == want || want == "") {
			return text, true
		}
	}
	return "", false
}

// addrOf is the address to sort by; what is none comes first.
func addrOf(text string) netip.Addr {
	a, _ := netip.ParseAddr(text)
	return a.Unmap()
}

func toEndpointsPorts(in []discoveryv1.EndpointPort) *endpointsPorts {
	out := &endpointsPorts{ports: make([]corev1.EndpointPort, 0, len(in))}
	for i := range in {
		p := corev1.EndpointPort{Name: *in[i].Name, Port: *in[i].Port, Protocol: *in[i].Protocol, AppProtocol: in[i].AppProtocol}
		if !slices.ContainsFunc(out.ports, func(q corev1.EndpointPort) bool { return comparePorts(p, q) == 0 }) {
			out.ports = append(out.ports, p)
		}
	}
	out.sort()
	return out
}

func (p *endpointsPorts) sort() {
	slices.SortFunc(p.ports, comparePorts)
	var b strings.Builder
	for _, q := range p.ports {
		b.WriteString(q.Name + "\x00" + strconv.Itoa(int(q.Port)) + "\x00" + string(q.Protocol) + "\x00")
		if q.AppProtocol != nil {
			b.WriteString("=" + *q.AppProtocol)
		}
		b.WriteByte(1)
	}
	p.key = b.String()
}

func comparePorts(a, b corev1.EndpointPort) int {
	app := func(p corev1.EndpointPort) string {
		if p.AppProtocol == nil {
			return ""
		}
		return "=" + *p.AppProtocol
	}
	return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(a.Port, b.Port),
		strings.Compare(string(a.Protocol), string(b.Protocol)), strings.Compare(app(a), app(b)))
}

// pack sorts addresses into subsets by their ports.
func pack(all []*packed) []corev1.EndpointSubset {
	slices.SortFunc(all, func(a, b *packed) int {
		if a.ports != b.ports {
			if c := strings.Compare(a.ports.key, b.ports.key); c != 0 {
				return c
			}
		}
		if c := a.ip.Compare(b.ip); c != 0 {
			return c
		}
		if c := strings.Compare(string(a.uid), string(b.uid)); c != 0 {
			return c
		}
		return strings.Compare(a.address.Hostname, b.address.Hostname)
	})
	subsets := []corev1.EndpointSubset{}
	for i := range all {
		if i == 0 || all[i].ports.key != all[i-1].ports.key {
			subsets = append(subsets, corev1.EndpointSubset{Ports: all[i].ports.ports})
		}
		s := &subsets[len(subsets)-1]
		if all[i].ready {
			s.Addresses = append(s.Addresses, all[i].address)
		} else {
			s.NotReadyAddresses = append(s.NotReadyAddresses, all[i].address)
		}
	}
	return subsets
}

// truncate cuts the subsets to MaxEndpointsAddresses in proportion to their
// size, ready addresses before unready ones, and reports whether it
// had to.
func truncate(subsets []corev1.EndpointSubset) bool {
	ready, notReady := 0, 0
	for i := range subsets {
		ready += len(subsets[i].Addresses)
		notReady += len(subsets[i].NotReadyAddresses)
	}
	if ready+notReady <= MaxEndpointsAddresses {
		return false
	}
	cut := func(list []corev1.EndpointAddress, total, room int, left *int) []corev1.EndpointAddress {
		n := min(int(math.Ceil(float64(len(list))/float64(total)*float64(room))), *left, len(list))
		*left -= n
		return list[:n]
	}
	if ready > MaxEndpointsAddresses {
		left := MaxEndpointsAddresses
		for i := range subsets {
			subsets[i].Addresses = cut(subsets[i].Addresses, ready, MaxEndpointsAddresses, &left)
			subsets[i].NotReadyAddresses = nil
		}
		return true
	}
	room := MaxEndpointsAddresses - ready
	left := room
	for i := range subsets {
		subsets[i].NotReadyAddresses = cut(subsets[i].NotReadyAddresses, notReady, room, &left)
	}
	return true
}

// sameSubsets compares without regard to the order in which an API server
// stores subsets, addresses and ports, which is its own.
func sameSubsets(current, want []corev1.EndpointSubset) bool {
	if equalSubsets(current, want) {
		return true
	}
	return equalSubsets(sorted(current), want)
}

func equalSubsets(a, b []corev1.EndpointSubset) bool {
	addresses := func(a, b []corev1.EndpointAddress) bool {
		return slices.EqualFunc(a, b, func(x, y corev1.EndpointAddress) bool {
			return x.IP == y.IP && x.Hostname == y.Hostname && same(x.NodeName, y.NodeName) && sameRef(x.TargetRef, y.TargetRef)
		})
	}
	return slices.EqualFunc(a, b, func(x, y corev1.EndpointSubset) bool {
		return addresses(x.Addresses, y.Addresses) && addresses(x.NotReadyAddresses, y.NotReadyAddresses) &&
			equality.Semantic.DeepEqual(x.Ports, y.Ports)
	})
}

func sorted(subsets []corev1.EndpointSubset) []corev1.EndpointSubset {
	var all []*packed
	for i := range subsets {
		s := &subsets[i]
		ports := &endpointsPorts{ports: slices.Clone(s.Ports)}
		ports.sort()
		add := func(list []corev1.EndpointAddress, ready bool) {
			for _, a := range list {
				p := &packed{address: a, ip: addrOf(a.IP), ready: ready, ports: ports}
				if a.TargetRef != nil {
					p.uid = a.TargetRef.UID
				}
				all = append(all, p)
			}
		}
		add(s.Addresses, true)
		add(s.NotReadyAddresses, false)
	}
	return pack(all)
}
