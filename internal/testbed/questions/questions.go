// Package questions compares what is explained with what packets do: of random clusters with one Service each, random clients ask random
// addresses. Every mode's test calls Run.
package questions

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// perWorld is how many questions each cluster gets.
const perWorld = 4

var worlds = flag.Int("worlds", 40, "how many random clusters to explain")

const (
	userspace    = "userspace"
	endpointPort = 9376
	nodePort     = 30080
)

// vips are addresses of the Service, and one that no Service has.
type vips struct{ cluster, external, balanced, nobody string }

var (
	ranges = &explain.Cluster{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")},
		ServiceCIDRs: flows.ServiceCIDRs}
	vipsOf = map[svc.Family]vips{
		svc.IPv4: {"10.96.0.10", "203.0.113.10", "203.0.113.20", "10.96.0.99"},
		svc.IPv6: {"fd00:10:96::10", "2001:db8:113::10", "2001:db8:113::20", "fd00:10:96::99"},
	}
	// hosts are the clients. Pods of the other node use that node's proxy.
	hosts = []string{"node", "other", "client", "a", "b", "c"}
)

// world is one random cluster.
type world struct {
	*flows.Env
	mode   string
	family svc.Family
	proto  svc.Protocol
	// open is whether the endpoints listen; behind whether the node has not got the endpoints.
	open, behind bool
	service      *corev1.Service
	slice        *discoveryv1.EndpointSlice
	node         *corev1.Node
}

func (w *world) nodeOf(name string) string {
	switch name {
	case "client":
		return ""
	case "node", "a", "b", "c":
		return "node"
	}
	return "other"
}

// draw makes a random Service with its endpoints: some ready, unready or terminating, on a port that is open or not, of weight 0,
// with policies, source ranges and affinity; of both families, TCP or UDP; on a node that has it or another state.
func draw(e *flows.Env, mode string, r *rand.Rand) *world {
	chance := func(n int) bool { return r.IntN(n) == 0 }
	w := &world{Env: e, mode: mode, family: svc.IPv4, proto: svc.TCP, open: !chance(4), behind: chance(8)}
	if chance(2) {
		w.family = svc.IPv6
	}
	if chance(3) {
		w.proto = svc.UDP
	}
	vip := vipsOf[w.family]
	w.service = &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ClusterIP: vip.cluster, ClusterIPs: []string{vip.cluster}, ExternalIPs: []string{vip.external},
		Selector: map[string]string{"app": "web"}, IPFamilies: []corev1.IPFamily{corev1.IPFamily(w.family.String())},
		Ports: []corev1.ServicePort{{Port: 80, NodePort: nodePort, Protocol: corev1.Protocol(w.proto.String())}}},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: vip.balanced}}}}}
	if chance(3) {
		w.service.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if chance(3) {
		w.service.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
	}
	if chance(3) {
		a := w.addr(hosts[r.IntN(len(hosts))])
		w.service.Spec.LoadBalancerSourceRanges = []string{netip.PrefixFrom(a, a.BitLen()).String()}
	}
	if chance(3) {
		w.service.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	port := int32(endpointPort)
	if !w.open {
		port = 9999 // nothing listens there
	}
	w.slice = &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressType(w.family.String()),
		Ports:       []discoveryv1.EndpointPort{{Name: new(""), Port: &port, Protocol: new(corev1.Protocol(w.proto.String()))}},
	}
	if chance(8) {
		w.slice.Annotations = map[string]string{svc.WeightAnnotation: "0"}
	}
	for _, name := range []string{"a", "b", "d"} {
		if chance(3) {
			continue
		}
		ep := discoveryv1.Endpoint{Addresses: []string{w.addr(name).String()}, NodeName: new(w.nodeOf(name)),
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: name}}
		switch r.IntN(7) {
		case 0:
			ep.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(false)}
		case 1:
			ep.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(false), Terminating: new(true)}
		case 2:
			ep.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
		}
		w.slice.Endpoints = append(w.slice.Endpoints, ep)
	}
	w.node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"},
		Spec: corev1.NodeSpec{PodCIDRs: []string{e.Node.PodCIDR(svc.IPv4).String(), e.Node.PodCIDR(svc.IPv6).String()}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: e.Node.Addr4().String()},
			{Type: corev1.NodeInternalIP, Address: e.Node.Addr6().String()}}}}
	return w
}

func (w *world) addr(host string) netip.Addr { return w.Host(host).Addr(w.family) }

// apply gives the node the Service, without the endpoints if it is behind.
func (w *world) apply(t testing.TB) {
	t.Helper()
	list := []*discoveryv1.EndpointSlice{w.slice}
	if w.behind {
		list = nil
	}
	w.Apply(t, explain.Build(ranges, "node", w.node, []*corev1.Service{w.service}, list), nil)
}

// ask explains a question as the agent and the command do: what the node has is read back, and each endpoint gets a connection.
func (w *world) ask(t testing.TB, q *explain.Question) *explain.Verdict {
	t.Helper()
	o := &explain.Objects{Services: []*corev1.Service{w.service}, Slices: []*discoveryv1.EndpointSlice{w.slice}, Node: w.node,
		Domains: []string{"cluster.local"}, Namespaces: []string{"default"}}
	tab := explain.Build(ranges, "node", w.node, o.Services, o.Slices)
	facts := &explain.Facts{Node: "node", Mode: w.mode, Addresses: []netip.Addr{w.Node.Addr4(), w.Node.PodCIDR(svc.IPv4).Addr().Next(),
		w.Node.Addr6(), w.Node.PodCIDR(svc.IPv6).Addr().Next()}}
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
			if w.proto != svc.TCP {
				break // agents do not probe it
			}
			for _, inside := range []bool{false, true} {
				for _, a := range found[i].For(inside).Endpoints {
					facts.Probes = append(facts.Probes, w.probe(t, a))
				}
			}
		}
	}
	return explain.Explain(q, o, facts)
}

func (w *world) probe(t testing.TB, a netip.AddrPort) explain.Probe {
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
func (w *world) real(t testing.TB, from string, at netip.AddrPort, v *explain.Verdict) (explain.Answer, []netip.AddrPort) {
	t.Helper()
	wait, tries := time.Duration(testbed.Patience), 1
	if v.Answer == explain.Dropped || w.mode == userspace && w.unknown(v) {
		wait = silence
	} else if len(v.Frontends) == 1 {
		tries = 12 * max(1, len(v.Frontends[0].Endpoints))
	}
	var reached []netip.AddrPort
	for range tries {
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		got, err := w.Host(from).Ask(ctx, w.proto, at)
		cancel()
		switch {
		case err == nil:
			reached = append(reached, netip.AddrPortFrom(w.addr(got.Name), endpointPort))
		case testbed.Refused(err), w.mode == userspace && (errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF)):
			return explain.Refused, nil // a proxy has taken the connection before it knows
		case testbed.Silent(err):
			return explain.Dropped, nil
		default:
			t.Fatalf("%s to %s: %v", from, at, err)
		}
	}
	slices.SortFunc(reached, netip.AddrPort.Compare)
	return explain.Answers, slices.Compact(reached)
}

// Run asks about random clusters: what is explained is what a real packet does, whether it is answered, refused or dropped, and which
// endpoints it may reach. Only an answer has no cause. Each cause must come once, except unknown ones.
func Run(t *testing.T, mode string, create flows.Factory, unknown ...explain.Cause) {
	t.Helper()
	e := flows.NewEnv(t, create)
	r := rand.New(rand.NewPCG(34, 3)) //nolint:gosec // the same clusters each time
	seen := map[explain.Cause]int{}
	for i := range *worlds {
		w := draw(e, mode, r)
		w.apply(t)
		for range perWorld {
			w.question(t, i, r, seen)
		}
	}
	t.Logf("%d questions, causes: %v", *worlds*perWorld, seen)
	for _, c := range []explain.Cause{"", explain.NoService, explain.NoEndpoint, explain.Unready, explain.Terminating, explain.WrongTargetPort,
		explain.PolicyLocal, explain.SourceRange, explain.WeightZero, explain.AffinityDead, explain.Rejected} {
		if seen[c] == 0 && !slices.Contains(unknown, c) {
			t.Errorf("no question had the cause %q: %v", c, seen)
		}
	}
}

// question compares the explanation of a random packet with the packet.
func (w *world) question(t *testing.T, i int, r *rand.Rand, seen map[explain.Cause]int) {
	t.Helper()
	w.Forget(t)
	from, vip := hosts[r.IntN(len(hosts))], vipsOf[w.family]
	at := []netip.AddrPort{
		port(vip.cluster, 80), port(vip.external, 80), port(vip.balanced, 80), port(vip.cluster, 81), port(vip.nobody, 80),
		netip.AddrPortFrom(w.Node.Addr(w.family), nodePort),
	}[r.IntN(6)]
	q := &explain.Question{Address: at, Protocol: w.proto, Client: explain.Client{Text: from, Node: w.nodeOf(from),
		Host: from == "node" || from == "other", Addrs: []netip.Addr{w.addr(from)}}}
	if !w.open && w.service.Spec.SessionAffinity == corev1.ServiceAffinityClientIP && w.proto == svc.TCP {
		// The client is kept from now on at an endpoint that does not answer.
		ctx, cancel := context.WithTimeout(t.Context(), silence)
		_, _ = w.Host(from).Ask(ctx, w.proto, at)
		cancel()
	}
	v := w.ask(t, q)
	seen[v.Cause]++
	answer, reached := w.real(t, from, at, v)
	if w.wrong(v, answer, reached) {
		t.Errorf("world %d, %s to %s %s: explained as %s %s %+v, but it is %s, and reaches %v\n%+v\n%+v", i, from, w.proto, at, v.Answer, v.Cause,
			v.Frontends, answer, reached, w.service.Spec, w.slice)
	}
	if (v.Answer == explain.Answers || v.Answer == explain.Sent) != (v.Cause == "") {
		t.Errorf("world %d: answer %s with cause %q", i, v.Answer, v.Cause)
	}
}

func port(addr string, number uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(addr), number)
}

// unknown reports whether nothing listens, which no probe has found out. Mode userspace does not pass the ICMP error on.
func (w *world) unknown(v *explain.Verdict) bool { return v.Answer == explain.Sent && !w.open }

func (w *world) wrong(v *explain.Verdict, answer explain.Answer, reached []netip.AddrPort) bool {
	switch {
	case w.unknown(v):
		return answer != explain.Refused && (w.mode != userspace || answer != explain.Dropped)
	case answer != v.Answer && (v.Answer != explain.Sent || answer != explain.Answers):
		return true
	case answer != explain.Answers:
		return false
	}
	may := v.Frontends[0].Endpoints
	if w.service.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		return len(reached) != 1 || !slices.Contains(may, reached[0])
	}
	return fmt.Sprint(reached) != fmt.Sprint(may)
}
