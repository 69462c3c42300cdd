package controller

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// recorder keeps Events as text.
type recorder struct{ all []string }

func (r *recorder) Event(object runtime.Object, eventType, reason, message string) {
	o, ok := object.(*corev1.ObjectReference)
	if in, whole := object.(*networkingv1.Ingress); !ok && whole {
		o = &corev1.ObjectReference{Kind: "Ingress", Namespace: in.Namespace, Name: in.Name}
	}
	r.all = append(r.all, fmt.Sprintf("%s %s %s/%s: %s: %s", eventType, o.Kind, o.Namespace, o.Name, reason, message))
}

// got returns the Events since the last call.
func (r *recorder) got() []string {
	defer func() { r.all = nil }()
	return r.all
}

// A route has an Event when it is refused, when it is served again, and when it loses its Gateway: once for each change, whatever is
// looked at again. A status that could not be written has none yet.
func TestEventsOfRoutes(t *testing.T) {
	t.Parallel()
	to := svc.Name{Namespace: "shop", Name: "web"}
	g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "front", Generation: 1}}
	g.Spec.Listeners = []gwv1.Listener{{Name: "http", Port: 80, Protocol: gwv1.HTTPProtocolType}}
	r := &gwv1.HTTPRoute{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "r", UID: "r", Generation: 1}}
	r.Spec.ParentRefs = []gwv1.ParentReference{{Name: "front"}}
	ref := gwv1.BackendObjectReference{Name: "web", Port: new(gwv1.PortNumber(80))}
	r.Spec.Rules = []gwv1.HTTPRouteRule{{BackendRefs: []gwv1.HTTPBackendRef{{BackendRef: gwv1.BackendRef{BackendObjectReference: ref}}}}}
	name, key := svc.NameOf(g), kinds.Route{Kind: kinds.HTTPRoute, Name: svc.NameOf(r)}
	o := &gateway.Objects{
		Gateways: map[svc.Name]*gwv1.Gateway{name: g}, Routes: map[svc.Name]*gwv1.HTTPRoute{key.Name: r},
		Services: map[svc.Name]*services.Service{},
	}
	events := &recorder{}
	c := &controller{announcer: announcer{to: events}, settled: map[kinds.Route]settled{}, looping: looping{}, due: map[kinds.Route]bool{}}
	sync := func(works bool) []string {
		t.Helper()
		s := &watch.State{Listed: true, Routes: o.Routes, Fronts: map[svc.Name]*gateway.Front{}, Touched: map[kinds.Route]bool{key: true}}
		for n := range o.Gateways {
			s.Fronts[n] = gateway.BuildGateway(o, n, nil)
		}
		c.take(s, "")
		written := c.routed(s, key)
		written.write = func(_ context.Context, want []gwv1.RouteParentStatus) error {
			if !works {
				return io.ErrUnexpectedEOF
			}
			next := r.DeepCopy()
			next.Status.Parents = want
			r, o.Routes[key.Name] = next, next
			return nil
		}
		c.writeRoute(s, func(do func(context.Context) error) bool { return do(t.Context()) == nil }, written)
		return events.got()
	}
	want := func(what string, got []string, parts ...string) {
		t.Helper()
		if len(got) != len(parts) || len(got) == 1 && !strings.Contains(got[0], parts[0]) {
			t.Errorf("%s: %q, want %q", what, got, parts)
		}
	}
	want("a write that fails", sync(false))
	const refused = "Warning HTTPRoute shop/r: RouteNotServed: Gateway shop/front: ResolvedRefs is False, BackendNotFound: "
	want("no Service", sync(true), refused)
	want("no change", sync(true))
	c.settled = map[kinds.Route]settled{} // as for another process
	want("no change, seen by another process", sync(true))
	o.Services[to] = &services.Service{Ports: []services.Port{{Number: 80}}}
	want("the Service", sync(true), "Normal HTTPRoute shop/r: RouteServed: ")
	want("no change", sync(true))
	same := gwv1.HTTPRouteFilter{Type: gwv1.HTTPRouteFilterRequestRedirect, RequestRedirect: &gwv1.HTTPRequestRedirectFilter{}}
	for _, filters := range [][]gwv1.HTTPRouteFilter{{same}, nil} {
		next := r.DeepCopy()
		next.Generation++
		next.Spec.Rules[0].Filters = filters
		r, o.Routes[key.Name] = next, next
		if filters != nil {
			const loop = "Warning HTTPRoute shop/r: RouteNotServed: Gateway shop/front: fairlead.dev/RedirectLoop is True"
			want("a redirect to itself", sync(true), loop)
			want("no change", sync(true))
		} else {
			want("no redirect", sync(true), "Normal HTTPRoute shop/r: RouteServed: ")
		}
	}
	gateways := o.Gateways
	o.Gateways = nil
	want("no Gateway", sync(true), "Warning HTTPRoute shop/r: RouteNotServed: Gateway shop/front: it is no longer there")
	want("no change", sync(true))
	o.Gateways = gateways
	want("the Gateway again", sync(true), "Normal HTTPRoute shop/r: RouteServed: ")
}

// A Gateway has an Event when it is served, refused, or has lost its address, and none while it waits for nodes. So has a ListenerSet.
func TestEventsOfGateways(t *testing.T) {
	t.Parallel()
	client := clientOf(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = w.Write(body)
	})
	events := &recorder{}
	c := &controller{announcer: announcer{to: events}, api: client}
	g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "front"}}
	set := &gwv1.ListenerSet{ObjectMeta: g.ObjectMeta}
	k := func(text string) (out metav1.Condition) {
		parts := strings.Fields(text)
		return metav1.Condition{Type: parts[0], Status: metav1.ConditionStatus(parts[1]), Reason: parts[2], Message: "why"}
	}
	const accepted, isProgrammed = "Accepted True Accepted", "Programmed True Programmed"
	for _, step := range []struct {
		conditions, listener []string
		want                 string
	}{
		{[]string{accepted, "Programmed False AddressNotAssigned"}, []string{"Accepted True Accepted", "Conflicted False NoConflicts"}, ""},
		{[]string{accepted, "Programmed False Pending"}, nil, ""},
		{[]string{accepted, isProgrammed}, nil, "Normal Gateway shop/front: GatewayServed: "},
		{[]string{accepted, isProgrammed}, []string{"ResolvedRefs False InvalidCertificateRef"},
			"Warning Gateway shop/front: GatewayNotServed: listener l: ResolvedRefs is False, InvalidCertificateRef: why"},
		{[]string{accepted, isProgrammed}, []string{"ResolvedRefs False InvalidCertificateRef", "Programmed False Pending"}, ""},
		{[]string{accepted, isProgrammed}, []string{"ResolvedRefs True ResolvedRefs"}, "Normal Gateway shop/front: GatewayServed: "},
		{[]string{accepted, "Programmed False AddressNotAssigned"}, nil,
			"Warning Gateway shop/front: GatewayNotServed: Programmed is False, AddressNotAssigned: why"},
		{[]string{"Accepted False ListenersNotValid", "Programmed False Invalid"}, nil,
			"Warning Gateway shop/front: GatewayNotServed: Accepted is False, ListenersNotValid: why"},
	} {
		next := gwv1.GatewayStatus{Listeners: []gwv1.ListenerStatus{{Name: "l", Conditions: []metav1.Condition{k("Accepted True Accepted")}}}}
		for _, text := range step.conditions {
			next.Conditions = append(next.Conditions, k(text))
		}
		for _, text := range step.listener {
			next.Listeners[0].Conditions = append(next.Listeners[0].Conditions, k(text))
		}
		for range 2 {
			if err := c.writeGateway(t.Context(), g, *next.DeepCopy()); err != nil {
				t.Fatalf("%v %v: %v", step.conditions, step.listener, err)
			}
			got := strings.Join(events.got(), "\n")
			if !strings.HasPrefix(got, step.want) || step.want == "" && got != "" {
				t.Errorf("%v %v: %q, want %q", step.conditions, step.listener, got, step.want)
			}
			ofSet := gwv1.ListenerSetStatus{Conditions: next.Conditions, Listeners: []gwv1.ListenerEntryStatus{
				gwv1.ListenerEntryStatus(next.Listeners[0]),
			}}
			ofSet = *ofSet.DeepCopy()
			for i := range ofSet.Conditions { // as the status of a ListenerSet has it
				if k := &ofSet.Conditions[i]; k.Type == programmed && (k.Reason == "Pending" || k.Reason == "AddressNotAssigned") {
					k.Reason = names.ParentNotProgrammed
				}
			}
			if err := c.writeSet(t.Context(), set, *ofSet.DeepCopy()); err != nil {
				t.Fatalf("%v %v: %v", step.conditions, step.listener, err)
			}
			same := strings.ReplaceAll(got, "Gateway", "ListenerSet")
			if strings.Contains(same, "AddressNotAssigned") {
				same = "" // the Gateway has the Event
			}
			if got := strings.Join(events.got(), "\n"); got != same {
				t.Errorf("%v %v: %q, want %q", step.conditions, step.listener, got, same)
			}
			keepTimes(next.Conditions, g.Status.Conditions)
			g.Status, set.Status, step.want = *next.DeepCopy(), *ofSet.DeepCopy(), ""
		}
	}
}

// A Gateway with thousands of routes may go: their Events are bounded, and Normal Events leave room for Warnings.
func TestEventsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		events := &recorder{}
		a := &announcer{to: events}
		for _, first := range []bool{true, false, true} {
			for _, bound := range []struct {
				eventType string
				most      int
			}{{corev1.EventTypeNormal, maxServed}, {corev1.EventTypeWarning, maxAnnounced}} {
				for range maxAnnounced + 10 {
					a.record(&gwv1.HTTPRoute{}, kinds.HTTPRoute, bound.eventType, routeNotServed, "why")
				}
				if n := len(events.got()); first && n != bound.most || !first && n != 0 {
					t.Errorf("%d Events of type %s, want at most %d", n, bound.eventType, bound.most)
				}
			}
			if !first {
				time.Sleep(announcePeriod)
			}
		}
	})
}

// A problem of an Ingress is recorded once, and so is its end, which another Ingress of the same name does not have.
func TestEventsOfIngresses(t *testing.T) {
	t.Parallel()
	events, r := &recorder{}, recorded{}
	in := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "in", UID: "1"}}
	for _, step := range []struct{ uid, problem, want string }{
		{"1", "", ""},
		{"1", "no Service", "Warning Ingress shop/in: IngressNotServed: no Service"},
		{"1", "no Service", ""},
		{"1", "", "Normal Ingress shop/in: IngressServed: all of its paths and hosts are served"},
		{"1", "", ""},
		{"1", "no port", "Warning Ingress shop/in: IngressNotServed: no port"},
		{"2", "", ""},
	} {
		in.UID = types.UID(step.uid)
		r.record(events, in, names.IngressNotServed, names.IngressServed, step.problem)
		if got := strings.Join(events.got(), "\n"); got != step.want {
			t.Errorf("%v: %q", step, got)
		}
	}
}
