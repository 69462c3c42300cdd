package watch

import (
	"fmt"
	"log/slog"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/fronts"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

// cluster is a Watch that has read everything, for the controller, and follows nothing more.
type cluster struct {
	*Watch
	tb      testing.TB
	running sync.WaitGroup
	changes int64
}

// newCluster returns one with Services, and for each fifth of these a Gateway with a route and an Ingress, of which each tenth has a front
// for itself.
func newCluster(tb testing.TB, size int) *cluster {
	tb.Helper()
	nowhere := &rest.Config{Host: "127.0.0.1:1"}
	client, err := api.NewClient(nowhere)
	if err != nil {
		tb.Fatal(err)
	}
	c := &cluster{tb: tb, Watch: New(Options{
		Client: kubernetes.NewForConfigOrDie(nowhere), Gateway: client, Log: slog.New(slog.DiscardHandler), Changed: func() {}, Statuses: true,
	})}
	for _, kind := range []string{
		"gateways", "ingresses", "httproutes", "grpcroutes", "referencegrants", policyKind, "tlsroutes", "tcproutes", "udproutes", "listenersets",
		"namespaces", "services",
	} {
		c.started[kind] = true
	}
	c.classes[names.ClassName] = &gwv1.GatewayClass{ObjectMeta: metav1.ObjectMeta{Name: names.ClassName}}
	c.ingressClasses[names.ClassName] = &networkingv1.IngressClass{Spec: networkingv1.IngressClassSpec{Controller: names.IngressController}}
	for i := range size {
		c.service(i)
		if i%5 != 0 {
			continue
		}
		c.gateway(i)
		c.route(i)
		c.ingress(i)
	}
	c.update()
	if len(c.fronts) != size/5 || len(c.ingressFronts) != 1+size/50 {
		tb.Fatalf("%d and %d fronts", len(c.fronts), len(c.ingressFronts))
	}
	return c
}

func space(i int) string { return fmt.Sprint("ns", i/100) }

func (c *cluster) update() *State {
	s := c.Update(c.tb.Context(), &c.running)
	if !s.Listed {
		c.tb.Fatal("not listed")
	}
	return s
}

// gateway makes the Gateway with a number, or has it as made again.
func (c *cluster) gateway(i int) {
	g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: space(i), Name: fmt.Sprint("g", i), UID: types.UID(fmt.Sprint("g", i))}}
	g.Spec.GatewayClassName = names.ClassName
	g.Spec.Listeners = []gwv1.Listener{{Name: "http", Port: 80, Protocol: gwv1.HTTPProtocolType}}
	setGateway(c.Watch, svc.NameOf(g), g)
}

// service changes the Service with a number.
func (c *cluster) service(i int) {
	c.changes++
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: space(i), Name: fmt.Sprint("s", i)}}
	s.Spec.Ports = []corev1.ServicePort{
		{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP},
		{Name: "more", Port: int32(1000 + c.changes%1000), Protocol: corev1.ProtocolTCP}, //nolint:gosec // small
	}
	c.setService(svc.NameOf(s), s)
}

// route changes the route of the Gateway with a number.
func (c *cluster) route(i int) {
	c.changes++
	r := &gwv1.HTTPRoute{ObjectMeta: metav1.ObjectMeta{Namespace: space(i), Name: fmt.Sprint("r", i), Generation: c.changes}}
	r.Spec.ParentRefs = []gwv1.ParentReference{{Name: gwv1.ObjectName(fmt.Sprint("g", i))}}
	to := gwv1.BackendObjectReference{Name: gwv1.ObjectName(fmt.Sprint("s", i)), Port: new(gwv1.PortNumber(80))}
	r.Spec.Rules = []gwv1.HTTPRouteRule{{
		Matches:     []gwv1.HTTPRouteMatch{{Path: &gwv1.HTTPPathMatch{Value: new(fmt.Sprint("/", c.changes))}}},
		BackendRefs: []gwv1.HTTPBackendRef{{BackendRef: gwv1.BackendRef{BackendObjectReference: to}}},
	}}
	c.setRoute(svc.NameOf(r), r)
}

// ingress changes the Ingress with a number.
func (c *cluster) ingress(i int) {
	c.changes++
	in := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: space(i), Name: fmt.Sprint("i", i), Generation: c.changes}}
	if i%50 == 0 {
		in.Annotations = map[string]string{fronts.Annotation: fronts.Own}
	}
	in.Spec.IngressClassName = new(names.ClassName)
	rule := networkingv1.IngressRule{Host: fmt.Sprintf("h%d.example.com", i)}
	to := &networkingv1.IngressServiceBackend{Name: fmt.Sprint("s", i), Port: networkingv1.ServiceBackendPort{Number: 80}}
	rule.HTTP = &networkingv1.HTTPIngressRuleValue{Paths: []networkingv1.HTTPIngressPath{{
		Path: fmt.Sprint("/", c.changes), PathType: new(networkingv1.PathTypePrefix), Backend: networkingv1.IngressBackend{Service: to},
	}}}
	in.Spec.Rules = []networkingv1.IngressRule{rule}
	setIngress(c.Watch, svc.NameOf(in), in)
}

// One change and the State after it, beside 10,000 Services, 2,000 Gateways with a route each and 2,000 Ingresses, and beside a tenth of
// these. What still grows with the size is a copy of the maps in which something has changed; at the shared front also its table.
func BenchmarkUpdate(b *testing.B) {
	for _, size := range []int{1_000, 10_000} {
		c := newCluster(b, size)
		for _, change := range []struct {
			what string
			do   func()
		}{
			{"route", func() { c.route(5) }}, {"own-front", func() { c.ingress(50) }}, {"shared-front", func() { c.ingress(5) }},
			{"service", func() { c.service(5) }},
		} {
			b.Run(fmt.Sprint(change.what, "/", size), func(b *testing.B) {
				c.tb = b
				b.ReportAllocs()
				for b.Loop() {
					change.do()
					c.update()
				}
			})
		}
	}
}
