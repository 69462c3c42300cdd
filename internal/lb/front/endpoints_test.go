package front

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/svc"
)

// Which endpoints have connections at a node, by policy and zone (behaviours 93, 129).
func TestBackendsOfANode(t *testing.T) {
	f := New(Options{NodeName: "n1"})
	claim := func(addr string, of ...svc.Name) { f.SetClaim(netip.MustParseAddr(addr), of) }
	name := svc.Name{Namespace: "default", Name: "web"}
	endpoints := []discoveryv1.Endpoint{}
	for i, at := range []string{"n1/a", "n2/a", "n3/b", "n3/b/unready"} {
		part := strings.Split(at, "/")
		ready := len(part) == 2
		endpoints = append(endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.0.0.%d", i+1)}, NodeName: &part[0], Zone: &part[1],
			Conditions: discoveryv1.EndpointConditions{Ready: &ready}})
	}
	slice := &discoveryv1.EndpointSlice{Endpoints: endpoints, Ports: []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080))}}}
	for _, c := range []struct {
		node, zone    string
		local, nearby bool
		want          string
	}{
		{"n1", "a", false, false, "1 2 3"},
		{"n1", "a", true, false, "1"},
		{"n9", "a", true, false, "1 2 3"}, // from its own Pods alone
		{"n1", "a", false, true, "1 2"},
		{"n3", "b", false, true, "3"},
		{"n1", "", false, true, "1 2 3"},
		{"n1", "c", false, true, "1 2 3"},
	} {
		f.node = c.node
		f.SetNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{corev1.LabelTopologyZone: c.zone}}})
		o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", Annotations: map[string]string{
			"fairlead.dev/lb-proxy-protocol": "v2"}}}
		if c.nearby {
			o.Annotations["service.beta.kubernetes.io/aws-load-balancer-cross-zone-load-balancing-enabled"] = "false"
		}
		o.Spec.Type, o.Spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Name: "http", Port: 80}}
		o.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
		if c.local {
			o.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		}
		proxy := corev1.LoadBalancerIPModeProxy
		o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1", IPMode: &proxy}, {IP: "192.0.2.2", IPMode: &proxy}}
		claim("192.0.2.1", name)
		claim("192.0.2.2", svc.Name{Namespace: "default", Name: "other"}) // whatever the status says
		f.SetService(o)
		v := f.services[name]
		v.slices["x"], v.listed = slice, true
		s := build(f, name, v)
		var got []string
		for _, b := range s.Backends[80] {
			got = append(got, strings.TrimPrefix(b.Addr().String(), "10.0.0."))
		}
		slices.Sort(got)
		if strings.Join(got, " ") != c.want {
			t.Errorf("%+v: %v", c, got)
		}
		if len(s.Addrs) != 1 || s.Addrs[0].String() != "192.0.2.1" {
			t.Errorf("addresses %v", s.Addrs)
		}
	}
}

// The weights of endpoints are those of their EndpointSlices, times those of their Nodes by the label that the Service names.
func TestWeightsOfEndpoints(t *testing.T) {
	f := New(Options{NodeName: "n1"})
	name := svc.Name{Namespace: "default", Name: "web"}
	slice := func(addr, node, weight string) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{svc.LBWeightAnnotation: weight}},
			Endpoints:  []discoveryv1.Endpoint{{Addresses: []string{addr}, NodeName: &node}},
			Ports:      []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080))}},
		}
	}
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "u-1", Annotations: map[string]string{
		"fairlead.dev/lb-weight-label": "size"}}}
	o.Spec.Type, o.Spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Name: "http", Port: 80}}
	o.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	proxy := corev1.LoadBalancerIPModeProxy
	o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1", IPMode: &proxy}}
	f.SetService(o)
	v := f.services[name]
	v.listed = true
	for i, weight := range []string{"", "3", "0", "many", "", "4"} {
		addr := fmt.Sprintf("10.0.0.%d", i+1)
		v.slices[addr] = slice(addr, fmt.Sprintf("n%d", i+1), weight)
	}
	for _, addr := range []string{"10.0.0.5", "10.0.0.6"} { // a Pod's, which that for load balancers alone replaces
		v.slices[addr].Annotations[svc.WeightAnnotation] = "7"
	}
	if s := build(f, name, v); s != nil {
		t.Error("a Service whose weights depend on Nodes is served before these are known")
	}
	f.nodes.listed, f.nodes.known = true, map[string]*node{
		"n1": {labels: map[string]string{"size": "2"}}, "n2": {labels: map[string]string{"size": "2"}},
		"n4": {labels: map[string]string{"size": "257"}},
	}
	s := build(f, name, v)
	got := map[string]int{}
	for a, w := range s.Weights {
		got[a.Addr().String()] = w
	}
	want := map[string]int{"10.0.0.1": 2, "10.0.0.2": 6, "10.0.0.3": 0, "10.0.0.5": 7, "10.0.0.6": 4}
	if !maps.Equal(got, want) || s.Key != "u-1" || len(s.Backends[80]) != 6 {
		t.Errorf("%v, want %v, key %q", got, want, s.Key)
	}
}

// Which node ports have connections, by policy, labels, Pods and zone, and how they are checked (behaviours 142, 149, 179 to 184).
func TestNodePorts(t *testing.T) {
	const tke, ours = "service.kubernetes.io/", "fairlead.dev/lb-"
	name := svc.Name{Namespace: "default", Name: "web"}
	at := func(node, pod string) discoveryv1.Endpoint {
		return discoveryv1.Endpoint{Addresses: []string{"10.0.0." + pod}, NodeName: &node}
	}
	pods := []discoveryv1.Endpoint{at("n1", "1"), at("n1", "2"), at("n2", "3"), at("n9", "4")}
	slice := &discoveryv1.EndpointSlice{Endpoints: pods, Ports: []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080))}}}
	known := map[string]*node{}
	for i, l := range []map[string]string{{"key": "value1", "z": "a"}, {"key": "value2", "z": "b"}, {"key": "other", "z": "a"},
		{"key": "value1", corev1.LabelNodeExcludeBalancers: ""}} {
		l[corev1.LabelTopologyZone] = l["z"]
		known[fmt.Sprintf("n%d", i+1)] = &node{labels: l, cordoned: i == 1,
			addrs: []netip.Addr{netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", i+1)), netip.MustParseAddr(fmt.Sprintf("192.0.2.%d", i+1))}}
	}
	for _, c := range []struct {
		annotations map[string]string
		local       bool
		want        string
	}{
		{map[string]string{ours + "backends": "node-ports"}, false, "192.0.2.1 192.0.2.2 192.0.2.3"},
		{map[string]string{ours + "backends": "node-ports"}, true, "192.0.2.1*2 192.0.2.2 checked"},
		{map[string]string{ours + "backends": "node-ports", ours + "health-protocol": "http"}, true, "192.0.2.1*2 192.0.2.2"},
		{map[string]string{ours + "backends": "node-ports", tke + "local-svc-only-bind-node-with-pod": "true"}, false, "192.0.2.1 192.0.2.2"},
		{map[string]string{tke + "qcloud-loadbalancer-backends-label": "key in (value1, value2)"}, false, "192.0.2.1 192.0.2.2"},
		{map[string]string{tke + "qcloud-loadbalancer-backends-label": "key in (other)"}, true, "checked"},
		{map[string]string{ours + "backend-nodes": "key=value2", ours + "backends": "pods"}, false, "10.0.0.3"},
		{map[string]string{ours + "backend-nodes": "key=none"}, false, ""},
		{map[string]string{ours + "backend-nodes": "key=value1", ours + "backends": "pods"}, true, "10.0.0.1 10.0.0.2"},
		{map[string]string{"service.beta.kubernetes.io/alibaba-cloud-loadbalancer-backend-label": "key",
			"service.beta.kubernetes.io/alibaba-cloud-loadbalancer-remove-unscheduled-backend": "on"}, false, "192.0.2.1 192.0.2.3"},
		{map[string]string{"service.beta.kubernetes.io/aws-load-balancer-target-node-labels": "key=value2",
			"service.beta.kubernetes.io/aws-load-balancer-nlb-target-type": "instance"}, false, "192.0.2.2"},
		{map[string]string{ours + "backends": "node-ports",
			"service.beta.kubernetes.io/aws-load-balancer-cross-zone-load-balancing-enabled": "false"}, false, "192.0.2.1 192.0.2.3"},
		{map[string]string{"service.beta.kubernetes.io/backend-type": "eni", ours + "idle-timeout": "9"}, true, "10.0.0.1 10.0.0.2"},
		{map[string]string{"service.beta.kubernetes.io/backend-type": "ecs", ours + "idle-timeout": "9"}, false,
			"192.0.2.1 192.0.2.2 192.0.2.3"},
	} {
		events := &taken{}
		f := New(Options{NodeName: "n1", Events: events})
		f.zone = "a"
		f.nodes.listed, f.nodes.known = true, known
		o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", Annotations: c.annotations}}
		o.Spec.Type, o.Spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Name: "http", Port: 80, NodePort: 30080}}
		o.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
		if c.local {
			o.Spec.ExternalTrafficPolicy, o.Spec.HealthCheckNodePort = corev1.ServiceExternalTrafficPolicyLocal, 30999
		}
		proxy := corev1.LoadBalancerIPModeProxy
		o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.100", IPMode: &proxy}}
		f.SetService(o)
		v := f.services[name]
		if v == nil {
			t.Errorf("%v: takes the direct way", c.annotations)
			continue
		}
		v.slices["x"], v.listed = slice, true
		s := build(f, name, v)
		var got []string
		for _, b := range s.Backends[80] {
			text := b.Addr().String()
			if w, has := s.Weights[b]; has {
				text += fmt.Sprintf("*%d", w)
			}
			if want := map[bool]uint16{true: 30080, false: 8080}[s.Spec.NodePorts]; b.Port() != want {
				t.Errorf("%v: port %d", c.annotations, b.Port())
			}
			got = append(got, text)
		}
		slices.Sort(got)
		if h := s.Spec.Health; h.Port == 30999 && h.Protocol == dialect.HTTP && h.Path == "/healthz" {
			got = append(got, "checked")
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%v, local %t: %v, want %s", c.annotations, c.local, got, c.want)
		}
		f.observe(func(svc.Name) (bool, error) { return true, nil })
		const none = "web Warning ProxiedLoadBalancerFailed node n1: it has no backend: its selector of nodes, key=none, matches no Node"
		if text := events.take(); text != map[bool]string{true: none}[c.want == ""] {
			t.Errorf("%v: Event %q", c.annotations, text)
		}
	}
}
