package controller

import (
	"context"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// A status is written once for a change of its route, again after a write that fails, and for no other route. All are looked at when
// any may have changed.
func TestDueRoutes(t *testing.T) {
	t.Parallel()
	key := func(i int) gateway.StreamKey {
		return gateway.StreamKey{Kind: gateway.KindHTTPRoute, Name: svc.Name{Namespace: "shop", Name: fmt.Sprint("r", i)}}
	}
	// Each has the status of a parent that it no longer names, so it is to be written.
	s := &watch.State{Listed: true, Routes: map[svc.Name]*gwv1.HTTPRoute{}, Touched: map[gateway.StreamKey]bool{key(3): true, key(99): true}}
	for i := range 50 {
		r := &gwv1.HTTPRoute{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: key(i).Name.Name}}
		r.Status.Parents = []gwv1.RouteParentStatus{{ControllerName: names.ControllerName}}
		s.Routes[key(i).Name] = r
	}
	c := &controller{settled: map[gateway.StreamKey]settled{key(99): {}}, due: map[gateway.StreamKey]bool{}}
	writes := func(succeed bool) (n int) {
		c.writeRoutes(s, func(func(context.Context) error) bool { n++; return succeed })
		return n
	}
	c.take(s, "")
	for _, succeed := range []bool{false, true} {
		if n := writes(succeed); n != 1 {
			t.Errorf("%d writes after a change of one route, want 1", n)
		}
	}
	if n := writes(true); n != 0 || len(c.due) > 0 || len(c.settled) > 0 {
		t.Errorf("%d more writes, %d routes are still due, %d that have gone are kept", n, len(c.due), len(c.settled))
	}
	s.Touched = nil
	c.take(s, "")
	if n := writes(true); n != 0 {
		t.Errorf("%d writes after no change", n)
	}
	c.take(s, "n1: it has no Speaker")
	if n := writes(true); n != 50 {
		t.Errorf("%d writes after a change at the nodes, want 50", n)
	}
	for _, listed := range []bool{false, true} {
		s.Listed, s.AllTouched = listed, listed
		c.take(s, "")
		if n := writes(true); (n == 50) != listed {
			t.Errorf("listed %t: %d writes", listed, n)
		}
	}
}
