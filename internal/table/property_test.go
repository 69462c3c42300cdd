package table

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/svc"
)

// world is the API as it stands, beside which a Builder is kept up to date.
type world struct {
	services map[svc.Name]*corev1.Service
	slices   map[svc.Name]*discoveryv1.EndpointSlice
	node     *corev1.Node
	machine  []netip.Addr
	// unreached are the nodes for SetUnreached.
	unreached []string
	// hops are for SetNextHops.
	hops map[string]NextHop
}

func (w *world) fresh(cfg Config) *Builder {
	b := NewBuilder(cfg)
	b.SetAddresses(w.machine)
	b.SetNode(w.node)
	b.SetUnreached(w.unreached)
	b.SetNextHops(w.hops)
	for _, s := range w.slices {
		b.SetSlice(s)
	}
	for _, s := range w.services {
		b.SetService(s)
	}
	return b
}

var (
	someServices = []string{"a", "b", "c"}
	someIPs      = []string{"10.96.0.1", "10.96.0.2", "10.96.0.3", "10.244.0.1", "10.244.0.2", "192.0.2.1"}
	someZones    = []string{"", "z1", "z2"}
	someNodes    = []string{"here", "there", "away", ""}
)

func drawBool(t *rapid.T, name string) *bool {
	return rapid.SampledFrom([]*bool{nil, new(true), new(false)}).Draw(t, name)
}

func drawService(t *rapid.T) *corev1.Service {
	pick := func(name string, from ...string) string { return rapid.SampledFrom(from).Draw(t, name) }
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: pick("service", someServices...),
		CreationTimestamp: metav1.NewTime(time.Unix(int64(rapid.IntRange(0, 2).Draw(t, "age")), 0)),
	}}
	s.Spec.ClusterIP = pick("clusterIP", "None", "10.96.0.1", "10.96.0.2", "10.96.0.3", "10.244.0.1")
	s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
	s.Spec.Type = corev1.ServiceType(pick("type", "ClusterIP", "NodePort", "LoadBalancer"))
	s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicy(pick("external", "", "Cluster", "Local"))
	s.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicy(pick("internal", "Cluster", "Local")))
	s.Spec.ExternalIPs = rapid.SliceOfN(rapid.SampledFrom(someIPs), 0, 2).Draw(t, "externalIPs")
	s.Spec.Ports = []corev1.ServicePort{{Name: "p", Port: 80}}
	if rapid.Bool().Draw(t, "two ports") {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "q", Port: 81, NodePort: 30081, Protocol: corev1.ProtocolUDP})
	}
	if ip := pick("load balancer", "", "203.0.113.1", "192.0.2.1"); ip != "" {
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: ip}}
		s.Spec.LoadBalancerSourceRanges = rapid.SliceOfN(rapid.SampledFrom([]string{"10.0.0.0/8", "bad"}), 0, 2).Draw(t, "ranges")
		s.Spec.HealthCheckNodePort = 31000
	}
	if rapid.Bool().Draw(t, "direct") {
		s.Annotations = map[string]string{svc.ForwardingAnnotation: svc.ForwardingDirect}
	}
	if rapid.IntRange(0, 9).Draw(t, "other proxy") == 0 {
		s.Labels = map[string]string{labelProxyName: "other"}
	}
	return s
}

func drawSlice(t *rapid.T) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: rapid.SampledFrom([]string{"s1", "s2", "s3", "s4"}).Draw(t, "slice"),
		Labels: map[string]string{discoveryv1.LabelServiceName: rapid.SampledFrom(append([]string{""}, someServices...)).Draw(t, "of")},
	}}
	s.AddressType = discoveryv1.AddressTypeIPv4
	s.Ports = []discoveryv1.EndpointPort{{Name: new("p"), Port: new(int32(8080))},
		{Name: new("q"), Port: new(int32(8081)), Protocol: new(corev1.ProtocolUDP)}}
	for range rapid.IntRange(0, 4).Draw(t, "endpoints") {
		ep := discoveryv1.Endpoint{
			Addresses: []string{rapid.SampledFrom(append([]string{"127.0.0.1", "10.244.0.3", "10.244.0.4"}, someIPs...)).Draw(t, "address")},
			Conditions: discoveryv1.EndpointConditions{Ready: drawBool(t, "ready"), Serving: drawBool(t, "serving"),
				Terminating: drawBool(t, "terminating")},
		}
		if n := rapid.SampledFrom(someNodes).Draw(t, "node"); n != "" {
			ep.NodeName = new(n)
		}
		if z := rapid.SampledFrom(append(someZones, "z1")).Draw(t, "hint"); z != "" {
			ep.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: z}}}
			if rapid.Bool().Draw(t, "node hint") {
				ep.Hints.ForNodes = []discoveryv1.ForNode{{Name: rapid.SampledFrom(someNodes[:2]).Draw(t, "for node")}}
			}
		}
		s.Endpoints = append(s.Endpoints, ep)
	}
	return s
}

// TestIncrementalEqualsFresh walks through random histories and compares, after
// each Build, with a Builder that sees only the end of it; it checks the keys
// said to be changed, and every decision against the table in decide's comment,
// written down a second time in the simplest way.
func TestIncrementalEqualsFresh(t *testing.T) {
	cfg := Config{NodeName: "here", Forwarding: forwardingOf}
	rapid.Check(t, func(t *rapid.T) {
		w := &world{services: map[svc.Name]*corev1.Service{}, slices: map[svc.Name]*discoveryv1.EndpointSlice{}}
		b := NewBuilder(cfg)
		before, _ := b.Build()
		for range rapid.IntRange(1, 12).Draw(t, "builds") {
			for range rapid.IntRange(0, 4).Draw(t, "steps") {
				w.step(t, b)
			}
			after, changed := b.Build()
			fresh := w.fresh(cfg)
			want, _ := fresh.Build()
			if after.String() != want.String() {
				t.Fatalf("incremental:\n%s\nfresh:\n%s", after, want)
			}
			if got, want := fmt.Sprint(b.Problems()), fmt.Sprint(fresh.Problems()); got != want {
				t.Fatalf("problems, incremental:\n%s\nfresh:\n%s", got, want)
			}
			checkChanged(t, before, after, changed)
			w.checkPolicy(t, after)
			before = after
		}
	})
}

func (w *world) step(t *rapid.T, b *Builder) {
	switch rapid.IntRange(0, 11).Draw(t, "step") {
	case 0, 1, 2:
		s := drawService(t)
		w.services[svc.NameOf(s)] = s
		b.SetService(s)
	case 3:
		n := svc.Name{Namespace: "ns", Name: rapid.SampledFrom(someServices).Draw(t, "delete")}
		delete(w.services, n)
		b.DeleteService(n)
	case 4, 5, 6, 7:
		s := drawSlice(t)
		w.slices[svc.Name{Namespace: s.Namespace, Name: s.Name}] = s
		b.SetSlice(s)
	case 8:
		n := svc.Name{Namespace: "ns", Name: rapid.SampledFrom([]string{"s1", "s2", "s3", "s4"}).Draw(t, "delete slice")}
		delete(w.slices, n)
		b.DeleteSlice(n)
	case 9:
		w.node = &corev1.Node{}
		w.node.Labels = map[string]string{corev1.LabelTopologyZone: rapid.SampledFrom(someZones).Draw(t, "zone")}
		w.node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP,
			Address: rapid.SampledFrom([]string{"10.0.0.1", "192.0.2.1"}).Draw(t, "node address")}}
		w.machine = []netip.Addr{netip.MustParseAddr(w.node.Status.Addresses[0].Address)}
		b.SetNode(w.node)
		b.SetAddresses(w.machine)
	case 10:
		w.unreached = rapid.SampledFrom([][]string{nil, {"there"}, {"away", "there"}, {"unknown"}}).Draw(t, "unreached")
		b.SetUnreached(w.unreached)
	case 11:
		via := NextHop{IPv4: netip.MustParseAddr("192.168.0.1")}
		w.hops = rapid.SampledFrom([]map[string]NextHop{nil, {}, {"there": via}, {"there": via, "away": via}}).Draw(t, "hops")
		b.SetNextHops(w.hops)
	}
}

// checkChanged checks that changed is exactly the set of keys that differ, each
// once, that what is equal is the same pointer, and that nothing new means the
// same Table.
func checkChanged(t *rapid.T, before, after *Table, changed []Key) {
	if changed == nil {
		t.Fatal("changed is nil, which means unknown")
	}
	want := map[Key]bool{}
	for p := range before.All() {
		if q := after.Get(p.Key()); q == nil || !equalPorts(p, q) {
			want[p.Key()] = true
		} else if p != q {
			t.Fatalf("%s is equal, but not the same pointer", p.ID)
		}
	}
	n := 0
	for p := range after.All() {
		n++
		if before.Get(p.Key()) == nil {
			want[p.Key()] = true
		}
	}
	if n != after.Len() {
		t.Fatalf("Len() = %d, All() yields %d", after.Len(), n)
	}
	for _, k := range changed {
		if !want[k] {
			t.Fatalf("%v is said to be changed (or twice), and is not", k)
		}
		delete(want, k)
	}
	if len(want) > 0 {
		t.Fatalf("not said to be changed: %v", want)
	}
	if len(changed) == 0 && slices.Equal(before.NodePortAddrs, after.NodePortAddrs) &&
		before.ForwardsDirectly == after.ForwardsDirectly && before != after {
		t.Fatal("nothing changed, and yet a new Table")
	}
}

// checkPolicy asks each endpoint of each frontend whether it should be there,
// and each that is not there why.
func (w *world) checkPolicy(t *rapid.T, tab *Table) {
	for p := range tab.All() {
		s := w.services[p.ID.Name]
		eps := w.endpointsOf(p)
		serving := map[string]bool{}
		for a, f := range w.reached(eps) {
			if f.serving && p.Protocol == svc.UDP {
				serving[a] = true
			}
		}
		expectEndpoints(t, p, Frontend{}, "Serving", p.Serving, serving)
		for _, f := range p.Frontends {
			local := f.Kind == ClusterIP && *s.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal ||
				f.Kind != ClusterIP && externalLocal(s)
			hops := w.hopsOf(s, f.Kind, eps)
			if !maps.Equal(hopCounts(f.Hops), hops) {
				t.Fatalf("%s %v: hops %v, want %v", p.ID, f, f.Hops, hops)
			}
			local = local || hops != nil
			expectEndpoints(t, p, f, "Endpoints", f.Endpoints, w.usable(eps, local))
			if f.Kind != ClusterIP && local {
				clients := f.LocalClients
				if clients == nil {
					clients = f.Endpoints
				}
				expectEndpoints(t, p, f, "LocalClients", clients, w.usable(eps, false))
			} else if f.LocalClients != nil {
				t.Fatalf("%s %v: LocalClients where nothing is external and Local", p.ID, f)
			}
			if f.Masquerade != (f.Kind != ClusterIP && !local) {
				t.Fatalf("%s %v: wrong Masquerade", p.ID, f)
			}
			if f.Drop != (len(f.Endpoints) == 0 && len(w.usable(eps, false)) > 0) {
				t.Fatalf("%s %v: wrong Drop", p.ID, f)
			}
		}
	}
}

// hopsOf returns how many endpoints each node has that packets to a frontend are passed on to, nil if they are not.
func (w *world) hopsOf(s *corev1.Service, kind FrontendKind, eps map[string]endpointFacts) map[string]int {
	if s.Annotations[svc.ForwardingAnnotation] != svc.ForwardingDirect || kind != ExternalIP && kind != LoadBalancerIP || w.hops == nil {
		return nil
	}
	var out map[string]int
	for a := range w.usable(eps, false) {
		node := eps[a].node
		if _, known := w.hops[node]; !known && !eps[a].local {
			return nil
		}
		if out == nil {
			out = map[string]int{}
		}
		out[node]++
	}
	return out
}

func hopCounts(hops []Hop) map[string]int {
	var out map[string]int
	for _, h := range hops {
		if h.Endpoints == 0 {
			continue
		}
		if out == nil {
			out = map[string]int{}
		}
		out[h.Node] = h.Endpoints
	}
	return out
}

// reached leaves out endpoints on nodes that are not reached, if there are others that take new connections.
func (w *world) reached(eps map[string]endpointFacts) map[string]endpointFacts {
	out, others := map[string]endpointFacts{}, false
	for a, f := range eps {
		if !slices.Contains(w.unreached, f.node) {
			out[a] = f
			others = others || f.ready || f.draining
		}
	}
	if !others {
		return eps
	}
	return out
}

type endpointFacts struct {
	node                            string
	local, ready, draining, serving bool
	nodes, zones                    []string
}

// endpointsOf returns the facts of each endpoint address that the slices hold
// for p and that may be one.
func (w *world) endpointsOf(p *ServicePort) map[string]endpointFacts {
	vips := map[string]bool{}
	for _, s := range w.services {
		if proxied(s) {
			vips[s.Spec.ClusterIP] = true
		}
	}
	out := map[string]endpointFacts{}
	var names []svc.Name
	for n := range w.slices {
		names = append(names, n)
	}
	slices.SortFunc(names, svc.Name.Compare)
	for _, n := range names {
		s := w.slices[n]
		if s.Labels[discoveryv1.LabelServiceName] != p.ID.Name.Name {
			continue
		}
		for _, ep := range s.Endpoints {
			a := ep.Addresses[0]
			if vips[a] || a == "127.0.0.1" {
				continue
			}
			f := endpointFacts{local: ep.NodeName != nil && *ep.NodeName == "here"}
			if ep.NodeName != nil {
				f.node = *ep.NodeName
			}
			f.ready = ep.Conditions.Ready == nil || *ep.Conditions.Ready
			f.draining = !f.ready && (ep.Conditions.Serving == nil || *ep.Conditions.Serving) && ep.Conditions.Terminating != nil &&
				*ep.Conditions.Terminating
			f.serving = f.ready || f.draining || ep.Conditions.Serving != nil && *ep.Conditions.Serving
			if ep.Hints != nil {
				for _, z := range ep.Hints.ForZones {
					f.zones = append(f.zones, z.Name)
				}
				for _, n := range ep.Hints.ForNodes {
					f.nodes = append(f.nodes, n.Name)
				}
			}
			score := func(f endpointFacts) (n int) {
				for i, good := range []bool{f.serving, f.draining, f.ready, f.local} {
					if good {
						n += 1 << i
					}
				}
				return n
			}
			if old, twice := out[a]; !twice || score(f) > score(old) {
				out[a] = f
			}
		}
	}
	return out
}

func (w *world) usable(eps map[string]endpointFacts, local bool) map[string]bool {
	in := map[string]endpointFacts{}
	if !local {
		eps = w.reached(eps)
	}
	for a, f := range eps {
		if f.local || !local {
			in[a] = f
		}
	}
	zone := ""
	if w.node != nil {
		zone = w.node.Labels[corev1.LabelTopologyZone]
	}
	allNodes, allZones, ready := true, true, map[string]bool{}
	forNode, forZone := map[string]bool{}, map[string]bool{}
	for a, f := range in {
		if !f.ready {
			continue
		}
		ready[a] = true
		allNodes = allNodes && len(f.nodes) > 0
		allZones = allZones && len(f.zones) > 0
		if slices.Contains(f.nodes, "here") {
			forNode[a] = true
		}
		if zone != "" && slices.Contains(f.zones, zone) {
			forZone[a] = true
		}
	}
	switch {
	case !local && allNodes && len(forNode) > 0:
		return forNode
	case !local && allZones && len(forZone) > 0:
		return forZone
	case len(ready) > 0:
		return ready
	}
	draining := map[string]bool{}
	for a, f := range in {
		if f.draining {
			draining[a] = true
		}
	}
	return draining
}

func expectEndpoints(t *rapid.T, p *ServicePort, f Frontend, what string, got []Endpoint, want map[string]bool) {
	texts := map[string]bool{}
	for _, e := range got {
		texts[e.Addr.Addr().String()] = true
	}
	if len(texts) != len(got) || fmt.Sprint(texts) != fmt.Sprint(want) {
		t.Fatalf("%s %s %s: %s are %v, want %v", p.ID, f.Kind, f.Addr, what, got, want)
	}
	if !slices.IsSortedFunc(got, func(a, b Endpoint) int { return a.Addr.Compare(b.Addr) }) {
		t.Fatalf("%s %s: not sorted: %v", p.ID, what, got)
	}
}
