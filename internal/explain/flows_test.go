package explain_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

func TestMain(m *testing.M) { testbed.Main(m) }

const (
	endpointPort = 9376
	clusterIP    = "10.96.0.10"
	external     = "203.0.113.10"
	balanced     = "203.0.113.20"
	nodePort     = 30080
)

var (
	ranges = &explain.Cluster{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, ServiceCIDRs: flows.ServiceCIDRs}
	// hosts are the clients. Pods of the other node use that node's proxy.
	hosts = []string{"node", "other", "client", "a", "b", "c"}
)

// world is one random cluster.
type world struct {
	*flows.Env
	service *corev1.Service
	slice   *discoveryv1.EndpointSlice
	node    *corev1.Node
}

func (w *world) node4(name string) string {
	switch name {
	case "client":
		return ""
	case "node", "a", "b", "c":
		return "node"
	}
	return "other"
}

// draw makes a random Service with its endpoints: some ready, unready or terminating, on a port that is open or not, of weight 0,
// with policies, source ranges and affinity.
func draw(e *flows.Env, r *rand.Rand) *world {
	w := &world{Env: e}
	chance := func(n int) bool { return r.IntN(n) == 0 }
	w.service = &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ClusterIP: clusterIP, ClusterIPs: []string{clusterIP}, ExternalIPs: []string{external},
		Selector: map[string]string{"app": "web"},
		Ports:    []corev1.ServicePort{{Port: 80, NodePort: nodePort, Protocol: corev1.ProtocolTCP}}},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: balanced}}}}}
	if chance(3) {
		w.service.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if chance(3) {
		w.service.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
	}
	if chance(3) {
		w.service.Spec.LoadBalancerSourceRanges = []string{e.Host(hosts[r.IntN(len(hosts))]).Addr4().String() + "/32"}
	}
	if chance(4) {
		w.service.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	port := int32(endpointPort)
	if chance(5) {
		port = 9999 // nothing listens there
	}
	w.slice = &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new(""), Port: &port, Protocol: new(corev1.ProtocolTCP)}},
	}
	if chance(8) {
		w.slice.Annotations = map[string]string{svc.WeightAnnotation: "0"}
	}
	for _, name := range []string{"a", "b", "d"} {
		if chance(2) {
			continue
		}
		ep := discoveryv1.Endpoint{Addresses: []string{e.Host(name).Addr4().String()}, NodeName: new(w.node4(name)),
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: name}}
		switch r.IntN(5) {
		case 0:
			ep.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(false)}
		case 1:
			ep.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
		}
		w.slice.Endpoints = append(w.slice.Endpoints, ep)
	}
	w.node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"},
		Spec:   corev1.NodeSpec{PodCIDRs: []string{e.Node.PodCIDR(svc.IPv4).String()}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: e.Node.Addr4().String()}}}}
	return w
}

// ask explains a question as the agent and the command do: what the node has is read back, and each endpoint gets a connection.
func (w *world) ask(t *testing.T, q *explain.Question) *explain.Verdict {
	t.Helper()
	o := &explain.Objects{Services: []*corev1.Service{w.service}, Slices: []*discoveryv1.EndpointSlice{w.slice}, Node: w.node,
		Domains: []string{"cluster.local"}, Namespaces: []string{"default"}}
	tab := explain.Build(ranges, "node", w.node, o.Services, o.Slices)
	facts := &explain.Facts{Node: "node", Mode: "nft", Addresses: []netip.Addr{w.Node.Addr4(), w.Node.PodCIDR(svc.IPv4).Addr().Next()}}
	facts.SettingsFrom(tab)
	var client netip.Addr
	if len(q.Client.Addrs) > 0 {
		client = q.Client.Addrs[0]
	}
	for _, p := range explain.Choose(tab, svc.Name{}, q.Address, 0) {
		var asked []dataplane.Asked
		for i := range p.Frontends {
			asked = append(asked, dataplane.AskedOf(tab, p, &p.Frontends[i]))
		}
		var found []dataplane.Installed
		var err error
		w.Node.Do(func() { found, err = w.Dataplane.(dataplane.Looker).Look(t.Context(), asked, client) })
		if err != nil {
			t.Fatal(err)
		}
		facts.Ports = append(facts.Ports, explain.Port{ServicePort: p, Installed: found})
		for i := range found {
			for _, inside := range []bool{false, true} {
				for _, a := range found[i].For(inside).Endpoints {
					facts.Probes = append(facts.Probes, w.probe(t, a))
				}
			}
		}
	}
	return explain.Explain(q, o, facts)
}

func (w *world) probe(t *testing.T, a netip.AddrPort) explain.Probe {
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	if _, err := w.Node.Ask(ctx, svc.TCP, a); err != nil {
		return explain.Probe{Endpoint: a, Result: explain.NotOpen, Error: err.Error()}
	}
	return explain.Probe{Endpoint: a, Result: explain.Connected}
}

// silence is how long a question may stay without an answer before it counts as dropped.
const silence = 250 * time.Millisecond

// real connects as often as it takes to meet every endpoint, and returns what a client sees.
func (w *world) real(t *testing.T, from string, at netip.AddrPort, v *explain.Verdict) (explain.Answer, []netip.AddrPort) {
	t.Helper()
	wait, tries := time.Duration(testbed.Patience), 1
	if v.Answer == explain.Dropped {
		wait = silence
	} else if len(v.Frontends) == 1 {
		tries = 12 * max(1, len(v.Frontends[0].Endpoints))
	}
	var reached []netip.AddrPort
	for range tries {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		got, err := w.Host(from).Ask(ctx, svc.TCP, at)
		cancel()
		switch {
		case err == nil:
			reached = append(reached, netip.AddrPortFrom(w.Host(got.Name).Addr4(), endpointPort))
		case testbed.Refused(err):
			return explain.Refused, nil
		case testbed.Silent(err):
			return explain.Dropped, nil
		default:
			t.Fatalf("%s to %s: %v", from, at, err)
		}
	}
	slices.SortFunc(reached, netip.AddrPort.Compare)
	return explain.Answers, slices.Compact(reached)
}

// Of random clusters and questions, what is explained is what a real packet does: whether it is answered, refused or dropped, and
// which endpoints it may reach. Only an answer has no cause.
func TestExplanationIsWhatPacketsDo(t *testing.T) {
	e := flows.NewEnv(t, func(t testing.TB, _ *testbed.Host) dataplane.Applier {
		t.Helper()
		p, err := nft.New(nft.Config{})
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
	r := rand.New(rand.NewPCG(34, 1))
	seen := map[explain.Cause]int{}
	for i := range 50 {
		w := draw(e, r)
		e.Apply(t, explain.Build(ranges, "node", w.node, []*corev1.Service{w.service}, []*discoveryv1.EndpointSlice{w.slice}), nil)
		for range 4 {
			e.Forget(t)
			from := hosts[r.IntN(len(hosts))]
			at := []netip.AddrPort{
				flows.AP(clusterIP + ":80"), flows.AP(external + ":80"), flows.AP(balanced + ":80"), flows.AP(clusterIP + ":81"),
				flows.AP("10.96.0.99:80"), netip.AddrPortFrom(e.Node.Addr4(), nodePort),
			}[r.IntN(6)]
			q := &explain.Question{Address: at, Client: explain.Client{Text: from, Node: w.node4(from), Host: from == "node" || from == "other",
				Addrs: []netip.Addr{e.Host(from).Addr4()}}}
			v := w.ask(t, q)
			seen[v.Cause]++
			answer, reached := w.real(t, from, at, v)
			if w.wrong(v, answer, reached) {
				t.Errorf("world %d, %s to %s: explained as %s %s %+v, but it is %s, and reaches %v\n%+v\n%+v", i, from, at, v.Answer, v.Cause,
					v.Frontends, answer, reached, w.service.Spec, w.slice)
			}
			if (v.Answer == explain.Answers) != (v.Cause == "") {
				t.Errorf("world %d: answer %s with cause %q", i, v.Answer, v.Cause)
			}
		}
	}
	t.Logf("causes: %v", seen)
	for _, c := range []explain.Cause{"", explain.NoService, explain.NoEndpoint, explain.Unready, explain.WrongTargetPort, explain.PolicyLocal,
		explain.SourceRange, explain.WeightZero} {
		if seen[c] == 0 {
			t.Errorf("no question had the cause %q: %v", c, seen)
		}
	}
}

func (w *world) wrong(v *explain.Verdict, answer explain.Answer, reached []netip.AddrPort) bool {
	if answer != v.Answer {
		return true
	}
	if answer != explain.Answers {
		return false
	}
	may := v.Frontends[0].Endpoints
	if w.service.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		return len(reached) != 1 || !slices.Contains(may, reached[0])
	}
	return fmt.Sprint(reached) != fmt.Sprint(may)
}
