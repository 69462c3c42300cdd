package gateway

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/svc"
)

// randomFronts changes the routes of a Gateway at random, of both kinds, with hostnames that meet each other, in namespaces that listeners
// take routes from or not.
type randomFronts struct {
	*rand.Rand
	o          *Objects
	generation int64
}

var randomHosts = []string{"", "a.example.com", "b.example.com", "*.example.com", "c.b.example.com", "*.b.example.com", "other.test"}

const randomGateway = `
kind: Gateway
metadata: {name: g}
spec:
  gatewayClassName: fairlead
  listeners:
  - {name: all, port: 80, protocol: HTTP, allowedRoutes: {namespaces: {from: All}}}
  - {name: some, port: 81, protocol: HTTP, hostname: "*.example.com",
     allowedRoutes: {namespaces: {from: Selector, selector: {matchLabels: {team: a}}}}}
  - {name: own, port: 81, protocol: HTTP, hostname: b.example.com}
  - {name: http, port: 82, protocol: HTTP, allowedRoutes: {kinds: [{kind: HTTPRoute}], namespaces: {from: All}}}
---
kind: Namespace
metadata: {name: a, labels: {team: a}}`

// change makes, changes or deletes a route, and returns its key.
func (r *randomFronts) change() kinds.Route {
	name := svc.Name{Namespace: []string{"default", "a", "b"}[r.IntN(3)], Name: fmt.Sprint("r", r.IntN(5))}
	key := kinds.Route{Kind: kinds.HTTPRoute, Name: name}
	if r.IntN(4) == 0 {
		key.Kind = kinds.GRPCRoute
	}
	if r.IntN(4) == 0 {
		if key.Kind == kinds.GRPCRoute {
			delete(r.o.Calls, key.Name)
		} else {
			delete(r.o.Routes, key.Name)
		}
		return key
	}
	r.generation++
	meta := metav1.ObjectMeta{
		Namespace: key.Namespace, Name: key.Name.Name, UID: types.UID(fmt.Sprint(r.generation)), Generation: r.generation,
		CreationTimestamp: metav1.NewTime(time.Unix(int64(r.IntN(4)), 0)),
	}
	var common gwv1.CommonRouteSpec
	for range 1 + r.IntN(2) {
		p := gwv1.ParentReference{Name: "g", Namespace: new(gwv1.Namespace("default"))}
		switch r.IntN(6) {
		case 0:
			p.Name = "another"
		case 1:
			p.SectionName = new([]gwv1.SectionName{"all", "some", "own", "none"}[r.IntN(4)])
		case 2:
			p.Port = new(int32(81))
		}
		common.ParentRefs = append(common.ParentRefs, p)
	}
	var hosts []gwv1.Hostname
	for range r.IntN(3) {
		if h := randomHosts[r.IntN(len(randomHosts))]; h != "" {
			hosts = append(hosts, gwv1.Hostname(h))
		}
	}
	to := gwv1.BackendRef{BackendObjectReference: gwv1.BackendObjectReference{
		Name: gwv1.ObjectName([]string{"s", "t", "missing"}[r.IntN(3)]), Port: new(int32(80)),
	}}
	if r.IntN(3) == 0 {
		to.Namespace = new(gwv1.Namespace("a"))
	}
	if key.Kind == kinds.GRPCRoute {
		rule := gwv1.GRPCRouteRule{BackendRefs: []gwv1.GRPCBackendRef{{BackendRef: to}}}
		r.o.Calls[key.Name] = &gwv1.GRPCRoute{ObjectMeta: meta, Spec: gwv1.GRPCRouteSpec{
			CommonRouteSpec: common, Hostnames: hosts, Rules: []gwv1.GRPCRouteRule{rule},
		}}
		return key
	}
	rule := gwv1.HTTPRouteRule{BackendRefs: []gwv1.HTTPBackendRef{{BackendRef: to}}}
	rule.Matches = []gwv1.HTTPRouteMatch{{Path: &gwv1.HTTPPathMatch{Value: new([]string{"/", "/x", "/x/y"}[r.IntN(3)])}}}
	r.o.Routes[key.Name] = &gwv1.HTTPRoute{ObjectMeta: meta, Spec: gwv1.HTTPRouteSpec{
		CommonRouteSpec: common, Hostnames: hosts, Rules: []gwv1.HTTPRouteRule{rule},
	}}
	return key
}

// changeBeside changes something else that the front depends on, and returns the routes that name it.
func (r *randomFronts) changeBeside(f *Front) (out []kinds.Route) {
	switch r.IntN(3) {
	case 0:
		n := svc.Name{Namespace: []string{"default", "a", "b"}[r.IntN(3)], Name: []string{"s", "t"}[r.IntN(2)]}
		if have := r.o.Services[n]; have != nil {
			delete(r.o.Services, n)
		} else {
			r.o.Services[n] = &services.Service{Ports: []services.Port{{Number: 80}}}
		}
		return f.Users.Of(n)
	case 1:
		n := svc.Name{Namespace: "a", Name: "g"}
		if r.o.Grants[n] != nil {
			delete(r.o.Grants, n)
		} else {
			r.o.Grants[n] = &gwv1.ReferenceGrant{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "g"}, Spec: gwv1.ReferenceGrantSpec{
				From: []gwv1.ReferenceGrantFrom{kinds.From(kinds.HTTPRoute, "default"), kinds.From(kinds.GRPCRoute, "b")},
				To:   []gwv1.ReferenceGrantTo{{Kind: "Service"}},
			}}
		}
		for service, routes := range f.Users.All() {
			if service.Namespace == "a" {
				out = append(out, routes...)
			}
		}
	case 2:
		r.o.Namespaces["b"] = map[string]string{"team": []string{"a", "b"}[r.IntN(2)]}
	}
	return out
}

// Fronts that are changed step by step are as fronts that are built at once, also the ones before, which nothing changes afterwards.
func TestChangeIsAsBuild(t *testing.T) {
	name := svc.Name{Namespace: "default", Name: "g"}
	carried := 0
	for seed := range uint64(20) {
		r := &randomFronts{Rand: rand.New(rand.NewPCG(seed, 0)), o: objects(t, randomGateway)}
		for _, ns := range []string{"default", "a", "b"} {
			for _, s := range []string{"s", "t"} {
				r.o.Services[svc.Name{Namespace: ns, Name: s}] = &services.Service{Ports: []services.Port{{Number: 80}}}
			}
		}
		f := BuildGateway(r.o, name, nil)
		for range 40 {
			before, was := f, described(t, f)
			keys := map[kinds.Route]bool{}
			for range 1 + r.IntN(3) {
				keys[r.change()] = true
			}
			if r.IntN(2) == 0 {
				for _, k := range r.changeBeside(before) {
					keys[k] = true
				}
			}
			f = ChangeGateway(r.o, name, before, keys)
			if f.listeners[0].changed != nil {
				carried++
			}
			if diff := differences(described(t, f), described(t, BuildGateway(r.o, name, nil))); diff != "" {
				t.Fatalf("seed %d: after changes of %v%s", seed, slices.Collect(maps.Keys(keys)), diff)
			}
			if diff := differences(described(t, before), was); diff != "" {
				t.Fatalf("seed %d: the front before has changed%s", seed, diff)
			}
		}
	}
	if carried < 50 {
		t.Errorf("only %d fronts were made from the one before", carried)
	}
}

func differences(got, want map[string]any) (out string) {
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if !reflect.DeepEqual(got[key], want[key]) {
			out += fmt.Sprintf("\n%s: %v, want %v", key, got[key], want[key])
		}
	}
	if len(got) != len(want) {
		out += fmt.Sprintf("\n%d facts, want %d", len(got), len(want))
	}
	return out
}

// described is what a front does, and what its statuses are.
func described(t *testing.T, f *Front) map[string]any {
	t.Helper()
	out := map[string]any{"status": f.Status(nil, "")}
	for key := range f.routes {
		out[fmt.Sprint(key.Kind, key.Name)] = f.Parents(key)
	}
	targets := map[Target]bool{}
	for _, to := range f.Targets {
		if targets[to] {
			t.Fatalf("target %v twice", to)
		}
		targets[to] = true
	}
	out["targets"] = targets
	for _, s := range []string{"s", "t", "missing"} {
		out["refers to "+s] = f.Refers(svc.Name{Namespace: "default", Name: s})
	}
	for port, p := range f.Table.Ports {
		for _, h := range append(slices.Clone(randomHosts[1:]), "z.example.com", "d.b.example.com") {
			for _, path := range []string{"/", "/x", "/x/y", "/x/y/z"} {
				rule, prefix, verdict := p.Find(&Request{Host: h, Path: path, Method: "GET", Fields: fields{}})
				got := fmt.Sprint(prefix, verdict)
				if rule != nil {
					got += fmt.Sprint(rule.Route, rule.Backends)
				}
				out[fmt.Sprint(port, h, path)] = got
			}
		}
	}
	return out
}
