package front

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// endpoint reads NODE/ZONE/STATE, where the state is ready, ends (terminating, and still serves), dead or none (not ready).
func endpoint(i int, text string) discoveryv1.Endpoint {
	part := strings.Split(text, "/")
	ready, serving, terminating := part[2] == "ready", part[2] == "ready" || part[2] == "ends", part[2] == "ends" || part[2] == "dead"
	return discoveryv1.Endpoint{
		Addresses: []string{fmt.Sprintf("10.0.0.%d", i+1)}, NodeName: &part[0], Zone: &part[1],
		Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
	}
}

func httpSlice(endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "x", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: endpoints,
		Ports: []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080))}},
	}
}

// served returns the last bytes of the endpoints' addresses that node n1 in zone a serves, with *0 for those that only
// keep connections.
func served(t *testing.T, spec dialect.Spec, local bool, known map[string]*node, slices ...*discoveryv1.EndpointSlice) string {
	t.Helper()
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}
	o.Spec.Ports = []corev1.ServicePort{{Name: "http", Port: 80, NodePort: 30080}}
	if local {
		o.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	s := &service{object: o, spec: &spec, listed: true, slices: map[string]*discoveryv1.EndpointSlice{}}
	s.selector, _ = labels.Parse(spec.BackendNodes)
	for i, slice := range slices {
		s.slices[fmt.Sprint(i)] = slice
	}
	in := &inputs{node: "n1", zone: "a", nodes: &nodes{listed: true, known: known}}
	built, why := in.build(svc.NameOf(o), s)
	if built == nil {
		t.Fatal(why)
	}
	var out []string
	for _, b := range built.Backends[80] {
		text := strings.TrimPrefix(b.Addr().String(), "10.0.0.")
		if w, has := built.Weights[b]; has && w == 0 {
			text += "*0"
		}
		out = append(out, text)
	}
	return strings.Join(out, " ")
}

// Without a ready endpoint those that terminate and still serve get the connections, for each policy on its own
// (behaviour 199).
func TestTerminatingEndpoints(t *testing.T) {
	for _, c := range []struct {
		what          string
		local, nearby bool
		endpoints     string
		want          string
	}{
		{"Cluster: ready ones only", false, false, "n1/a/ready n1/a/ends n2/b/ready", "1 3"},
		{"Cluster: one terminates, the last", false, false, "n1/a/none n2/b/ends n2/b/dead", "2"},
		{"Cluster: none serves", false, false, "n1/a/none n2/b/dead", ""},
		{"Local: ready ones of this node", true, false, "n1/a/ready n1/a/ends n2/b/ready", "1"},
		{"Local: this node's terminates, another node has a ready one", true, false, "n1/a/ends n2/b/ready", "1"},
		{"Local: none here", true, false, "n1/a/dead n2/b/ready n2/b/ends", "2"},
		{"Local: none here, elsewhere one terminates", true, false, "n1/a/none n2/b/ends", "2"},
		{"zone: ready ones of the zone", false, true, "n1/a/ready n2/b/ready n3/a/ends", "1"},
		{"zone: a ready one elsewhere before one that terminates here", false, true, "n1/a/ends n2/b/ready", "2"},
		{"zone: every one terminates", false, true, "n1/a/ends n2/b/ends n2/b/none", "1 2"},
	} {
		var list []discoveryv1.Endpoint
		for i, text := range strings.Fields(c.endpoints) {
			list = append(list, endpoint(i, text))
		}
		if got := served(t, dialect.Spec{CrossZone: !c.nearby}, c.local, nil, httpSlice(list...)); got != c.want {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
}

// Endpoints of weight 0 keep their connections, and do not stand in the way of those that terminate. Addresses that no
// endpoint may have are left out (behaviour 24).
func TestIdleAndInvalidEndpoints(t *testing.T) {
	weighed := func(weight string, s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
		s.Annotations = map[string]string{svc.LBWeightAnnotation: weight}
		return s
	}
	for _, c := range []struct {
		idle, other, want string
	}{
		{"n1/a/ready", "n2/b/ready", "1*0 2"},
		{"n1/a/ready", "n2/b/ends", "1*0 2"},
		{"n1/a/ends", "n2/b/ready", "2"},
		{"n1/a/ready", "n2/b/none", "1*0"},
	} {
		got := served(t, dialect.Spec{CrossZone: true}, false, nil, weighed("0", httpSlice(endpoint(0, c.idle))), httpSlice(endpoint(1, c.other)))
		if got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
	bad := httpSlice()
	for _, a := range []string{"127.0.0.1", "169.254.169.254", "0.0.0.0", "224.0.0.1", "2001:db8::1", "x", "10.0.0.9"} {
		bad.Endpoints = append(bad.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	if got := served(t, dialect.Spec{CrossZone: true}, false, nil, bad); got != "9" {
		t.Errorf("of invalid addresses: %q", got)
	}
}

// Nodes whose last Pods terminate keep their connections at node ports while no Pod is ready anywhere.
func TestNodePortsOfTerminatingPods(t *testing.T) {
	known := map[string]*node{}
	for i := range 3 {
		known[fmt.Sprintf("n%d", i+1)] = &node{addrs: []netip.Addr{netip.MustParseAddr(fmt.Sprintf("10.0.0.%d", i+1))}}
	}
	for endpoints, want := range map[string]string{"n1/a/ready n2/b/ends": "1", "n1/a/ends n2/b/ends n3/a/none": "1 2"} {
		var list []discoveryv1.Endpoint
		for i, text := range strings.Fields(endpoints) {
			list = append(list, endpoint(i, text))
		}
		got := strings.Fields(served(t, dialect.Spec{CrossZone: true, NodePorts: true}, true, known, httpSlice(list...)))
		if slices.Sort(got); strings.Join(got, " ") != want {
			t.Errorf("%s: %q, want %q", endpoints, got, want)
		}
	}
}

// The data plane and the proxied way choose the same endpoints, whatever the EndpointSlices contain.
func TestBothPlanesAgree(t *testing.T) {
	const rounds = 3000
	for seed := range uint64(rounds) {
		r := rand.New(rand.NewPCG(seed, 199))
		of := func(texts ...string) string { return texts[r.IntN(len(texts))] }
		o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}
		o.Spec.Type, o.Spec.ClusterIP, o.Spec.ClusterIPs = corev1.ServiceTypeLoadBalancer, "10.96.0.1", []string{"10.96.0.1"}
		o.Spec.Ports = []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}}
		o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
		o.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicy(of("Cluster", "Local"))
		s := &service{object: o, spec: &dialect.Spec{CrossZone: true}, listed: true, slices: map[string]*discoveryv1.EndpointSlice{}}
		b := table.NewBuilder(table.Config{NodeName: "n1"})
		b.SetNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{corev1.LabelTopologyZone: "a"}}})
		b.SetService(o)
		hinted := r.IntN(2) == 0
		for i := range 1 + r.IntN(3) {
			slice := httpSlice()
			slice.Name = fmt.Sprint(i)
			if weight := of("", "", "0", "3", "many"); weight != "" {
				slice.Annotations = map[string]string{svc.WeightAnnotation: weight}
			}
			if r.IntN(8) == 0 {
				slice.Ports[0].Name = new("other")
			}
			for range r.IntN(5) {
				e := endpoint(r.IntN(9), of("n1", "n2", "n3")+"/"+of("a", "b")+"/"+of("ready", "ready", "ends", "dead", "none"))
				if r.IntN(9) == 0 {
					e.Addresses[0] = of("127.0.0.1", "169.254.1.1", "2001:db8::1")
				}
				if hinted && r.IntN(9) > 0 {
					e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: of("a", "b")}}}
					if r.IntN(3) > 0 {
						e.Hints.ForNodes = []discoveryv1.ForNode{{Name: of("n1", "n2")}}
					}
				}
				slice.Endpoints = append(slice.Endpoints, e)
			}
			s.slices[slice.Name] = slice
			b.SetSlice(slice)
		}
		built, _ := b.Build()
		var want []string
		for _, f := range built.Get(table.Key{ID: svc.PortName{Name: svc.NameOf(o), Port: "http"}, Family: svc.IPv4}).Frontends {
			if f.Kind != table.LoadBalancerIP {
				continue
			}
			list := f.Endpoints
			if len(list) == 0 && f.LocalClients != nil {
				list = f.LocalClients
			}
			for _, e := range list {
				want = append(want, fmt.Sprintf("%s*%d", e.Addr, max(1, e.Weight)))
			}
		}
		in := &inputs{node: "n1", zone: "a", nodes: &nodes{}}
		p, why := in.build(svc.NameOf(o), s)
		if p == nil {
			t.Fatal(why)
		}
		var got []string
		for _, a := range p.Backends[80] {
			weight, has := p.Weights[a]
			if !has {
				weight = 1
			}
			if weight > 0 {
				got = append(got, fmt.Sprintf("%s*%d", a, weight))
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("seed %d: the proxied way has %v, the data plane %v", seed, got, want)
		}
	}
}
