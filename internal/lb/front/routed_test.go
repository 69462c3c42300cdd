package front

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// The label of a Gateway's name has room for 63 bytes, a name for 253.
func TestFrontOfGateway(t *testing.T) {
	for _, c := range []struct {
		owner, kind string
		want        bool
	}{{"web", "Gateway", true}, {strings.Repeat("g", 80), "Gateway", true}, {"web", "Deployment", false}, {"other", "Gateway", false}} {
		g := svc.Name{Namespace: "a", Name: c.owner}
		if c.owner == "other" {
			g.Name = "web"
		}
		n := names.ServiceOfGateway(g)
		r := routing{state: &watch.State{Fronts: map[svc.Name]*gateway.Front{g: {Table: &gateway.Table{}}}}}
		_, ok := r.frontOf(&corev1.Service{ObjectMeta: metav1.ObjectMeta{
			Namespace: n.Namespace, Name: n.Name, Labels: map[string]string{names.NameLabel: c.owner[:min(63, len(c.owner))]},
			OwnerReferences: []metav1.OwnerReference{{Kind: c.kind, Name: c.owner, Controller: new(true)}},
		}})
		if ok != c.want {
			t.Errorf("%+v: %t", c, ok)
		}
	}
}

// The Service of an Ingress with a front for itself serves this front, and no other Service does, whatever its labels and its owner are.
func TestFrontOfIngress(t *testing.T) {
	shared, own := &gateway.Table{}, &gateway.Table{}
	web := svc.Name{Namespace: "a", Name: "web"}
	all := map[svc.Name]*gateway.IngressFront{names.SharedFront(): {Table: shared}, web: {Table: own}}
	r := routing{state: &watch.State{IngressFronts: all}}
	for _, c := range []struct {
		service     svc.Name
		kind, owner string
		want        *gateway.Table
	}{
		{names.IngressService(), "", "", shared}, {names.IngressService(), "Ingress", "web", shared},
		{names.ServiceOfFront(web), "Ingress", "web", own}, {names.ServiceOfFront(web), "Gateway", "web", nil},
		{names.ServiceOfFront(web), "", "", nil}, {names.ServiceOfFront(web), "Ingress", "other", nil},
		{svc.Name{Namespace: "a", Name: "mine"}, "Ingress", "web", nil},
		{svc.Name{Namespace: "b", Name: names.ServiceOfFront(web).Name}, "Ingress", "web", nil},
		{svc.Name{Namespace: "a", Name: names.IngressService().Name}, "Ingress", "", nil},
	} {
		o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
			Namespace: c.service.Namespace, Name: c.service.Name, Labels: map[string]string{names.FrontLabel: names.FrontIngress},
		}}
		if c.kind != "" {
			o.OwnerReferences = []metav1.OwnerReference{{Kind: c.kind, Name: c.owner, Controller: new(true)}}
		}
		if got, ok := r.frontOf(o); ok != (c.want != nil) || got.table != c.want {
			t.Errorf("%+v: %t", c, ok)
		}
	}
}

// Routes lead to headless Services, too, which no proxy has: their slices say so by a label. IPv4 comes first where there are both
// families.
func TestTargetsOfRoutes(t *testing.T) {
	slice := func(addr string, labels map[string]string) *discoveryv1.EndpointSlice {
		family := discoveryv1.AddressTypeIPv4
		if netip.MustParseAddr(addr).Is6() {
			family = discoveryv1.AddressTypeIPv6
		}
		return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Labels: labels}, AddressType: family,
			Ports:     []discoveryv1.EndpointPort{{Name: new("web"), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{addr}}}}
	}
	headless := map[string]string{corev1.IsHeadlessService: ""}
	for _, c := range []struct {
		name   string
		slices []*discoveryv1.EndpointSlice
		want   string
	}{
		{"with a virtual IP", []*discoveryv1.EndpointSlice{slice("10.0.0.1", nil)}, "[10.0.0.1:8080]"},
		{"headless", []*discoveryv1.EndpointSlice{slice("10.0.0.1", headless), slice("10.0.0.2", headless)}, "[10.0.0.1:8080 10.0.0.2:8080]"},
		{"headless, IPv6", []*discoveryv1.EndpointSlice{slice("fd00::1", headless)}, "[[fd00::1]:8080]"},
		{"both families", []*discoveryv1.EndpointSlice{slice("fd00::1", nil), slice("10.0.0.1", nil)}, "[10.0.0.1:8080]"},
	} {
		to := target{slices: map[string]*discoveryv1.EndpointSlice{}}
		for i, s := range c.slices {
			to.slices[fmt.Sprint(i)] = s
		}
		b := gateway.Backend{Name: svc.Name{Namespace: "a", Name: "back"}, Port: 80, PortName: "web", Protocol: gateway.HTTP1}
		if got := fmt.Sprint(to.endpoints(b, "node1", "")); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// A node that comes to another zone leads to the endpoints that are for that.
func TestZoneOfRoutes(t *testing.T) {
	t.Parallel()
	f := newMesh(Options{NodeName: "node1"})
	web := svc.Name{Namespace: "default", Name: "web"}
	to := f.meshing.all[web].mesh.Targets[0]
	all := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(80)), Protocol: new(corev1.ProtocolTCP)}}}
	for i, zone := range []string{"a", "b"} {
		all.Endpoints = append(all.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprint("10.244.0.", i+1)},
			Hints: &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}})
	}
	f.routing.backends[to.Name] = &target{listed: true, slices: map[string]*discoveryv1.EndpointSlice{"s": all}}
	for zone, want := range map[string]string{"": "[10.244.0.1:80 10.244.0.2:80]", "a": "[10.244.0.1:80]", "b": "[10.244.0.2:80]"} {
		f.SetNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{corev1.LabelTopologyZone: zone}}})
		built := f.build()
		if len(built) != 1 || fmt.Sprint(built[0].Routes.Targets[to]) != want {
			t.Errorf("in zone %q: %+v, want %s", zone, built, want)
		}
	}
}

// A front waits for the endpoints of a new target, but not for long: then requests to that target fail, and the others have their
// changes.
func TestUnreadTarget(t *testing.T) {
	t.Parallel()
	f := New(Options{NodeName: "node1"})
	g := svc.Name{Namespace: "a", Name: "web"}
	n := names.ServiceOfGateway(g)
	target1 := gateway.Target{Backend: gateway.Backend{Name: svc.Name{Namespace: "a", Name: "one"}, Port: 80}}
	target2 := gateway.Target{Backend: gateway.Backend{Name: svc.Name{Namespace: "b", Name: "two"}, Port: 80}}
	f.routing.watch = watch.New(watch.Options{})
	f.routing.state = &watch.State{Fronts: map[svc.Name]*gateway.Front{
		g: {Table: &gateway.Table{}, Targets: []gateway.Target{target1, target2}},
	}}
	f.routing.backends[target1.Name] = &target{listed: true}
	s := &service{listed: true, spec: &dialect.Spec{}, object: &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: n.Namespace, Name: n.Name, Labels: map[string]string{names.FrontLabel: names.FrontGateway},
		OwnerReferences: []metav1.OwnerReference{{Kind: "Gateway", Name: g.Name, Controller: new(true)}},
	}}}
	begin := time.Now()
	for _, c := range []struct {
		after   time.Duration
		listed  bool
		targets int // -1 if it waits
	}{
		{0, false, -1}, {backendWait / 2, false, -1}, {backendWait, false, 1}, {2 * backendWait, false, 1},
		{3 * backendWait, true, 2}, {4 * backendWait, false, -1}, {5 * backendWait, false, 1},
	} {
		delete(f.routing.backends, target2.Name)
		if c.listed {
			f.routing.backends[target2.Name] = &target{listed: true}
		}
		built, why := f.inputsLocked(begin.Add(c.after)).build(n, s)
		got := -1
		if built != nil {
			got = len(built.Routes.Targets)
		}
		if got != c.targets || why.waits != (c.targets < 0) {
			t.Errorf("after %v, listed %t: %d targets, %+v; want %d", c.after, c.listed, got, why, c.targets)
		}
	}
}
