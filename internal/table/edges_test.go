package table

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

func serviceOf(name string, ips ...string) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
	s.Spec.ClusterIP, s.Spec.ClusterIPs = ips[0], ips
	s.Spec.Ports = []corev1.ServicePort{{Port: 80}}
	return s
}

func sliceOf(name, service string, port int32, addrs ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service},
	}, AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: &port}}}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, NodeName: new("here")})
	}
	return s
}

// onlyPort returns the one service port of a Builder's Table.
func onlyPort(t *testing.T, b *Builder) *ServicePort {
	t.Helper()
	tab, _ := b.Build()
	if tab.Len() != 1 {
		t.Fatalf("%d service ports, want 1:\n%s", tab.Len(), tab)
	}
	return slices.Collect(tab.All())[0]
}

func TestKnownServices(t *testing.T) {
	b, name := NewBuilder(Config{NodeName: "here"}), svc.Name{Namespace: "ns", Name: "a"}
	check := func(when string, uid string, want ...svc.Name) {
		t.Helper()
		if got := slices.Collect(b.Services()); !slices.Equal(got, want) {
			t.Errorf("%s: Services %v, want %v", when, got, want)
		}
		if got := b.UID(name); string(got) != uid {
			t.Errorf("%s: UID %q, want %q", when, got, uid)
		}
	}
	check("nothing set", "")
	b.SetSlice(sliceOf("a-1", "a", 80, "10.244.0.1"))
	check("only a slice", "")
	s := serviceOf("a", "10.96.0.1")
	s.UID = "u1"
	b.SetService(s)
	check("Service set", "u1", name)
	b.DeleteService(name)
	check("Service deleted, slice left", "")
}

// Of two claims that are alike in all else, the Service with the lesser name has
// the frontend, in whichever order they come.
func TestClaimTieGoesByName(t *testing.T) {
	at := netip.MustParseAddrPort("192.0.2.1:80")
	for _, order := range [][]string{{"a", "b"}, {"b", "a"}} {
		b := NewBuilder(Config{NodeName: "here"})
		for _, name := range order {
			s := serviceOf(name, map[string]string{"a": "10.96.0.1", "b": "10.96.0.2"}[name])
			s.Spec.ExternalIPs = []string{"192.0.2.1"}
			b.SetService(s)
		}
		tab, _ := b.Build()
		for _, name := range order {
			p := tab.Get(Key{ID: svc.PortName{Name: svc.Name{Namespace: "ns", Name: name}}, Family: svc.IPv4})
			has := slices.ContainsFunc(p.Frontends, func(f Frontend) bool { return f.Addr == at })
			if has != (name == "a") {
				t.Errorf("set in the order %v: %s has %s: %v", order, name, at, has)
			}
		}
	}
}

func TestNodePortAddressesIsDefault(t *testing.T) {
	for _, c := range []struct {
		words []string
		want  bool
	}{{nil, true}, {[]string{"primary"}, false}, {[]string{"192.0.2.0/24"}, false}} {
		n, err := ParseNodePortAddresses(c.words)
		if err != nil || n.IsDefault() != c.want {
			t.Errorf("%v: default %v, %v; want %v", c.words, n.IsDefault(), err, c.want)
		}
	}
}

func TestScheduler(t *testing.T) {
	b := NewBuilder(Config{NodeName: "here", Scheduler: func(a map[string]string) (string, error) {
		if a["s"] == "bad" {
			return "", errors.New("no such scheduler")
		}
		return a["s"], nil
	}})
	s := serviceOf("a", "10.96.0.1")
	s.Annotations = map[string]string{"s": "wrr"}
	b.SetService(s)
	if p := onlyPort(t, b); p.Scheduler != "wrr" || len(b.Problems()) != 0 {
		t.Errorf("scheduler %q, problems %v", p.Scheduler, b.Problems())
	}
	s = s.DeepCopy()
	s.Annotations["s"] = "bad"
	b.SetService(s)
	want := []Problem{{Service: svc.Name{Namespace: "ns", Name: "a"}, Reason: ReasonUnknownScheduler, Message: "no such scheduler"}}
	if p := onlyPort(t, b); p.Scheduler != "" || len(p.Frontends) != 1 || !slices.Equal(b.Problems(), want) {
		t.Errorf("scheduler %q, %d frontends, problems %v", p.Scheduler, len(p.Frontends), b.Problems())
	}
}

// A timeout of 0, which no API server lets in, is the default (behaviour 62).
func TestAffinityTimeout(t *testing.T) {
	for seconds, want := range map[int32]time.Duration{-1: defaultAffinity, 0: defaultAffinity, 1: time.Second, 86400: 24 * time.Hour} {
		s := serviceOf("a", "10.96.0.1")
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
		if got := affinity(s); got != want {
			t.Errorf("timeoutSeconds %d: %s, want %s", seconds, got, want)
		}
	}
}

// externalTrafficPolicy counts where the Service's type or its external IPs make
// it external.
func TestExternalPolicyNeedsAnExternalService(t *testing.T) {
	for _, c := range []struct {
		kind       corev1.ServiceType
		external   []string
		masquerade bool
	}{
		{corev1.ServiceTypeClusterIP, nil, true},
		{corev1.ServiceTypeClusterIP, []string{"192.0.2.1"}, false},
		{corev1.ServiceTypeLoadBalancer, nil, false},
		{corev1.ServiceTypeNodePort, nil, false},
	} {
		b := NewBuilder(Config{NodeName: "here"})
		s := serviceOf("a", "10.96.0.1")
		s.Spec.Type, s.Spec.ExternalIPs, s.Spec.ExternalTrafficPolicy = c.kind, c.external, corev1.ServiceExternalTrafficPolicyLocal
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}
		b.SetService(s)
		for _, f := range onlyPort(t, b).Frontends {
			if f.Kind != ClusterIP && f.Masquerade != c.masquerade {
				t.Errorf("%s with external IPs %v: %s masquerade %v", c.kind, c.external, f.Kind, f.Masquerade)
			}
		}
	}
}

func TestHealthCheckPortBounds(t *testing.T) {
	for port, want := range map[int32]struct {
		port  uint16
		ready int
	}{-1: {}, 0: {}, 1: {1, 2}, 65535: {65535, 2}, 65536: {}} {
		b := NewBuilder(Config{NodeName: "here"})
		s := serviceOf("a", "10.96.0.1")
		s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
		s.Spec.HealthCheckNodePort = port
		b.SetService(s)
		b.SetSlice(sliceOf("a-1", "a", 80, "10.244.0.1", "10.244.0.2"))
		if p := onlyPort(t, b); p.HealthCheckNodePort != want.port || p.LocalReady != want.ready {
			t.Errorf("healthCheckNodePort %d: port %d with %d ready, want %v", port, p.HealthCheckNodePort, p.LocalReady, want)
		}
	}
}

// The hints of an endpoint may be there and name no zone: then they are missing.
func TestEmptyHintsAreMissing(t *testing.T) {
	b := NewBuilder(Config{NodeName: "here"})
	b.SetNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{corev1.LabelTopologyZone: "z1"}}})
	b.SetService(serviceOf("a", "10.96.0.1"))
	s := sliceOf("a-1", "a", 80, "10.244.0.1", "10.244.0.2")
	s.Endpoints[0].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z1"}}}
	s.Endpoints[1].Hints = &discoveryv1.EndpointHints{}
	b.SetSlice(s)
	if eps := onlyPort(t, b).Frontends[0].Endpoints; len(eps) != 2 {
		t.Errorf("endpoints %v, want both", eps)
	}
}

func TestPortBounds(t *testing.T) {
	for _, c := range []struct {
		port, node int32
		frontends  int
	}{{0, 0, 0}, {1, 0, 1}, {65535, 0, 1}, {65536, 0, 0}, {80, -1, 0}, {80, 1, 2}, {80, 65535, 2}, {80, 65536, 0}} {
		s := serviceOf("a", "10.96.0.1")
		s.Spec.Ports = []corev1.ServicePort{{Port: c.port, NodePort: c.node}}
		quiet := &complaints{}
		got := wants(s, quiet)
		if len(got) != c.frontends || (len(quiet.done()) > 0) != (c.frontends == 0) {
			t.Errorf("port %d, nodePort %d: %d frontends, problems %v; want %d", c.port, c.node, len(got), quiet.problems, c.frontends)
		}
	}
	for port, want := range map[int32]uint16{-1: 0, 0: 0, 1: 1, 65535: 65535, 65536: 0} {
		if got := keep(sliceOf("a-1", "a", port), "here").portNumber("", svc.TCP); got != want {
			t.Errorf("target port %d is kept as %d, want %d", port, got, want)
		}
	}
}

// What a Service wants stands together by key: by port name, then IPv4 before
// IPv6, whatever the order of its cluster IPs.
func TestWantsAreSortedByKey(t *testing.T) {
	s := serviceOf("a", "fd00::1", "10.96.0.1")
	s.Spec.Ports = []corev1.ServicePort{{Name: "q", Port: 81, NodePort: 30081}, {Name: "p", Port: 80, NodePort: 30080}}
	s.Spec.ExternalIPs = []string{"2001:db8::1", "192.0.2.1"}
	var got []string
	for _, w := range wants(s, &complaints{}) {
		got = append(got, w.key.ID.Port+" "+w.kind.String()+" "+w.at.Addr.String())
	}
	want := []string{
		"p ClusterIP 10.96.0.1:80", "p ExternalIP 192.0.2.1:80", "p NodePort 0.0.0.0:30080",
		"p ClusterIP [fd00::1]:80", "p ExternalIP [2001:db8::1]:80", "p NodePort [::]:30080",
		"q ClusterIP 10.96.0.1:81", "q ExternalIP 192.0.2.1:81", "q NodePort 0.0.0.0:30081",
		"q ClusterIP [fd00::1]:81", "q ExternalIP [2001:db8::1]:81", "q NodePort [::]:30081",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestWithPortsFrom(t *testing.T) {
	port := func(name string) *ServicePort {
		return &ServicePort{ID: svc.PortName{Name: svc.Name{Namespace: "ns", Name: name}}, Family: svc.IPv4}
	}
	old, now, kept, added := port("a"), port("a"), port("b"), port("c")
	before, after := New(old, kept), New(now, kept, added)
	keys := slices.Values([]Key{now.Key(), added.Key()})
	check := func(when string, got *Table, want map[Key]*ServicePort) {
		t.Helper()
		all := map[Key]*ServicePort{}
		for p := range got.All() {
			all[p.Key()] = p
		}
		if !maps.Equal(all, want) || got.Len() != len(want) {
			t.Errorf("%s: %v (%d), want %v", when, all, got.Len(), want)
		}
	}
	check("from before", after.WithPortsFrom(before, keys), map[Key]*ServicePort{old.Key(): old, kept.Key(): kept})
	check("from nothing", after.WithPortsFrom(nil, keys), map[Key]*ServicePort{kept.Key(): kept})
	check("the original", after, map[Key]*ServicePort{now.Key(): now, kept.Key(): kept, added.Key(): added})
}

// A Problem names the same owner of a cluster IP that two Services have, in
// whichever order they come; and nothing is remembered of one that has gone.
func TestClusterIPOwners(t *testing.T) {
	a := netip.MustParseAddr("10.96.0.1")
	for _, order := range [][]string{{"a", "b"}, {"b", "a"}} {
		b := NewBuilder(Config{NodeName: "here"})
		for _, name := range order {
			b.SetService(serviceOf(name, "10.96.0.1"))
		}
		b.SetSlice(sliceOf("c-1", "c", 80, "10.96.0.1", "10.96.0.9"))
		b.SetService(serviceOf("c", "10.96.0.3"))
		b.Build()
		if o := b.vips.owner(a); o == nil || o.name.Name != "a" {
			t.Fatalf("set in the order %v: the owner of %s is %v", order, a, o)
		}
		if len(b.vips.blocks) != 1 || len(b.vips.near) != 2 {
			t.Fatalf("blocks %v, near %v", b.vips.blocks, b.vips.near)
		}
		for _, name := range []string{"a", "b", "c"} {
			if b.Build(); len(b.vips.blocks) != 1 {
				t.Errorf("blocks %v while %s is there", b.vips.blocks, name)
			}
			b.DeleteService(svc.Name{Namespace: "ns", Name: name})
		}
		b.DeleteSlice(svc.Name{Namespace: "ns", Name: "c-1"})
		b.Build()
		if len(b.vips.owners) != 0 || len(b.vips.blocks) != 0 || len(b.vips.near) != 0 || len(b.services) != 0 {
			t.Errorf("left: owners %v, blocks %v, near %v, services %v", b.vips.owners, b.vips.blocks, b.vips.near, b.services)
		}
	}
}

// More endpoints than a frontend can have: the newest state of what fits, and a
// Problem, which is not another one with every change.
func TestTooManyEndpoints(t *testing.T) {
	b := NewBuilder(Config{NodeName: "here"})
	b.SetService(serviceOf("a", "10.96.0.1"))
	const slicesOf = 1000
	set := func(i, endpoints int) {
		s := benchSlice(i, slicesOf, 0)
		s.Namespace, s.Name = "ns", fmt.Sprintf("a-%d", i)
		s.Labels[discoveryv1.LabelServiceName] = "a"
		s.Endpoints = s.Endpoints[:endpoints]
		b.SetSlice(s)
	}
	for i := range 66 {
		set(i, slicesOf)
	}
	key := Key{ID: svc.PortName{Name: svc.Name{Namespace: "ns", Name: "a"}}, Family: svc.IPv4}
	last := func() netip.Addr {
		tab, _ := b.Build()
		list := tab.Get(key).Frontends[0].Endpoints
		if len(list) != MaxEndpoints {
			t.Fatalf("%d endpoints, want %d", len(list), MaxEndpoints)
		}
		return list[len(list)-1].Addr.Addr()
	}
	before := last()
	problems := b.Problems()
	if len(problems) != 1 || problems[0].Reason != ReasonTooManyEndpoints {
		t.Fatalf("problems %v", problems)
	}
	set(0, slicesOf-10) // those that come first by address
	if after := last(); after == before {
		t.Errorf("the list is frozen: it still ends with %s", after)
	}
	for range b.NewProblems() {
		t.Errorf("the problem has changed: %v", b.Problems())
	}
	for i := range 60 {
		set(i, 1)
	}
	if tab, _ := b.Build(); len(tab.Get(key).Frontends[0].Endpoints) != 6060 || len(b.Problems()) != 0 {
		t.Errorf("with few again: %d endpoints, %v", len(tab.Get(key).Frontends[0].Endpoints), b.Problems())
	}
}
