package controller

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// What a Gateway no longer has leaves its Service; what others have written there stays.
func TestTakenFromAGateway(t *testing.T) {
	ip := gwv1.IPAddressType
	g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
	g.Spec.Addresses = []gwv1.GatewaySpecAddress{{Type: &ip, Value: "192.0.2.7"}}
	g.Spec.Infrastructure = &gwv1.GatewayInfrastructure{
		Labels:      map[gwv1.LabelKey]gwv1.LabelValue{"team": "a", "tier": "front"},
		Annotations: map[gwv1.AnnotationKey]gwv1.AnnotationValue{"fairlead.dev/lb-drain-timeout": "5", svc.FrontSecretsAnnotation: "other/key"},
	}
	ports := map[gateway.PortKey]string{{Number: 80}: "http"}
	have := serviceOf(g, ports, nil, nil)
	if have.Annotations[svc.FrontSecretsAnnotation] != "" {
		t.Errorf("the Gateway names Secrets: %v", have.Annotations)
	}
	have.Annotations["example.com/other"] = "stays"
	if labels, annotations := changes(have, serviceOf(g, ports, nil, nil)); len(labels)+len(annotations) > 0 {
		t.Errorf("a Gateway that did not change: %v, %v", labels, annotations)
	}
	g.Spec.Addresses, g.Spec.Infrastructure = nil, &gwv1.GatewayInfrastructure{
		Labels: map[gwv1.LabelKey]gwv1.LabelValue{"team": "b"},
	}
	labels, annotations := changes(have, serviceOf(g, ports, nil, nil))
	if want := map[string]any{"team": "b", "tier": nil}; !reflect.DeepEqual(labels, want) {
		t.Errorf("labels %v, want %v", labels, want)
	}
	want := map[string]any{dialect.LBAddresses: nil, "fairlead.dev/lb-drain-timeout": nil, svc.FrontKeysAnnotation: "label:team"}
	if !reflect.DeepEqual(annotations, want) {
		t.Errorf("annotations %v, want %v", annotations, want)
	}
}

// A Gateway that asks for addresses of one family has no address of the other, and a Service gets another family only with a new one.
func TestFamiliesOfAddresses(t *testing.T) {
	const four, six, any = corev1.IPv4Protocol, corev1.IPv6Protocol, corev1.IPFamily("")
	ports := map[gateway.PortKey]string{{Number: 80}: "http"}
	service := func(values ...string) *corev1.Service {
		g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
		for _, v := range values {
			g.Spec.Addresses = append(g.Spec.Addresses, gwv1.GatewaySpecAddress{Value: v})
		}
		return serviceOf(g, ports, nil, nil)
	}
	for _, c := range []struct {
		asked     []string
		addresses string
		only      corev1.IPFamily
	}{
		{nil, "", any}, {[]string{""}, "", any}, {[]string{"192.0.2.1"}, "192.0.2.1", four}, {[]string{"2001:DB8::1"}, "2001:db8::1", six},
		{[]string{"192.0.2.1", "2001:db8::1"}, "192.0.2.1,2001:db8::1", any}, {[]string{"192.0.2.1", ""}, "192.0.2.1", any},
		{[]string{"", "192.0.2.1"}, "192.0.2.1", any}, {[]string{"192.0.2.1", "192.0.2.2"}, "192.0.2.1", four},
	} {
		s := service(c.asked...)
		var families []corev1.IPFamily
		policy := corev1.IPFamilyPolicyPreferDualStack
		if c.only != any {
			policy, families = corev1.IPFamilyPolicySingleStack, []corev1.IPFamily{c.only}
		}
		same := *s.Spec.IPFamilyPolicy == policy && reflect.DeepEqual(s.Spec.IPFamilies, families)
		if s.Annotations[dialect.LBAddresses] != c.addresses || !same {
			t.Errorf("%q: %v, %+v", c.asked, s.Annotations, s.Spec)
		}
	}
	have := service()
	have.Spec.IPFamilies = []corev1.IPFamily{four, six} // as the API server fills it in
	single := service("192.0.2.1")
	for want, next := range map[*corev1.Service]familyChange{
		service(): sameFamilies, service("192.0.2.1"): otherPolicy, service("2001:db8::1"): otherFamily,
		service("192.0.2.1", "2001:db8::1"): sameFamilies,
	} {
		if got := familiesOf(have, want); got != next {
			t.Errorf("%s: %d, want %d", want.Annotations[dialect.LBAddresses], got, next)
		}
	}
	if got := familiesOf(single, service()); got != otherPolicy {
		t.Errorf("back to both: %d", got)
	}
}

// The Service of a front takes the proxied way whatever its ports are.
func TestFrontsAreProxied(t *testing.T) {
	g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
	udp, tcp := gateway.PortKey{Number: 53, UDP: true}, gateway.PortKey{Number: 53}
	for _, ports := range []map[gateway.PortKey]string{{udp: "udp"}, {tcp: "tcp"}, {tcp: "tls"}, {udp: "udp", tcp: "tcp"}} {
		s := serviceOf(g, ports, nil, nil)
		d := dialect.Service{Annotations: s.Annotations}
		names := map[string]bool{}
		for _, p := range s.Spec.Ports {
			names[p.Name] = true
			d.Ports = append(d.Ports, dialect.Port{Name: p.Name, Number: uint16(p.Port), Protocol: string(p.Protocol)})
		}
		if r := dialect.Read(d); r.Way != dialect.Proxied || r.Invalid() || len(names) != len(ports) {
			t.Errorf("%v: %s, %+v, names %v", ports, r.Way, r.Findings, names)
		}
	}
}

// The Service of a BackendTLSPolicy names the objects with authorities of its namespace, and goes with the policy. A Gateway names
// none of other namespaces, whatever its annotations are.
func TestServiceOfAPolicy(t *testing.T) {
	policy := &gwv1.BackendTLSPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "b", Name: "x", UID: "1"}}
	ref := func(kind, ns, name string) trust.Ref {
		return trust.Ref{Kind: kind, Name: svc.Name{Namespace: ns, Name: name}}
	}
	refs := []trust.Ref{ref(trust.ConfigMap, "b", "d"), ref(trust.Secret, "b", "s"), ref(trust.ConfigMap, "b", "c")}
	s := serviceOfPolicy(policy, refs)
	if a := s.Annotations; a[svc.FrontConfigMapsAnnotation] != "b/c,b/d" || a[svc.FrontSecretsAnnotation] != "b/s" || !ours(s) {
		t.Errorf("Service %+v", s)
	}
	if s.Name != "x-authorities-fairlead" || s.Spec.ClusterIP != corev1.ClusterIPNone || metav1.GetControllerOf(s).UID != policy.UID {
		t.Errorf("Service %+v", s)
	}
	g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "web"}}
	g.Spec.Infrastructure = &gwv1.GatewayInfrastructure{
		Annotations: map[gwv1.AnnotationKey]gwv1.AnnotationValue{svc.FrontConfigMapsAnnotation: "b/c"},
	}
	s = serviceOf(g, map[gateway.PortKey]string{{Number: 80}: "http"}, append(refs, ref(trust.ConfigMap, "a", "ca")), nil)
	if a := s.Annotations; a[svc.FrontConfigMapsAnnotation] != "a/ca" || a[svc.FrontSecretsAnnotation] != "" {
		t.Errorf("annotations %v", a)
	}
}

// A controller that begins does not delete the Services of Gateways and Ingresses which it does not follow yet.
func TestServicesOutliveATerm(t *testing.T) {
	g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "1"}}
	g.Spec.GatewayClassName = names.ClassName
	of := map[string]*corev1.Service{"Gateway": serviceOf(g, nil, nil, nil), "Ingress": front(names.IngressService(), nil)}
	of["Ingress"].Labels[names.FrontLabel] = names.FrontIngress
	for _, c := range []struct {
		serves              bool // Gateways
		state               watch.State
		gateways, ingresses bool // are deleted
	}{
		{true, watch.State{}, false, false},
		{true, watch.State{FollowsIngresses: true}, false, true},
		{true, watch.State{FollowsGateways: true, FollowsIngresses: true}, true, true},
		{false, watch.State{FollowsIngresses: true}, true, true}, // --gateway-api=off
	} {
		controller := &controller{o: Options{Gateway: c.serves}}
		if got := controller.abandoned(of["Gateway"], &c.state); got != c.gateways {
			t.Errorf("%+v: a Gateway's: %t", c, got)
		}
		if got := controller.abandoned(of["Ingress"], &c.state); got != c.ingresses {
			t.Errorf("%+v: of Ingresses: %t", c, got)
		}
	}
}

// The Service of an Ingress with a front for itself has the annotations about load balancers, and no others, goes with the Ingress, and
// is not taken for one that a tenant has made.
func TestServiceOfAnIngress(t *testing.T) {
	in := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web.shop", UID: "1", Annotations: map[string]string{
		"fairlead.dev/front": "own", "fairlead.dev/lb-addresses": "192.0.2.7", "fairlead.dev/lb-pool": "public",
		"fairlead.dev/lb-intrnal":                               "true",
		"service.beta.kubernetes.io/aws-load-balancer-internal": "true", "fairlead.dev/lb-protocol": "tcp", "fairlead.dev/lb-compress": "gzip",
		"fairlead.dev/lb-tls-secrets": "x", "fairlead.dev/lb-health-check": "true", svc.FrontSecretsAnnotation: "kube-system/key",
		svc.FrontOrdersAnnotation: "shop/key", "nginx.ingress.kubernetes.io/rewrite-target": "/x", "example.com/other": "x",
	}}}
	n := svc.NameOf(in)
	f := gateway.BuildIngress(&gateway.Objects{Ingresses: map[svc.Name]*networkingv1.Ingress{n: in}}, nil)
	s, c := serviceOfIngresses(n, in, f), &controller{}
	want := map[string]string{
		dialect.LBAddresses: "192.0.2.7", dialect.LBPool: "public", "fairlead.dev/lb-intrnal": "true",
		"service.beta.kubernetes.io/aws-load-balancer-internal": "true", dialect.LBProtocol: "http", dialect.LBHealthCheck: "false",
		svc.FrontSecretsAnnotation: "", svc.FrontConfigMapsAnnotation: "", svc.FrontOrdersAnnotation: "",
		svc.FrontKeysAnnotation: "annotation:fairlead.dev/lb-addresses,annotation:fairlead.dev/lb-intrnal,annotation:fairlead.dev/lb-pool," +
			"annotation:service.beta.kubernetes.io/aws-load-balancer-internal",
	}
	if !reflect.DeepEqual(s.Annotations, want) {
		t.Errorf("annotations %v, want %v", s.Annotations, want)
	}
	if s.Name != "web-shop-fairlead-ingress" || s.Namespace != "shop" || s.Spec.Type != corev1.ServiceTypeLoadBalancer ||
		!slices.Equal(s.Spec.IPFamilies, []corev1.IPFamily{corev1.IPv4Protocol}) {
		t.Errorf("%+v", s)
	}
	in.Annotations = map[string]string{"fairlead.dev/front": "own", "fairlead.dev/lb-client-ca": "secret/ca"}
	d := dialect.Service{Annotations: serviceOfIngresses(n, in, f).Annotations, Ports: []dialect.Port{{Number: 80, Protocol: "TCP"}}}
	if r := dialect.Read(d); !r.Invalid() {
		t.Error("a front that asks clients for certificates has port 80, where they need none")
	}
	in.Annotations = map[string]string{"fairlead.dev/front": "own"}
	_, annotations := changes(s, serviceOfIngresses(n, in, f))
	gone := map[string]any{dialect.LBAddresses: nil, dialect.LBPool: nil, "fairlead.dev/lb-intrnal": nil,
		"service.beta.kubernetes.io/aws-load-balancer-internal": nil, svc.FrontKeysAnnotation: ""}
	if !reflect.DeepEqual(annotations, gone) {
		t.Errorf("changes %v, want %v", annotations, gone)
	}
	followed := &watch.State{FollowsIngresses: true}
	if !isOf(s, serviceOfIngresses(n, in, f)) || !c.abandoned(s, followed) || c.abandoned(s, &watch.State{FollowsGateways: true}) {
		t.Error("it is not ours")
	}
	for what, change := range map[string]func(*corev1.Service){
		"no owner":           func(s *corev1.Service) { s.OwnerReferences = nil },
		"no label":           func(s *corev1.Service) { s.Labels = nil },
		"a Gateway's label":  func(s *corev1.Service) { s.Labels[names.FrontLabel] = names.FrontGateway },
		"not the controller": func(s *corev1.Service) { s.OwnerReferences[0].Controller = nil },
	} {
		mine := s.DeepCopy()
		if change(mine); isOf(mine, s) || c.abandoned(mine, followed) {
			t.Errorf("%s: a Service of a tenant is taken over, or deleted", what)
		}
	}
	other := s.DeepCopy()
	if other.OwnerReferences[0].UID = "2"; isOf(other, s) {
		t.Error("the Service of another Ingress is taken over")
	}
}

// Only 16 Gateways have room in the status of a policy; the entries of other controllers stay.
func TestAncestorsAreBounded(t *testing.T) {
	objects := &gateway.Objects{
		Gateways: map[svc.Name]*gwv1.Gateway{}, Routes: map[svc.Name]*gwv1.HTTPRoute{}, Policies: trust.NewPolicies(),
		Services: map[svc.Name]*services.Service{{Namespace: "a", Name: "web"}: {Ports: []services.Port{{Name: "http", Number: 80}}}},
	}
	policy := &gwv1.BackendTLSPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "p"}}
	policy.Spec.TargetRefs = []gwv1.LocalPolicyTargetReferenceWithSectionName{{
		LocalPolicyTargetReference: gwv1.LocalPolicyTargetReference{Kind: "Service", Name: "web"},
	}}
	policy.Spec.Validation = gwv1.BackendTLSPolicyValidation{
		Hostname: "web.example.com", WellKnownCACertificates: new(gwv1.WellKnownCACertificatesSystem),
	}
	policy.Status.Ancestors = []gwv1.PolicyAncestorStatus{{ControllerName: "example.com/other"}}
	n := svc.NameOf(policy)
	objects.Policies.Set(n, policy)
	route := &gwv1.HTTPRoute{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "r"}}
	route.Spec.Rules = []gwv1.HTTPRouteRule{{BackendRefs: []gwv1.HTTPBackendRef{{BackendRef: gwv1.BackendRef{
		BackendObjectReference: gwv1.BackendObjectReference{Name: "web", Port: new(gwv1.PortNumber(80))},
	}}}}}
	objects.Routes[svc.NameOf(route)] = route
	s := &watch.State{Fronts: map[svc.Name]*gateway.Front{}}
	for i := range 20 {
		g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: fmt.Sprintf("g%02d", i)}}
		g.Spec.Listeners = []gwv1.Listener{{Name: "l", Port: 80, Protocol: gwv1.HTTPProtocolType}}
		objects.Gateways[svc.NameOf(g)] = g
		route.Spec.ParentRefs = append(route.Spec.ParentRefs, gwv1.ParentReference{Name: gwv1.ObjectName(g.Name)})
	}
	for g := range objects.Gateways {
		s.Fronts[g] = gateway.BuildGateway(objects, g, nil)
	}
	list := ancestorsOf(policy, usesOf(s)[n].gateways, s, "")
	if len(list) != 16 || list[0].ControllerName != "example.com/other" || list[15].AncestorRef.Name != "g14" {
		t.Errorf("%d: %+v", len(list), list)
	}
	if c := list[1].Conditions; len(c) != 2 || c[0].Status != metav1.ConditionTrue || c[1].Status != metav1.ConditionTrue {
		t.Errorf("conditions %+v", c)
	}
}

// The Service of a ReferenceGrant goes with the grant, names only Secrets, and is not taken for one that a tenant has made.
func TestServiceOfAGrant(t *testing.T) {
	grant := &gwv1.ReferenceGrant{ObjectMeta: metav1.ObjectMeta{Namespace: "b", Name: "x", UID: "1"}}
	secrets := []svc.Name{{Namespace: "b", Name: "d"}, {Namespace: "b", Name: "c"}, {Namespace: "b", Name: "d"}}
	s := serviceOfGrant(grant, trust.SecretRefs(secrets))
	if s.Annotations[svc.FrontSecretsAnnotation] != "b/c,b/d" || s.Spec.ClusterIP != corev1.ClusterIPNone || len(s.Spec.Ports) > 0 {
		t.Errorf("Service %+v", s)
	}
	if owner := metav1.GetControllerOf(s); owner == nil || owner.UID != grant.UID || owner.Kind != "ReferenceGrant" {
		t.Errorf("owner %+v", owner)
	}
	if !ours(s) {
		t.Error("the Service is not ours")
	}
	s.Labels[names.FrontLabel] = names.FrontSet
	if ours(s) {
		t.Error("a Service of another kind is ours")
	}
}

// What is wrong with the Service of a Gateway is not hidden by its addresses, which it then lacks.
func TestWhyUnprogrammed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		asked, problem string
		have           []string
		reason         gwv1.GatewayConditionReason
		says           string
	}{
		{"", "", []string{"192.0.2.7"}, gwv1.GatewayReasonProgrammed, ""},
		{"", "", nil, gwv1.GatewayReasonAddressNotAssigned, "no address yet"},
		{"", "no right", nil, gwv1.GatewayReasonAddressNotAssigned, "no right"},
		{"192.0.2.7", "", []string{"192.0.2.7"}, gwv1.GatewayReasonProgrammed, ""},
		{"192.0.2.7", "", nil, gwv1.GatewayReasonAddressNotUsable, "is of no pool"},
		{"192.0.2.7", "no right", nil, gwv1.GatewayReasonAddressNotUsable, "no right"},
		{"192.0.2.7", "no right", []string{"192.0.2.8"}, gwv1.GatewayReasonAddressNotUsable, "no right"},
	} {
		g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
		g.Spec.Listeners = []gwv1.Listener{{Name: "l", Port: 80, Protocol: gwv1.HTTPProtocolType}}
		if c.asked != "" {
			g.Spec.Addresses = []gwv1.GatewaySpecAddress{{Value: c.asked}}
		}
		n := svc.NameOf(g)
		f := gateway.BuildGateway(&gateway.Objects{Gateways: map[svc.Name]*gwv1.Gateway{n: g}}, n, nil)
		status := f.Status(c.have, whyUnprogrammed(f, n, c.problem, c.have))
		i := slices.IndexFunc(status.Conditions, func(c metav1.Condition) bool { return c.Type == string(gwv1.GatewayConditionProgrammed) })
		got := status.Conditions[i]
		if got.Reason != string(c.reason) || !strings.Contains(got.Message, c.says) || (got.Status == metav1.ConditionTrue) != (c.says == "") {
			t.Errorf("%+v: %+v", c, got)
		}
	}
}
