package flows

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// API asks a row of objects of the Kubernetes API, which package table turns
// into the Table: then the whole way from the object to the packet is asked.
type API struct {
	// Service changes the Service: type ClusterIP, port 80 without a name, of
	// the row's protocol and family.
	Service func(*corev1.Service)
	// Slices are its EndpointSlices: endpoints by name, separated by spaces,
	// with what is special of each: "a:9377" another port (of the whole slice),
	// "a!" not ready, "a~" terminating and still serving, "a%" terminating and
	// not serving, "a@zone" and "a#node" hints. A name with a dot or two colons
	// is an address.
	Slices []string
	// Slice changes each of them.
	Slice func(*discoveryv1.EndpointSlice)
	// Others are further Services, by what makes them of the first one.
	Others []func(*corev1.Service)
	// Pod has port 30080 of the node as its host port; HostIP is node, loopback, or empty
	// for all addresses.
	Pod, HostIP string
}

// zone is that of the node under test.
const zone = "zone-1"

func (e *Env) build(f svc.Family, p svc.Protocol, r *Row) *table.Table {
	cfg := table.Config{NodeName: "node", MasqueradeAll: r.MasqueradeAll, NoLoopback: e.noLoopback}
	if r.ClusterCIDRs {
		cfg.ClusterCIDRs = podRanges()
	}
	b := table.NewBuilder(cfg)
	b.SetAddresses([]netip.Addr{e.Node.Addr4(), e.Node.Addr6()})
	var pods []string
	if r.ClusterCIDRs {
		for _, p := range e.localPods() {
			pods = append(pods, p.String())
		}
	}
	b.SetNode(&corev1.Node{
		Spec:       corev1.NodeSpec{PodCIDRs: pods},
		ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{corev1.LabelTopologyZone: zone}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: e.Node.Addr4().String()}, {Type: corev1.NodeInternalIP, Address: e.Node.Addr6().String()},
		}},
	})
	s := service(f, p)
	if r.API.Service != nil {
		r.API.Service(s)
	}
	b.SetService(s)
	for i, change := range r.API.Others {
		o := s.DeepCopy()
		o.Name = fmt.Sprintf("other-%d", i)
		change(o)
		b.SetService(o)
	}
	for i, text := range r.API.Slices {
		b.SetSlice(e.slice(f, p, i, text, r.API.Slice))
	}
	if r.API.Pod != "" {
		port := svc.HostPort{Protocol: p, Port: nodePort, To: endpointPort}
		if r.API.HostIP != "" {
			port.HostIP = e.address(f, r.API.HostIP, &Service{}).Addr().String()
		}
		b.SetHostPorts([]svc.HostPorts{{
			Pod: svc.Name{Namespace: "default", Name: r.API.Pod}, IPs: []netip.Addr{e.Host(r.API.Pod).Addr(f)}, Ports: []svc.HostPort{port},
		}})
	}
	t, _ := b.Build()
	return t
}

func podRanges() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}
}

// localPods are the ranges of the node's own pods.
func (e *Env) localPods() []netip.Prefix {
	return []netip.Prefix{e.Node.PodCIDR(svc.IPv4), e.Node.PodCIDR(svc.IPv6)}
}

func service(f svc.Family, p svc.Protocol) *corev1.Service {
	ip := vip(f, clusterIP).String()
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", CreationTimestamp: metav1.NewTime(time.Unix(1000, 0))},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip},
			Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.Protocol(p.String())}},
		},
	}
}

func (e *Env) slice(f svc.Family, p svc.Protocol, n int, text string, change func(*discoveryv1.EndpointSlice)) *discoveryv1.EndpointSlice {
	proto, port, name := corev1.Protocol(p.String()), int32(endpointPort), ""
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: fmt.Sprintf("web-%d", n), Labels: map[string]string{discoveryv1.LabelServiceName: "web"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}},
	}
	if f == svc.IPv6 {
		s.AddressType = discoveryv1.AddressTypeIPv6
	}
	for word := range strings.FieldsSeq(text) {
		s.Endpoints = append(s.Endpoints, e.endpoint(f, word, &port))
	}
	if change != nil {
		change(s)
	}
	return s
}

func (e *Env) endpoint(f svc.Family, word string, port *int32) discoveryv1.Endpoint {
	var ep discoveryv1.Endpoint
	word, hint, _ := strings.Cut(word, "#")
	if hint != "" {
		node, at, both := strings.Cut(hint, "@")
		ep.Hints = &discoveryv1.EndpointHints{ForNodes: []discoveryv1.ForNode{{Name: node}}}
		if both {
			ep.Hints.ForZones = []discoveryv1.ForZone{{Name: at}}
		}
	} else if name, at, zoned := strings.Cut(word, "@"); zoned {
		word, ep.Hints = name, &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: at}}}
	}
	yes, no := true, false
	ep.Conditions = discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no}
	switch name := strings.TrimRight(word, "!~%"); word[len(name):] {
	case "!":
		word, ep.Conditions = name, discoveryv1.EndpointConditions{Ready: &no, Serving: &no, Terminating: &no}
	case "~":
		word, ep.Conditions = name, discoveryv1.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}
	case "%":
		word, ep.Conditions = name, discoveryv1.EndpointConditions{Ready: &no, Serving: &no, Terminating: &yes}
	}
	if strings.Contains(word, ".") || strings.Count(word, ":") > 1 {
		ep.Addresses = []string{word}
		return ep
	}
	if name, n, other := strings.Cut(word, ":"); other {
		_, _ = fmt.Sscan(n, port)
		word = name
	}
	h := e.Host(word)
	node := "node"
	if h == e.Other || h.Node() == e.Other {
		node = "other"
	}
	ep.NodeName, ep.Addresses = &node, []string{h.Addr(f).String()}
	return ep
}
