package explain

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// bed is a cluster with the Service default/web of two Pods, on node here and node there.
type bed struct {
	service *corev1.Service
	slice   *discoveryv1.EndpointSlice
	pods    []*corev1.Pod
	node    *corev1.Node
	q       Question
	facts   func(*Facts)
	// unannounced are the addresses that no node announces.
	unannounced map[string]Line
	policies    *Policies
}

func newBed() *bed {
	pod := func(name, ip, node string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{"app": "web"}},
			Spec: corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: ip}}}}
	}
	endpoint := func(name, ip, node string) discoveryv1.Endpoint {
		return discoveryv1.Endpoint{Addresses: []string{ip}, NodeName: &node, TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: name},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)}}
	}
	return &bed{
		service: &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			Selector: map[string]string{"app": "web"}, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyCluster,
			Ports: []corev1.ServicePort{{Name: "http", Port: 80, NodePort: 30080, Protocol: corev1.ProtocolTCP,
				TargetPort: intstr.FromString("http")}},
		}, Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}}}},
		slice: &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
			Endpoints:   []discoveryv1.Endpoint{endpoint("web-a", "10.244.1.2", "here"), endpoint("web-b", "10.244.2.2", "there")},
		},
		pods: []*corev1.Pod{pod("web-a", "10.244.1.2", "here"), pod("web-b", "10.244.2.2", "there")},
		node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "here"}, Spec: corev1.NodeSpec{PodCIDRs: []string{"10.244.1.0/24"}},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.168.70.11"}}}},
		q: Question{Service: svc.Name{Namespace: "default", Name: "web"}},
	}
}

// all changes every endpoint.
func (b *bed) all(change func(*discoveryv1.Endpoint)) {
	for i := range b.slice.Endpoints {
		change(&b.slice.Endpoints[i])
	}
}

// explain answers, with all that a node which did everything would report.
func (b *bed) explain() *Verdict {
	o := &Objects{Pods: b.pods, Node: b.node, Domains: []string{"cluster.local"}, Namespaces: []string{"default", "shop"},
		Unannounced: b.unannounced, Policies: b.policies,
		PodTrouble: func(p *corev1.Pod) string { return "trouble of " + p.Name }}
	if b.service != nil {
		o.Services = append(o.Services, b.service)
	}
	if b.slice != nil {
		o.Slices = append(o.Slices, b.slice)
	}
	cluster := &Cluster{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}}
	t := Build(cluster, "here", b.node, o.Services, o.Slices)
	facts := &Facts{Node: "here", Mode: "nft", Addresses: []netip.Addr{netip.MustParseAddr("192.168.70.11")}}
	facts.SettingsFrom(t)
	for _, p := range Choose(t, Resolve(&b.q, o), b.q.Address, b.q.Protocol) {
		port := Port{ServicePort: p}
		for i := range p.Frontends {
			has := dataplane.Expected(p, &p.Frontends[i])
			has.Says("element", "text")
			port.Installed = append(port.Installed, has)
			for _, ep := range has.Outside.Endpoints {
				if _, known := facts.probe(ep); !known {
					facts.Probes = append(facts.Probes, Probe{Endpoint: ep, Result: Connected})
				}
			}
		}
		facts.Ports = append(facts.Ports, port)
	}
	if b.facts != nil {
		b.facts(facts)
	}
	return Explain(&b.q, o, facts)
}

// ports are what the node's Table has by the present objects.
func (b *bed) ports() (out []Port) {
	t := Build(&Cluster{}, "here", b.node, []*corev1.Service{b.service}, []*discoveryv1.EndpointSlice{b.slice})
	for _, p := range Choose(t, svc.NameOf(b.service), netip.AddrPort{}, 0) {
		out = append(out, Port{ServicePort: p})
	}
	return out
}

func setProbes(result Result, endpoints ...string) func(*Facts) {
	return func(f *Facts) {
		for i := range f.Probes {
			if slices.Contains(endpoints, f.Probes[i].Endpoint.String()) {
				f.Probes[i].Result, f.Probes[i].Error = result, string(result)
			}
		}
	}
}

const (
	first  = "10.244.1.2:8080"
	second = "10.244.2.2:8080"
)

// Each cause is told from all others, and its line names the object and the field, or the node's own state.
func TestCauses(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*bed)
		answer Answer
		cause  Cause
		text   string // of a line
		source string // of that line
	}{
		{"well", func(*bed) {}, Answers, "", "sent to one of 2 endpoints", "EndpointSlices of Service default/web"},
		{"the last write of a slice", func(b *bed) {
			at := func(minute int, manager string) []metav1.ManagedFieldsEntry {
				when := metav1.Date(2026, 1, 1, 12, minute, 0, 0, time.UTC)
				return []metav1.ManagedFieldsEntry{{Manager: manager, Operation: "Update", Time: &when}}
			}
			b.service.ManagedFields, b.slice.ManagedFields, b.pods[0].ManagedFields = at(1, "kubectl"), at(3, "controllers"), at(2, "agent")
		}, Answers, "", "last write: EndpointSlice default/web-1, by controllers (Update) at 2026-01-01T12:03:00Z",
			"EndpointSlice default/web-1 metadata.managedFields"},
		{"UDP", func(b *bed) {
			b.service.Spec.Ports[0].Protocol, b.slice.Ports[0].Protocol = corev1.ProtocolUDP, new(corev1.ProtocolUDP)
			b.facts = func(f *Facts) { f.Probes = nil }
		}, Sent, "", "UDP: not probed", "Service default/web spec.ports"},
		{"then: endpoints that the objects no longer have", func(b *bed) {
			b.q.Then = true
			ports := b.ports()
			b.slice.Endpoints, b.service.Spec.Selector = nil, map[string]string{"app": "typo"}
			b.facts = func(f *Facts) { f.Ports = ports }
		}, Sent, "", "sent to one of 2 endpoints", ""},
		{"then: no endpoint", func(b *bed) {
			b.q.Then = true
			endpoints := b.slice.Endpoints
			b.slice.Endpoints = nil
			ports := b.ports()
			b.slice.Endpoints = endpoints
			b.facts = func(f *Facts) { f.Ports = ports }
		}, Refused, NoEndpoint, "no endpoint for new connections at that time; why is not known", "history of node here"},
		{"then: not there", func(b *bed) {
			b.q.Then = true
			b.facts = func(f *Facts) { f.Ports = nil }
		}, Dropped, NoService, "node here had no port of it at that time", "history of node here"},
		{"then: not remembered", func(b *bed) {
			b.q.Then = true
			b.facts = func(f *Facts) { f.Ports, f.Problem = nil, "it remembers nothing" }
		}, Unknown, "", "it remembers nothing", "agent of node here"},
		{"no such Service", func(b *bed) { b.service.Name = "wed" }, NoName, NoService,
			"there is no Service default/web; there are wed", "API server"},
		{"no Service at the address", func(b *bed) { b.q = Question{Address: netip.MustParseAddrPort("10.96.0.99:80")} }, Dropped, NoService,
			"no Service has the address 10.96.0.99", "ServiceCIDRs"},
		{"no such port of the address", func(b *bed) { b.q = Question{Address: netip.MustParseAddrPort("10.96.0.10:81")} }, Refused, NoService,
			"Service default/web has no port 81 (it has 80/TCP)", "Service default/web spec.ports"},
		{"an address of nothing", func(b *bed) { b.q = Question{Address: netip.MustParseAddrPort("10.244.2.2:80")} }, Elsewhere, NoService,
			"Pod default/web-b has it", "API server: Services"},
		{"no Pod with the labels", func(b *bed) {
			b.slice.Endpoints, b.service.Spec.Selector["app"] = nil, "wep"
		}, Refused, NoEndpoint, "no Pod has the labels app=wep", "Service default/web spec.selector"},
		{"no selector", func(b *bed) { b.slice, b.service.Spec.Selector = nil, nil }, Refused, NoEndpoint,
			"the Service has no selector", "spec.selector"},
		{"unready", func(b *bed) { b.all(func(e *discoveryv1.Endpoint) { e.Conditions.Ready = new(false) }) }, Refused, Unready,
			"none of 2 endpoints is ready: Pod web-a: trouble of web-a", "EndpointSlice default/web-1 endpoints[0].conditions.ready"},
		{"Pods that are no endpoints yet", func(b *bed) { b.slice.Endpoints = nil }, Refused, Unready,
			"none of 2 Pods is an endpoint yet: Pod web-a: trouble of web-a", "Pod default/web-a status"},
		{"terminating", func(b *bed) {
			b.all(func(e *discoveryv1.Endpoint) {
				e.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(false), Terminating: new(true)}
			})
		}, Refused, Terminating, "all 2 endpoints are terminating", "endpoints[0].conditions.terminating"},
		{"terminating and serving", func(b *bed) {
			b.all(func(e *discoveryv1.Endpoint) {
				e.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
			})
		}, Answers, "", "sent to one of 2 endpoints", ""},
		{"targetPort names no port", func(b *bed) { b.slice.Ports = nil }, Refused, WrongTargetPort,
			"targetPort http names no port of the Pods", "Service default/web spec.ports[0].targetPort"},
		{"nothing listens", func(b *bed) { b.facts = setProbes(NotOpen, first, second) }, Refused, WrongTargetPort,
			"nothing listens on endpoint 10.244.1.2:8080", "connection from node here"},
		{"nothing listens on one", func(b *bed) { b.facts = setProbes(NotOpen, second) }, Sometimes, WrongTargetPort,
			"nothing listens on endpoint 10.244.2.2:8080", "connection from node here"},
		{"policy Local", func(b *bed) {
			b.service.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			b.slice.Endpoints = b.slice.Endpoints[1:]
		}, Dropped, PolicyLocal, "node here, which has none", "Service default/web spec.externalTrafficPolicy"},
		{"policy Local inside", func(b *bed) {
			b.service.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
			b.slice.Endpoints = b.slice.Endpoints[1:]
		}, Dropped, PolicyLocal, "node here, which has none", "Service default/web spec.internalTrafficPolicy"},
		{"source range", func(b *bed) {
			b.service.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24"}
			b.q.Client = Client{Text: "192.0.2.1", Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
		}, Dropped, SourceRange, "client 192.0.2.1 is not in [198.51.100.0/24]", "Service default/web spec.loadBalancerSourceRanges"},
		{"let in", func(b *bed) {
			b.service.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24"}
			b.q.Client = Client{Text: "198.51.100.7", Addrs: []netip.Addr{netip.MustParseAddr("198.51.100.7")}}
		}, Answers, "", "client 198.51.100.7 is let in, by 198.51.100.0/24", ""},
		{"weight 0", func(b *bed) { b.slice.Annotations = map[string]string{svc.WeightAnnotation: "0"} }, Refused, WeightZero,
			"all 2 endpoints that are ready have weight 0", "Pod default/web-a annotation fairlead.dev/weight"},
		{"affinity to a dead endpoint", func(b *bed) {
			b.service.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			b.q.Client = Client{Text: "192.0.2.1", Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
			b.facts = func(f *Facts) {
				setProbes(NoReply, second)(f)
				for i := range f.Ports[0].Installed {
					f.Ports[0].Installed[i].Kept = netip.MustParseAddrPort(second)
				}
			}
		}, Dropped, AffinityDead, "client 192.0.2.1 is kept at 10.244.2.2:8080", "Service default/web spec.sessionAffinity"},
		{"affinity to one that answers", func(b *bed) {
			b.facts = func(f *Facts) {
				setProbes(NoReply, second)(f)
				for i := range f.Ports[0].Installed {
					f.Ports[0].Installed[i].Kept = netip.MustParseAddrPort(first)
				}
			}
		}, Answers, "", "", ""},
		{"rejected", func(b *bed) {
			b.facts = func(f *Facts) {
				f.Ports[0].Rejected = "nf_tables rejected the change: no space"
				for i := range f.Ports[0].Installed {
					f.Ports[0].Installed[i] = dataplane.Installed{Proof: []dataplane.Proof{{Element: "map vips", Text: "no such element"}}}
				}
			}
		}, Dropped, Rejected, "the node could not write this port: nf_tables rejected the change", "node here, mode nft"},
		{"removed by another program", func(b *bed) {
			b.facts = func(f *Facts) { f.Ports[0].Installed[0].Outside.Endpoints = nil }
		}, Refused, Rejected, "something else than its table", "node here, mode nft"},
		{"name without a namespace", func(b *bed) { b.q = Question{Name: "web.shops.svc.cluster.local"} }, NoName, NameUnknown,
			"there is no namespace shops", "Namespaces"},
		{"name without a Service", func(b *bed) { b.q = Question{Name: "web.shop"} }, NoName, NameUnknown,
			"there is no Service shop/web; there is one in default", "API server"},
		{"name of another domain", func(b *bed) { b.q = Question{Name: "web.default.svc.cluster.locl"} }, NoName, NameUnknown,
			"is no name of the cluster domains cluster.local", "DNS of the cluster"},
		{"name", func(b *bed) { b.q = Question{Name: "web.default.svc"} }, Answers, "", "is the name web.default.svc.cluster.local", "DNS"},
		{"no route", func(b *bed) { b.facts = setProbes(Unroutable, first, second) }, Dropped, NoRoute, "does not answer node here: no route",
			"connection from node here"},
		{"dropped by another program", func(b *bed) {
			b.facts = setProbes(NoReply, first, second)
			b.node.Status.Conditions = []corev1.NodeCondition{{Type: svc.PacketsForwarded, Status: corev1.ConditionFalse,
				Message: "chain FORWARD of table ip filter drops"}}
		}, Dropped, NoRoute, "chain FORWARD of table ip filter drops", "Node here condition fairlead.dev/PacketsForwarded"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBed()
			c.change(b)
			v := b.explain()
			if v.Answer != c.answer || v.Cause != c.cause {
				t.Errorf("answer %q, cause %q, want %q, %q", v.Answer, v.Cause, c.answer, c.cause)
			}
			lines := slices.Clone(v.Lines)
			for _, f := range v.Frontends {
				lines = append(lines, f.Lines...)
			}
			if !slices.ContainsFunc(lines, func(l Line) bool { return strings.Contains(l.Text, c.text) && strings.Contains(l.Source, c.source) }) {
				t.Errorf("no line %q of %q in\n%s", c.text, c.source, text(v))
			}
			for _, l := range lines {
				if l.Text == "" || l.Source == "" {
					t.Errorf("a line without text or source: %+v", l)
				}
			}
		})
	}
}

// An endpoint that the node leaves out because it does not reach the endpoint's node is said to be that.
func TestUnreachedEndpoint(t *testing.T) {
	b := newBed()
	b.facts = func(f *Facts) {
		f.Unreached = []string{"elsewhere", "there"}
		p := &f.Ports[0]
		for i := range p.Frontends {
			p.Frontends[i].Endpoints = p.Frontends[i].Endpoints[:1]
			p.Installed[i] = dataplane.Expected(p.ServicePort, &p.Frontends[i])
		}
	}
	v := b.explain()
	want := Line{"ready, but node here does not reach node there: it is the last choice", "node here"}
	if len(v.Endpoints) != 2 || !v.Endpoints[0].May || v.Endpoints[1].May || !slices.Contains(v.Endpoints[1].Why, want) {
		t.Errorf("want %v in\n%s", want, text(v))
	}
}

// What else the kernel knows is added: how endpoints are reached, and which connections are tracked, also at what is no endpoint any more.
func TestKernel(t *testing.T) {
	const former = "10.244.9.9:8080"
	tracked := func(e ...TrackedEndpoint) func(*Facts) {
		return func(f *Facts) {
			at := netip.MustParseAddrPort(first)
			f.Routes = []Route{{To: at.Addr(), Device: "vxlan0", Via: netip.MustParseAddr("10.244.1.0"), Source: netip.MustParseAddr("10.244.2.1")},
				{To: netip.MustParseAddrPort(second).Addr(), Error: "network is unreachable"}}
			f.Tracked = &Tracked{Connections: 7, Endpoints: e}
		}
	}
	for _, c := range []struct {
		name           string
		facts          func(*Facts)
		want, unwanted string
	}{
		{"nothing is known", func(*Facts) {}, "", "tracked|route"},
		{"routes", tracked(), "{route: device vxlan0, by router 10.244.1.0, from 10.244.2.1 routes of node here}", "is not an endpoint"},
		{"no route", tracked(), "{no route: network is unreachable routes of node here}", "is not an endpoint"},
		{"connections", tracked(TrackedEndpoint{netip.MustParseAddrPort(first), 4}),
			"{tracked connections: 4 connection tracking of node here}", "is not an endpoint"},
		{"a former endpoint", tracked(TrackedEndpoint{netip.MustParseAddrPort(former), 3}),
			"{tracked connections with " + former + ", which is not an endpoint: 3; they stay there until they end connection tracking " +
				"of node here}", ""},
		{"mode userspace", func(f *Facts) {
			f.Mode = "userspace"
			tracked(TrackedEndpoint{netip.MustParseAddrPort(former), 3})(f)
		}, "{tracked connections: 7 connection tracking of node here}", "is not an endpoint"},
		{"unread", func(f *Facts) { f.Tracked = &Tracked{Error: "deadline exceeded"} },
			"{tracked connections are not known: deadline exceeded connection tracking of node here}", "connections: "},
	} {
		b := newBed()
		b.facts = c.facts
		got := fmt.Sprint(b.explain())
		if !strings.Contains(got, c.want) || c.unwanted != "" && regexp.MustCompile(c.unwanted).MatchString(got) {
			t.Errorf("%s: want %q, and not %q, in %s", c.name, c.want, c.unwanted, got)
		}
	}
}

// A Service is in the environment of Pods that start later, unless another one takes its variable.
func TestVariables(t *testing.T) {
	b := newBed()
	const want = "start from now on have it as WEB_SERVICE_HOST"
	if got := text(b.explain()); !strings.Contains(got, want) {
		t.Errorf("no %q in %s", want, got)
	}
	b.service.Spec.ClusterIP, b.service.Spec.ClusterIPs = corev1.ClusterIPNone, []string{corev1.ClusterIPNone}
	if got := text(b.explain()); strings.Contains(got, "_SERVICE_HOST") {
		t.Errorf("a headless Service has a variable: %s", got)
	}
}

// A headless Service shows its endpoints: which are in DNS, and why others are not.
func TestHeadlessEndpoints(t *testing.T) {
	b := newBed()
	b.service.Spec.ClusterIP, b.service.Spec.ClusterIPs = corev1.ClusterIPNone, []string{corev1.ClusterIPNone}
	b.slice.Endpoints[0].Conditions.Ready = new(false)
	b.facts = func(f *Facts) { f.Ports, f.Probes = nil, nil }
	v := b.explain()
	if len(v.Endpoints) != 2 || v.Endpoints[0].Address != second || !v.Endpoints[0].May || v.Endpoints[0].Pod != "web-b" ||
		v.Endpoints[1].Address != first || v.Endpoints[1].May {
		t.Fatalf("%+v", v.Endpoints)
	}
	if why := v.Endpoints[1].Why[0]; why.Text != "not ready, and not in DNS: Pod web-a: trouble of web-a" ||
		why.Source != "EndpointSlice default/web-1 endpoints[0].conditions.ready" {
		t.Errorf("%+v", why)
	}
	b.service.Spec.PublishNotReadyAddresses = true
	if v := b.explain(); !v.Endpoints[0].May || !strings.Contains(text(v), "Service default/web spec.publishNotReadyAddresses") {
		t.Errorf("with publishNotReadyAddresses: %+v", v.Endpoints)
	}
	b.service.Spec.Ports, b.slice.Ports = nil, nil
	if v := b.explain(); len(v.Endpoints) != 2 || v.Endpoints[0].Address != "10.244.1.2" {
		t.Errorf("without ports: %+v", v.Endpoints)
	}
}

// In the proxied way the ranges are enforced by the node that announces the address, from the field or an annotation.
func TestSourceRangesOfTheProxiedWay(t *testing.T) {
	for name, c := range map[string]struct {
		annotation, from string
		ranges           []string
		answer           Answer
		cause            Cause
		line             string
	}{
		"let in": {"", "198.51.100.7", []string{"198.51.100.0/24"}, Sent, "",
			"client 198.51.100.7 is let in, by [198.51.100.0/24] [Service default/web spec.loadBalancerSourceRanges]"},
		"not let in": {"", "203.0.113.200", []string{"198.51.100.0/24"}, Refused, SourceRange,
			"client 203.0.113.200 is not in [198.51.100.0/24]: its connection is closed before any answer " +
				"[Service default/web spec.loadBalancerSourceRanges]"},
		"by an annotation": {"198.51.100.0/24", "203.0.113.200", nil, Refused, SourceRange,
			"[Service default/web annotation service.beta.kubernetes.io/load-balancer-source-ranges]"},
		"any client": {"", "", []string{"198.51.100.0/24"}, Sent, "", "only clients in [198.51.100.0/24] are let in; name one with --from"},
		"all":        {"", "203.0.113.200", nil, Sent, "", "in the proxied way"},
	} {
		b := newBed()
		b.service.Annotations = map[string]string{"fairlead.dev/lb-protocol": "http"}
		if c.annotation != "" {
			b.service.Annotations["service.beta.kubernetes.io/load-balancer-source-ranges"] = c.annotation
		}
		b.service.Status.LoadBalancer.Ingress[0].IPMode = new(corev1.LoadBalancerIPModeProxy)
		b.service.Spec.LoadBalancerSourceRanges = c.ranges
		b.q = Question{Address: netip.MustParseAddrPort("203.0.113.1:80")}
		if c.from != "" {
			b.q.Client = Client{Text: c.from, Addrs: []netip.Addr{netip.MustParseAddr(c.from)}}
		}
		v := b.explain()
		if v.Answer != c.answer || v.Cause != c.cause || !strings.Contains(text(v), c.line) {
			t.Errorf("%s: %s, %s; want %s, %s, %q in\n%s", name, v.Answer, v.Cause, c.answer, c.cause, c.line, text(v))
		}
	}
}

// What the node reports about the rules of other programs stands before the probes, and also where a probe of the node succeeds: the
// rules may drop what others send.
func TestForeignRulesFirst(t *testing.T) {
	b := newBed()
	b.node.Status.Conditions = []corev1.NodeCondition{{Type: svc.PacketsForwarded, Status: corev1.ConditionFalse, Message: "chain X drops"}}
	if said := text(b.explain()); !strings.Contains(said, "chain X drops") {
		t.Errorf("nothing failed, and the rules are not named:\n%s", said)
	}
	b.facts = setProbes(NoReply, first)
	said := text(b.explain())
	rules, probe := strings.Index(said, "chain X drops"), strings.Index(said, "does not answer node here")
	if rules < 0 || probe < 0 || rules > probe {
		t.Errorf("the rules are not before the probe:\n%s", said)
	}
	b.q.Then = true
	if said := text(b.explain()); strings.Contains(said, "chain X drops") {
		t.Errorf("the past has the rules of the present:\n%s", said)
	}
}

// Every cause has a test above: none can be added without one.
func TestCausesAreTwelve(t *testing.T) {
	if n := len(Causes()); n != 12 {
		t.Errorf("%d causes", n)
	}
}

func text(v *Verdict) string {
	var b strings.Builder
	for _, l := range v.Lines {
		fmt.Fprintf(&b, "%s [%s]\n", l.Text, l.Source)
	}
	for _, f := range v.Frontends {
		fmt.Fprintf(&b, "%s %s %s %s: %s %s %v\n", f.Kind, f.Protocol, f.Address, f.Port, f.Answer, f.Cause, f.Endpoints)
		for _, l := range slices.Concat(f.Lines, f.Proof) {
			fmt.Fprintf(&b, "  %s [%s]\n", l.Text, l.Source)
		}
	}
	for _, e := range v.Endpoints {
		fmt.Fprintf(&b, "%+v\n", e)
	}
	return b.String()
}

// Packets that a node passes on are explained, also where it has no endpoint, by the nodes and the annotation.
func TestPassedOn(t *testing.T) {
	b := newBed()
	b.q = Question{Address: netip.MustParseAddrPort("203.0.113.1:80")}
	b.facts = func(f *Facts) {
		for i := range f.Ports[0].Frontends {
			if at := &f.Ports[0].Frontends[i]; at.Kind == table.LoadBalancerIP {
				at.LocalClients, at.Endpoints, at.Drop, at.Masquerade = at.Endpoints, nil, true, false
				at.Hops = []table.Hop{{Node: "there", Via: netip.MustParseAddr("192.168.70.12"), Endpoints: 2}}
				f.Ports[0].Installed[i] = dataplane.Expected(f.Ports[0].ServicePort, at)
			}
		}
	}
	v := b.explain()
	if len(v.Frontends) != 1 || v.Frontends[0].Answer != Answers {
		t.Fatalf("%+v", v.Frontends)
	}
	said := text(v)
	for _, want := range []string{
		"there via 192.168.70.12 x2", "annotation fairlead.dev/forwarding", "endpoints see the address of the client",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("%q is not in\n%s", want, said)
		}
	}
}

// Of Pods that connect-time does not translate for the answer tells a client that is one of them, or may be.
func TestUncoveredPods(t *testing.T) {
	pod := netip.MustParseAddr("10.244.1.9")
	for name, c := range map[string]struct {
		client Client
		want   string
	}{
		"any client":   {Client{}, "the rules of mode nft translate connections of some Pods, not connect-time: GROUPS; REMEDY"},
		"the Pod":      {Client{Addrs: []netip.Addr{pod}, Node: "here"}, "translate connections of the client, not connect-time: GROUPS"},
		"another Pod":  {Client{Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.8")}, Node: "here"}, ""},
		"the node":     {Client{Host: true, Node: "here"}, ""},
		"no such Pods": {Client{}, ""},
	} {
		b := newBed()
		b.q.Client = c.client
		b.facts = func(f *Facts) {
			if name != "no such Pods" {
				f.Uncovered = &Uncovered{Addresses: []netip.Addr{pod}, Text: "GROUPS", Remedy: "REMEDY"}
			}
		}
		v := b.explain()
		i := slices.IndexFunc(v.Lines, func(l Line) bool { return l.Source == "node here --connect-time-cgroup" })
		if (i < 0) != (c.want == "") || i >= 0 && !strings.Contains(v.Lines[i].Text, c.want) {
			t.Errorf("%s: %+v, want %q", name, v.Lines, c.want)
		}
	}
}
