package controller

import (
	"reflect"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/gateway"
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
	have := serviceOf(g, ports, nil)
	if have.Annotations[svc.FrontSecretsAnnotation] != "" {
		t.Errorf("the Gateway names Secrets: %v", have.Annotations)
	}
	have.Annotations["example.com/other"] = "stays"
	if labels, annotations := changes(have, serviceOf(g, ports, nil)); len(labels)+len(annotations) > 0 {
		t.Errorf("a Gateway that did not change: %v, %v", labels, annotations)
	}
	g.Spec.Addresses, g.Spec.Infrastructure = nil, &gwv1.GatewayInfrastructure{
		Labels: map[gwv1.LabelKey]gwv1.LabelValue{"team": "b"},
	}
	labels, annotations := changes(have, serviceOf(g, ports, nil))
	if want := map[string]any{"team": "b", "tier": nil}; !reflect.DeepEqual(labels, want) {
		t.Errorf("labels %v, want %v", labels, want)
	}
	want := map[string]any{addressesAnnotation: nil, "fairlead.dev/lb-drain-timeout": nil, svc.FrontKeysAnnotation: "label:team"}
	if !reflect.DeepEqual(annotations, want) {
		t.Errorf("annotations %v, want %v", annotations, want)
	}
}

// The Service of a front takes the proxied way whatever its ports are.
func TestFrontsAreProxied(t *testing.T) {
	g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
	udp, tcp := gateway.PortKey{Number: 53, UDP: true}, gateway.PortKey{Number: 53}
	for _, ports := range []map[gateway.PortKey]string{{udp: "udp"}, {tcp: "tcp"}, {tcp: "tls"}, {udp: "udp", tcp: "tcp"}} {
		s := serviceOf(g, ports, nil)
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

// The Service of a ReferenceGrant goes with the grant, names only Secrets, and is not taken for one that a tenant has made.
func TestServiceOfAGrant(t *testing.T) {
	grant := &gwv1.ReferenceGrant{ObjectMeta: metav1.ObjectMeta{Namespace: "b", Name: "x", UID: "1"}}
	s := serviceOfGrant(grant, []svc.Name{{Namespace: "b", Name: "d"}, {Namespace: "b", Name: "c"}, {Namespace: "b", Name: "d"}})
	if s.Annotations[svc.FrontSecretsAnnotation] != "b/c,b/d" || s.Spec.ClusterIP != corev1.ClusterIPNone || len(s.Spec.Ports) > 0 {
		t.Errorf("Service %+v", s)
	}
	if owner := metav1.GetControllerOf(s); owner == nil || owner.UID != grant.UID || owner.Kind != "ReferenceGrant" {
		t.Errorf("owner %+v", owner)
	}
	if !ours(s) {
		t.Error("the Service is not ours")
	}
	s.Labels[gateway.FrontLabel] = gateway.FrontSet
	if ours(s) {
		t.Error("a Service of another kind is ours")
	}
}

// A controller that begins has not read Gateways yet: their Services stay, as they do while the leader changes.
func TestServicesStayUntilGatewaysAreRead(t *testing.T) {
	g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "1"}}
	g.Spec.GatewayClassName = "fairlead"
	front := serviceOf(g, map[gateway.PortKey]string{{Number: 80}: "http"}, nil)
	ingress := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: gateway.IngressService().Namespace, Name: gateway.IngressService().Name,
		Labels: map[string]string{gateway.FrontLabel: gateway.FrontIngress},
	}}
	foreign := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "mine", Labels: front.Labels}}
	have := map[svc.Name]*corev1.Service{}
	for _, s := range []*corev1.Service{front, ingress, foreign} {
		have[svc.NameOf(s)] = s
	}
	if got := unwanted(have, nil, false); !slices.Equal(got, []*corev1.Service{ingress}) {
		t.Errorf("before Gateways are read, these are deleted: %v", got)
	}
	if got := unwanted(have, nil, true); len(got) != 2 || slices.Contains(got, foreign) {
		t.Errorf("when there is no Gateway, %d are deleted, want those of Gateways and Ingresses", len(got))
	}
	if got := unwanted(have, map[svc.Name]bool{svc.NameOf(front): true, svc.NameOf(ingress): true}, true); len(got) > 0 {
		t.Errorf("of what is needed, these are deleted: %v", got)
	}
}
