package watch

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

// A change of a route touches only this route, whatever the number of the others; a change of what fronts are built from touches all.
// A route at a Service is touched by a change of the Service.
func TestTouched(t *testing.T) {
	t.Parallel()
	shop := func(name string) svc.Name { return svc.Name{Namespace: "shop", Name: name} }
	route := func(name, host string, parent gwv1.ParentReference) *gwv1.HTTPRoute {
		r := &gwv1.HTTPRoute{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop", UID: "r"}}
		r.Spec.Hostnames, r.Spec.ParentRefs = []gwv1.Hostname{gwv1.Hostname(host)}, []gwv1.ParentReference{parent}
		r.Spec.Rules = make([]gwv1.HTTPRouteRule, 1)
		return r
	}
	atGateway := gwv1.ParentReference{Name: "front"}
	atService := gwv1.ParentReference{Group: new(gwv1.Group("")), Kind: new(gwv1.Kind("Service")), Name: "web"}
	service := func(addr string) *corev1.Service {
		o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "shop", UID: "u"}}
		o.Spec.ClusterIPs, o.Spec.Ports = []string{addr}, []corev1.ServicePort{{Name: "http", Port: 80}}
		return o
	}
	for _, statuses := range []bool{true, false} {
		w := New(Options{Log: slog.New(slog.DiscardHandler), Changed: func() {}, Statuses: statuses})
		check := func(what string, change func(), want string) {
			t.Helper()
			change()
			w.classify()
			w.build()
			var all []string
			for k := range w.touched {
				all = append(all, k.Name.Name)
			}
			slices.Sort(all)
			got := strings.Join(all, " ")
			if w.touchedAll {
				got = "all"
			}
			if !statuses && len(all) > 0 {
				t.Errorf("%s: a watch without statuses keeps %s", what, got)
			} else if statuses && got != want {
				t.Errorf("%s touches %q, want %q", what, got, want)
			}
			w.touched, w.touchedAll = maps.Clone(w.touched), false
			clear(w.touched)
		}
		class := &gwv1.GatewayClass{ObjectMeta: metav1.ObjectMeta{Name: "fairlead"}}
		class.Spec.ControllerName = names.ControllerName
		gateway := func(port int32) *gwv1.Gateway {
			g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Name: "front", Namespace: "shop", UID: "g", Generation: int64(port)}}
			g.Spec.GatewayClassName = "fairlead"
			g.Spec.Listeners = []gwv1.Listener{{Name: "http", Port: port, Protocol: gwv1.HTTPProtocolType}}
			return g
		}
		w.objects.Namespaces["shop"] = map[string]string{}
		for i := range 50 {
			name := fmt.Sprint("r", i)
			w.setRoute(shop(name), route(name, name+".example.com", atGateway))
		}
		check("the beginning", func() {
			w.classes["fairlead"] = class
			setGateway(w, shop("front"), gateway(80))
		}, "all")
		check("nothing", func() {}, "")
		check("a new route", func() { w.setRoute(shop("new"), route("new", "new.example.com", atGateway)) }, "new")
		withStatus := route("new", "new.example.com", atGateway)
		withStatus.Status.Parents = make([]gwv1.RouteParentStatus, 1)
		check("its status", func() { w.setRoute(shop("new"), withStatus) }, "new")
		check("another host", func() {
			r := route("r1", "new.example.com", atGateway)
			r.Generation = 2
			w.setRoute(shop("r1"), r)
		}, "r1")
		check("its end", func() { w.setRoute(shop("new"), nil) }, "new")
		call := &gwv1.GRPCRoute{ObjectMeta: metav1.ObjectMeta{Name: "call", Namespace: "shop", UID: "r"}}
		call.Spec.Hostnames, call.Spec.ParentRefs = []gwv1.Hostname{"call.example.com"}, []gwv1.ParentReference{atGateway}
		check("a GRPCRoute", func() { w.setCall(shop("call"), call) }, "call")
		check("its status", func() { w.setCall(shop("call"), call.DeepCopy()) }, "call")
		to := func(name string, namespace *gwv1.Namespace) *gwv1.HTTPRoute {
			r := route(name, name+".example.com", atGateway)
			backend := gwv1.BackendObjectReference{Name: "cart", Namespace: namespace, Port: new(gwv1.PortNumber(80))}
			r.Spec.Rules[0].BackendRefs = []gwv1.HTTPBackendRef{{BackendRef: gwv1.BackendRef{BackendObjectReference: backend}}}
			return r
		}
		check("a route with a backend", func() { w.setRoute(shop("near"), to("near", nil)) }, "near")
		check("one with a backend elsewhere", func() { w.setRoute(shop("far"), to("far", new(gwv1.Namespace("team")))) }, "far")
		check("a Service that no route names", func() { w.setService(shop("other"), service("10.96.0.8")) }, "")
		check("a Service that a route names", func() { w.setService(shop("cart"), service("10.96.0.9")) }, "near")
		check("a ReferenceGrant", func() {
			setGrant(w, svc.Name{Namespace: "team", Name: "g"}, &gwv1.ReferenceGrant{})
		}, "far")
		check("a ReferenceGrant of another namespace", func() { setGrant(w, shop("g"), &gwv1.ReferenceGrant{}) }, "near")
		check("a Namespace", func() { setNamespace(w, svc.Name{Name: "team"}, &corev1.Namespace{}) }, "")
		stream := &gwv1.TCPRoute{ObjectMeta: metav1.ObjectMeta{Name: "stream", Namespace: "shop", UID: "r"}}
		stream.Spec.ParentRefs = []gwv1.ParentReference{atGateway}
		key := kinds.Route{Kind: kinds.TCPRoute, Name: shop("stream")}
		check("a TCPRoute", func() { setStream(w, key, stream, kinds.StreamOfTCP) }, "all")
		check("its status", func() { setStream(w, key, stream.DeepCopy(), kinds.StreamOfTCP) }, "stream")
		check("a Namespace, with it", func() { setNamespace(w, svc.Name{Name: "team"}, nil) }, "stream")
		check("a Gateway", func() { setGateway(w, shop("front"), gateway(81)) }, "all")
		check("a route at a Service", func() { w.setRoute(shop("mesh"), route("mesh", "mesh.example.com", atService)) }, "mesh")
		check("the Service", func() { w.setService(shop("web"), service("10.96.0.7")) }, "mesh")
		check("the end of the Gateway", func() { setGateway(w, shop("front"), nil) }, "all")
	}
}
