package controller

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/certificates"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// A Service that a quota refuses is asked for again after a time that grows, at once when another one is wanted, and is forgotten
// when nothing wants it. The reason stays the same meanwhile.
func TestRefusedServices(t *testing.T) {
	asked := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"over quota"}`))
	}))
	defer server.Close()
	c := &controller{
		client:   kubernetes.NewForConfigOrDie(&rest.Config{Host: server.URL, QPS: -1}),
		refusals: refusals{}, kept: map[wanting]bool{},
	}
	service := func(app string) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "x", Labels: map[string]string{"app": app}}}
	}
	keep := func(app string, want int) {
		t.Helper()
		problem, err := c.keepService(t.Context(), service(app), nil)
		if err != nil || !strings.Contains(problem, "over quota") {
			t.Errorf("the problem is %q, %v", problem, err)
		}
		if asked != want {
			t.Errorf("asked %d times, want %d", asked, want)
		}
	}
	keep("a", 1)
	keep("a", 1)
	r := c.refusals[wantingOf(service("a"))]
	if next := c.refusals.next(c.kept); next <= 0 || next > firstRefusal {
		t.Errorf("tried again in %s, want %s at most", next, firstRefusal)
	}
	for _, wait := range []time.Duration{2 * firstRefusal, 4 * firstRefusal} {
		before := asked
		r.again = time.Now()
		keep("a", before+1)
		if r = c.refusals[wantingOf(service("a"))]; r.wait != wait {
			t.Errorf("waits %s, want %s", r.wait, wait)
		}
	}
	keep("b", asked+1)
	other := service("c") // of another object with the same name of a Service
	other.OwnerReferences = []metav1.OwnerReference{{Kind: kindGateway, Name: "x", Controller: new(true)}}
	for range 3 {
		if _, err := c.keepService(t.Context(), other, nil); err != nil {
			t.Error(err)
		}
		keep("b", 5)
	}
	c.kept = map[wanting]bool{}
	if next := c.refusals.next(c.kept); next != 0 || len(c.refusals) != 0 {
		t.Errorf("what nothing wants is tried again in %s", next)
	}
}

// A Service that the watch has not brought yet, or that goes with its deleted Ingress, is nobody else's; one of another owner is.
func TestServicesOfTheName(t *testing.T) {
	there := &corev1.Service{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.Method == http.MethodGet {
			_ = json.NewEncoder(w).Encode(there)
			return
		}
		w.WriteHeader(http.StatusConflict)
		_, _ = w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"AlreadyExists","code":409}`))
	}))
	defer server.Close()
	of := func(kind, name, uid string) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "x"}}
		s.Labels = map[string]string{names.FrontLabel: names.FrontIngress}
		s.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: name, UID: types.UID(uid), Controller: new(true)}}
		return s
	}
	const foreign = "not of this controller"
	grant := of("ReferenceGrant", "x", "4")
	grant.Labels[names.FrontLabel] = names.FrontGrant
	for name, c := range map[string]struct {
		there   *corev1.Service
		problem string
	}{
		"its own": {of("Ingress", "x", "1"), ""}, "of the Ingress before": {of("Ingress", "x", "0"), ""},
		"of another Ingress": {of("Ingress", "y", "2"), "its Service would be default/x, which Ingress y has; give one of them another name"},
		"of a grant":         {grant, "which ReferenceGrant x has"}, "labelled by a user": {of("Gateway", "x", "3"), foreign},
		"of a user": {&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "x"}}, foreign},
	} {
		there = c.there
		for _, have := range []*corev1.Service{nil, there} {
			if have != nil && name == "its own" {
				continue // it is changed then
			}
			client := kubernetes.NewForConfigOrDie(&rest.Config{Host: server.URL, QPS: -1})
			controller := &controller{client: client, refusals: refusals{}, kept: map[wanting]bool{}}
			problem, err := controller.keepService(t.Context(), of("Ingress", "x", "1"), have)
			if err != nil || (problem != "") != (c.problem != "") || !strings.Contains(problem, c.problem) {
				t.Errorf("%s, seen %t: %q, %v", name, have != nil, problem, err)
			}
		}
	}
}

// attack is two objects whose Services would have one name. first has it.
type attack struct {
	first, second metav1.Object
	kinds         [2]string
	service       svc.Name
}

// Names of objects cannot take the Service of another object, nor keep it: the later one gets none of its addresses, and what it opens
// ends with its use although the other object would have a Service of that name.
func TestCollidingNames(t *testing.T) {
	object := func(name, uid string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(uid)}
	}
	gatewayOf := func(name string) *gwv1.Gateway {
		g := &gwv1.Gateway{ObjectMeta: object(name, "g-"+name)}
		g.Spec.GatewayClassName = names.ClassName
		return g
	}
	serviceFor := func(o metav1.Object) *corev1.Service {
		switch o := o.(type) {
		case *gwv1.Gateway:
			return serviceOf(o, map[gateway.PortKey]string{{Number: 80}: "http"}, nil, nil)
		case *gwv1.ListenerSet:
			return serviceOfSet(o, nil, nil)
		case *gwv1.ReferenceGrant:
			return serviceOfGrant(o, trust.SecretRefs([]svc.Name{{Namespace: "shop", Name: "key"}}))
		case *gwv1.BackendTLSPolicy:
			return serviceOfPolicy(o, nil)
		}
		t.Fatalf("%T", o)
		return nil
	}
	grant, set := &gwv1.ReferenceGrant{ObjectMeta: object("x", "1")}, &gwv1.ListenerSet{ObjectMeta: object("x", "2")}
	policy := &gwv1.BackendTLSPolicy{ObjectMeta: object("x", "3")}
	for _, a := range []attack{
		{gatewayOf("a.b"), gatewayOf("a-b"), [2]string{kindGateway, kindGateway}, svc.Name{Namespace: "shop", Name: "a-b-fairlead"}},
		{grant, gatewayOf("x-secrets"), [2]string{kindGrant, kindGateway}, svc.Name{Namespace: "shop", Name: "x-secrets-fairlead"}},
		{set, gatewayOf("x-listeners"), [2]string{kindSet, kindGateway}, svc.Name{Namespace: "shop", Name: "x-listeners-fairlead"}},
		{policy, gatewayOf("x-authorities"), [2]string{kindPolicy, kindGateway}, svc.Name{Namespace: "shop", Name: "x-authorities-fairlead"}},
	} {
		for range 2 {
			have := serviceFor(a.first)
			want := serviceFor(a.second)
			if svc.NameOf(have) != a.service || svc.NameOf(want) != a.service {
				t.Fatalf("%s and %s do not meet: %s, %s", a.first.GetName(), a.second.GetName(), have.Name, want.Name)
			}
			have.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.7"}}
			client := kubernetes.NewForConfigOrDie(&rest.Config{Host: "127.0.0.1:1"}) // where a write fails
			c := &controller{client: client, refusals: refusals{}, kept: map[wanting]bool{}, o: Options{Gateway: true}}
			h := holders{map[svc.Name]*corev1.Service{a.service: have}, map[svc.Name]bool{}}
			problem, err := c.keepService(t.Context(), want, have)
			if err != nil || !strings.Contains(problem, "which "+a.kinds[0]+" "+a.first.GetName()+" has") {
				t.Errorf("%s: %q, %v", want.Name, problem, err)
			}
			if got := h.of(a.service, a.kinds[1], a.second); got != nil {
				t.Errorf("%s %s has the addresses of %s", a.kinds[1], a.second.GetName(), a.first.GetName())
			}
			if h.of(a.service, a.kinds[0], a.first) != have {
				t.Errorf("%s %s has lost its own", a.kinds[0], a.first.GetName())
			}
			h.claim(a.service, a.kinds[1], a.second)
			if state := (&watch.State{FollowsGateways: true}); h.wanted[a.service] || !c.abandoned(have, state) {
				t.Errorf("%s %s keeps the Service of %s, which does not want it any more", a.kinds[1], a.second.GetName(), a.first.GetName())
			}
			if h.claim(a.service, a.kinds[0], a.first); !h.wanted[a.service] {
				t.Errorf("%s %s does not keep its own", a.kinds[0], a.first.GetName())
			}
			a.first, a.second, a.kinds = a.second, a.first, [2]string{a.kinds[1], a.kinds[0]}
		}
	}
}

// A Gateway that was deleted and made again at once has nothing of the Service of the one before: neither its addresses, also not in the
// status that is written, nor its right to have certificates ordered. That Service goes, although nothing has collected it yet.
func TestMadeAgain(t *testing.T) {
	gatewayOf := func(uid types.UID) *gwv1.Gateway {
		g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: uid}}
		g.Spec.GatewayClassName = names.ClassName
		g.Spec.Listeners = []gwv1.Listener{{Name: "http", Port: 80, Protocol: gwv1.HTTPProtocolType}}
		return g
	}
	before, now := gatewayOf("1"), gatewayOf("2")
	n, service := svc.NameOf(now), names.ServiceOfGateway(svc.NameOf(now))
	have := serviceOf(before, map[gateway.PortKey]string{{Number: 80}: "http"}, nil, nil)
	have.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.7"}}
	h := holders{map[svc.Name]*corev1.Service{service: have}, map[svc.Name]bool{}}
	if h.of(service, kindGateway, before) != have || h.of(service, kindGateway, now) != nil {
		t.Error("the addresses of the deleted Gateway do not differ from the addresses of the new one")
	}
	h.claim(service, kindGateway, now)
	if state := (&watch.State{FollowsGateways: true}); h.wanted[service] || !(&controller{}).abandoned(have, state) {
		t.Error("the Service of the Gateway before stays")
	}
	var written gwv1.Gateway
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := json.NewDecoder(r.Body).Decode(&written); err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(written)
	}))
	defer server.Close()
	config := &rest.Config{Host: server.URL, QPS: -1}
	client, err := api.NewClient(config)
	if err != nil {
		t.Fatal(err)
	}
	objects := &gateway.Objects{Gateways: map[svc.Name]*gwv1.Gateway{n: now}, Policies: trust.NewPolicies()}
	s := &watch.State{
		Gateways: map[svc.Name]*gwv1.Gateway{n: now}, Fronts: map[svc.Name]*gateway.Front{n: gateway.BuildGateway(objects, n, nil)},
	}
	c := &controller{
		client: kubernetes.NewForConfigOrDie(config), api: client, refusals: refusals{}, kept: map[wanting]bool{},
		awaited: map[svc.Name]*awaited{}, certifier: &certifier{}, o: Options{Gateway: true},
	}
	if err := c.syncGateway(t.Context(), s, n, h, nil); err != nil {
		t.Fatal(err)
	}
	if written.Name != "web" || len(written.Status.Addresses) != 0 {
		t.Errorf("the status of %q has the addresses %v", written.Name, written.Status.Addresses)
	}
}

// A Gateway whose Service another object has takes no certificate over that the Gateway with the Service has ordered, also if its name
// comes first.
func TestCollidingNamesOrderNothing(t *testing.T) {
	services, fronts := map[svc.Name]*corev1.Service{}, map[svc.Name]*gateway.Front{}
	gateways := map[svc.Name]*gwv1.Gateway{}
	for _, name := range []string{"a.b", "a-b"} {
		g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name)}}
		g.Spec.GatewayClassName = names.ClassName
		n, orders := svc.NameOf(g), certificates.NewSet()
		gateways[n] = g
		order := certificates.Order{
			Secret: svc.Name{Namespace: "shop", Name: "tls"}, Hosts: []string{name + ".example"}, Challenge: "dns-01", Kind: kindGateway, Of: n,
		}
		if wrong := orders.Add(order); wrong != "" {
			t.Fatal(wrong)
		}
		if fronts[n] = (&gateway.Front{Orders: orders}); name == "a.b" {
			services[names.ServiceOfGateway(n)] = serviceOf(g, map[gateway.PortKey]string{{Number: 443}: "https"}, nil, nil)
		}
	}
	if len(services) != 1 || services[names.ServiceOfGateway(svc.Name{Namespace: "shop", Name: "a-b"})] == nil {
		t.Fatal("the names do not lead to one Service")
	}
	var c certifier
	c.request(&watch.State{Gateways: gateways, Fronts: fronts}, services)
	if by := c.ordered[svc.Name{Namespace: "shop", Name: "tls"}]; by != "shop/a.b" {
		t.Errorf("the certificate is that of %q", by)
	}
}
