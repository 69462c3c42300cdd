package watch

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/parents"
	"github.com/fairlead/fairlead/internal/svc"
)

// After whatever changes, a State has all objects and fronts as they are, the indexes have what a look at all of them finds, and what an
// earlier State has is as it was.
func TestFollowsChanges(t *testing.T) {
	t.Parallel()
	const size = 100
	c := newCluster(t, size)
	random := rand.New(rand.NewPCG(3, 4)) //nolint:gosec // repeatable
	name := func(kind string, i int) svc.Name { return svc.Name{Namespace: space(i), Name: fmt.Sprint(kind, i)} }
	steps := []func(i int){
		c.route, c.ingress, c.service,
		func(i int) { c.setRoute(name("r", i), nil) },
		func(i int) { setIngress(c.Watch, name("i", i), nil) },
		func(i int) { c.setService(name("s", i), nil) },
		func(i int) { setGateway(c.Watch, name("g", i), nil) },
		c.gateway,
		func(i int) {
			s := &gwv1.ListenerSet{ObjectMeta: metav1.ObjectMeta{Namespace: space(i), Name: "set", Generation: c.changes}}
			s.Spec.ParentRef.Name = gwv1.ObjectName(name("g", i).Name)
			c.setListenerSet(svc.NameOf(s), s)
		},
		func(i int) {
			r := &gwv1.TCPRoute{ObjectMeta: metav1.ObjectMeta{Namespace: space(i), Name: "tcp", Generation: c.changes}}
			r.Spec.ParentRefs = []gwv1.ParentReference{{Name: gwv1.ObjectName(name("g", i).Name)}}
			backend := gwv1.BackendRef{BackendObjectReference: gwv1.BackendObjectReference{
				Name: gwv1.ObjectName(fmt.Sprint("s", c.changes%3)), Port: new(gwv1.PortNumber(80))}}
			r.Spec.Rules = []gwv1.TCPRouteRule{{BackendRefs: []gwv1.BackendRef{backend}}}
			setStream(c.Watch, kinds.Route{Kind: kinds.TCPRoute, Name: svc.NameOf(r)}, r, kinds.StreamOfTCP)
		},
	}
	before := c.update()
	routes, fronts := maps.Clone(before.Routes), maps.Clone(before.Fronts)
	for range 400 {
		for range 1 + random.IntN(3) {
			steps[random.IntN(len(steps))](5 * random.IntN(size/5))
		}
		s := c.update()
		for what, pair := range map[string][2]any{
			"Gateways": {s.Gateways, c.gateways}, "Routes": {s.Routes, c.objects.Routes}, "Ingresses": {s.Ingresses, c.ingresses},
			"Sets": {s.Sets, c.objects.Sets}, "Streams": {s.Streams, c.objects.Streams}, "Fronts": {s.Fronts, c.fronts},
			"IngressFronts": {s.IngressFronts, c.ingressFronts},
		} {
			if !sameMap(pair[0], pair[1]) {
				t.Fatalf("%s of the State differ", what)
			}
		}
		if len(s.Versions) != len(s.Fronts) || len(s.Fronts) != len(s.Gateways) {
			t.Fatalf("%d versions of %d fronts of %d Gateways", len(s.Versions), len(s.Fronts), len(s.Gateways))
		}
		users, secrets := referrers{}, users[svc.Name]{}
		for n := range c.fronts {
			f := gateway.BuildGateway(&c.objects, n, nil)
			if want := c.versionOf(n, f); s.Versions[n] != want {
				t.Fatalf("Gateway %s has the version %s, want %s", n, s.Versions[n], want)
			}
			for service := range servicesOf(f) {
				users.add(service, n)
			}
			secrets.replace(frontName{Name: n}, nil, f.Named, map[svc.Name]bool{})
		}
		for n, f := range c.ingressFronts {
			secrets.replace(frontName{true, n}, nil, f.Named, map[svc.Name]bool{})
		}
		if !reflect.DeepEqual(c.serviceUsers, users) {
			t.Fatal("the index of Services differs")
		}
		if len(c.secretUsers)+len(secrets) > 0 && !reflect.DeepEqual(c.secretUsers, secrets) {
			t.Fatal("the index of Secrets differs")
		}
		want := parents.NewIndex[kinds.Route]()
		for n, r := range c.objects.Routes {
			want.SetRoute(kinds.Route{Kind: kinds.HTTPRoute, Name: n}, n.Namespace, nil, r.Spec.ParentRefs)
		}
		for key, r := range c.objects.Streams {
			want.SetRoute(key, key.Namespace, nil, r.Parents)
		}
		for _, s := range c.objects.Sets {
			want.SetListenerSet(nil, s)
		}
		if !reflect.DeepEqual(c.objects.Named, want) {
			t.Fatal("the index of parents differs")
		}
	}
	if !maps.Equal(before.Routes, routes) || !maps.Equal(before.Fronts, fronts) {
		t.Error("an earlier State has changed")
	}
	s := c.update()
	next := c.update()
	c.route(5)
	changed := c.update()
	if reflect.ValueOf(s.Routes).Pointer() != reflect.ValueOf(next.Routes).Pointer() ||
		reflect.ValueOf(s.Gateways).Pointer() != reflect.ValueOf(changed.Gateways).Pointer() {
		t.Error("maps in which nothing has changed are copied")
	}
}

// sameMap reports whether two maps of pointers have the same ones.
func sameMap(a, b any) bool {
	x, y := reflect.ValueOf(a), reflect.ValueOf(b)
	if x.Len() != y.Len() {
		return false
	}
	for _, k := range x.MapKeys() {
		if v := y.MapIndex(k); !v.IsValid() || v.Pointer() != x.MapIndex(k).Pointer() {
			return false
		}
	}
	return true
}

// What fronts name is followed with its first user and given up with the last one.
func TestUsers(t *testing.T) {
	t.Parallel()
	u, changed := users[string]{}, map[string]bool{}
	a, b := frontName{Name: svc.Name{Name: "f"}}, frontName{ingresses: true, Name: svc.Name{Name: "f"}}
	check := func(by frontName, before, now []string, want ...string) {
		t.Helper()
		clear(changed)
		u.replace(by, before, now, changed)
		for _, w := range want {
			if !changed[w] {
				t.Errorf("%q has not changed", w)
			}
		}
		if len(changed) != len(want) {
			t.Errorf("changed %v, want %v", changed, want)
		}
	}
	check(a, nil, []string{"x", "y"}, "x", "y")
	check(b, nil, []string{"y"})
	check(a, []string{"x", "y"}, []string{"y", "x"})
	check(a, []string{"y", "x"}, []string{"z"}, "x", "z")
	check(b, []string{"y"}, nil, "y")
	if len(u) != 1 || !u["z"][a] {
		t.Errorf("users %v", u)
	}
}
