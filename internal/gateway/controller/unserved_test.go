package controller

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// A route tells which nodes do not serve it, once Nodes and Speakers are known.
func TestUnserved(t *testing.T) {
	t.Parallel()
	accepted := []metav1.Condition{{Type: string(gwv1.RouteConditionAccepted), Status: metav1.ConditionTrue, ObservedGeneration: 7}}
	refused := []metav1.Condition{{Type: string(gwv1.RouteConditionAccepted), Status: metav1.ConditionFalse}}
	type speakers = map[string]*speaking
	no := func(why string) *speaking { return &speaking{noMesh: why} }
	many, few := map[string]bool{}, map[string]bool{"n1": true, "n2": true, "n3": true}
	for i := range 20 {
		many[fmt.Sprintf("m%02d", i)] = true
	}
	for _, c := range []struct {
		what     string
		of       *unserved
		to       []metav1.Condition
		contains string // "" if there is no condition
	}{
		{"nothing is followed", &unserved{nodes: few}, accepted, ""},
		{"a kind is not listed", &unserved{followed: true, unlisted: 1, nodes: few, speakers: speakers{"n1": no("x")}}, accepted, ""},
		{"no node has a Speaker", &unserved{followed: true, nodes: few}, accepted, ""},
		{"all serve", &unserved{followed: true, nodes: few, speakers: speakers{"n1": no(""), "n2": no(""), "n3": no("")}}, accepted, ""},
		{"a node is gone", &unserved{followed: true, nodes: few,
			speakers: speakers{"n1": no(""), "n2": no(""), "n3": no(""), "n4": no("ipvs")}}, accepted, ""},
		{"two do not", &unserved{followed: true, nodes: few, speakers: speakers{"n1": no(""), "n2": no("ipvs")}}, accepted,
			"n2: ipvs; n3: it has no Speaker"},
		{"the route is refused", &unserved{followed: true, nodes: few, speakers: speakers{"n1": no("ipvs")}}, refused, ""},
		{"many", &unserved{followed: true, nodes: many, speakers: speakers{"n1": no("")}}, accepted, "m07: it has no Speaker; and 12 more"},
	} {
		got := withUnserved(c.to, c.of.why())
		if c.contains == "" {
			if len(got) != len(c.to) {
				t.Errorf("%s: %v", c.what, got)
			}
			continue
		}
		if len(got) != 2 || got[1].Type != ConditionUnserved || got[1].ObservedGeneration != 7 || !strings.Contains(got[1].Message, c.contains) {
			t.Errorf("%s: %+v, want %q", c.what, got, c.contains)
		}
	}
}

// While it is not known what routes name as their parents, their statuses for Services stay as they are.
func TestUnknownMeshesKeepStatuses(t *testing.T) {
	t.Parallel()
	ref := gwv1.ParentReference{Group: new(gwv1.Group("")), Kind: new(gwv1.Kind("Service")), Name: "web"}
	r := &routed{
		key:    kinds.Route{Kind: kinds.HTTPRoute, Name: svc.Name{Namespace: "default", Name: "web"}},
		object: &gwv1.HTTPRoute{}, refs: []gwv1.ParentReference{ref},
		have: []gwv1.RouteParentStatus{{ParentRef: ref, ControllerName: names.ControllerName}},
	}
	for why, want := range map[string]int{"no rights": 0, "": 1} {
		writes := 0
		c := &controller{settled: map[kinds.Route]settled{}, looping: looping{}}
		if done := c.writeRoute(&watch.State{NoMeshes: why}, func(func(context.Context) error) bool { writes++; return true }, r); !done {
			t.Errorf("%q: the route stays due", why)
		}
		if writes != want {
			t.Errorf("%q: %d writes, want %d", why, writes, want)
		}
	}
}
