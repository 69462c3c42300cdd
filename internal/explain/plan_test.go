package explain

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Each difference of an apply is named, with its nodes; it cuts if it ends open connections.
func TestDifferences(t *testing.T) {
	web := svc.Name{Namespace: "default", Name: "web"}
	for _, c := range []struct {
		name   string
		change func(*bed)
		want   []string // the texts, without the name of the Service
		cuts   bool
	}{
		{"nothing", func(*bed) {}, nil, false},
		{"another port", func(b *bed) { b.service.Spec.Ports[0].Port = 81 }, []string{
			"ClusterIP TCP 10.96.0.10:80 is removed", "LoadBalancerIP TCP 203.0.113.1:80 is removed",
			"ClusterIP TCP 10.96.0.10:81 is added, sent to 2 endpoints", "LoadBalancerIP TCP 203.0.113.1:81 is added, sent to 2 endpoints"}, false},
		{"UDP in place of TCP", func(b *bed) {
			b.service.Spec.Ports[0].Protocol, b.slice.Ports[0].Protocol = corev1.ProtocolUDP, new(corev1.ProtocolUDP)
		}, []string{"ClusterIP UDP 10.96.0.10:80 loses"}, false},
		{"the address of the load balancer goes", func(b *bed) { b.service.Status = corev1.ServiceStatus{} }, []string{
			"the load balancer's address 203.0.113.1 is given back", "LoadBalancerIP TCP 203.0.113.1:80 is removed"}, true},
		{"an endpoint leaves", func(b *bed) { b.slice.Endpoints = b.slice.Endpoints[:1] }, []string{
			"ClusterIP TCP 10.96.0.10:80: new connections no longer go to 10.244.2.2:8080"}, false},
		{"policy Local", func(b *bed) {
			b.service.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			b.slice.Endpoints = b.slice.Endpoints[1:]
		}, []string{"NodePort TCP 30080 (IPv4) loses its last endpoint: new connections are dropped: policy Local"}, false},
		{"source ranges", func(b *bed) { b.service.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24"} }, []string{
			"LoadBalancerIP TCP 203.0.113.1:80 lets in [198.51.100.0/24] for new connections"}, false},
		{"an alias", func(b *bed) {
			b.service.Spec.Type, b.service.Spec.ExternalName, b.service.Spec.ClusterIPs = corev1.ServiceTypeExternalName, "example.com", nil
		}, []string{"DNS: web.default.svc.cluster.local changes from 10.96.0.10 to alias example.com"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			was, is := newBed(), newBed()
			if c.name == "UDP in place of TCP" {
				was.service.Spec.Ports[0].Protocol, was.slice.Ports[0].Protocol = corev1.ProtocolUDP, new(corev1.ProtocolUDP)
				is.slice.Endpoints = nil
			}
			c.change(is)
			world := func(b *bed) *World {
				other := b.node.DeepCopy()
				other.Name, other.Status.Addresses[0].Address = "there", "192.168.70.12"
				return &World{Services: []*corev1.Service{b.service}, Slices: []*discoveryv1.EndpointSlice{b.slice}, Pods: b.pods,
					Nodes: []*corev1.Node{b.node, other}}
			}
			cluster := &Cluster{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}
			got := Differences(cluster, world(was), world(is), map[svc.Name]bool{web: true}, []string{"cluster.local"})
			cuts := slices.ContainsFunc(got, func(d Change) bool { return d.Cuts != "" })
			if wanted := c.cuts || c.name == "UDP in place of TCP"; cuts != wanted || len(c.want) == 0 && len(got) > 0 {
				t.Errorf("cuts is %t, want %t: %+v", cuts, wanted, got)
			}
			for _, text := range c.want {
				i := slices.IndexFunc(got, func(d Change) bool { return strings.HasPrefix(d.Text, text) })
				if i < 0 {
					t.Errorf("no %q in %+v", text, got)
				} else if local := strings.Contains(text, "policy Local"); local != (len(got[i].Nodes) == 1) {
					t.Errorf("%q is of nodes %v", text, got[i].Nodes)
				}
			}
		})
	}
}

// Follow plans the slices as the controllers do: another selector has other endpoints.
func TestFollow(t *testing.T) {
	b := newBed()
	b.slice.Labels[discoveryv1.LabelManagedBy] = svc.ManagedBySelector
	b.slice.OwnerReferences = []metav1.OwnerReference{{Kind: "Service", Name: "web"}}
	b.service.Spec.Selector = map[string]string{"app": "nobody"}
	w := &World{Services: []*corev1.Service{b.service}, Slices: []*discoveryv1.EndpointSlice{b.slice}, Pods: b.pods,
		Nodes: []*corev1.Node{b.node}}
	for _, s := range w.Follow(map[svc.Name]bool{{Namespace: "default", Name: "web"}: true}) {
		if len(s.Endpoints) > 0 {
			t.Errorf("slice %s has %+v", s.Name, s.Endpoints)
		}
	}
	if got := w.Follow(nil); len(got) != 1 || len(got[0].Endpoints) != 2 {
		t.Errorf("without a change: %+v", got)
	}
}
