package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// A status is written once for a change of its route, again after a write that fails, and for no other route. All are looked at when
// any may have changed.
func TestDueRoutes(t *testing.T) {
	t.Parallel()
	key := func(i int) kinds.Route {
		return kinds.Route{Kind: kinds.HTTPRoute, Name: svc.Name{Namespace: "shop", Name: fmt.Sprint("r", i)}}
	}
	// Each has the status of a parent that it no longer names, so it must be written.
	s := &watch.State{Listed: true, Routes: map[svc.Name]*gwv1.HTTPRoute{}, Touched: map[kinds.Route]bool{key(3): true, key(99): true}}
	for i := range 50 {
		r := &gwv1.HTTPRoute{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: key(i).Name.Name}}
		r.Status.Parents = []gwv1.RouteParentStatus{{ControllerName: names.ControllerName}}
		s.Routes[key(i).Name] = r
	}
	c := &controller{settled: map[kinds.Route]settled{key(99): {}}, looping: looping{}, due: map[kinds.Route]bool{}}
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

// clientOf returns a client of an API server with a handler of JSON.
func clientOf(t *testing.T, serve http.HandlerFunc) *api.Client {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		serve(w, r)
	}))
	t.Cleanup(server.Close)
	client, err := api.NewClient(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// A GatewayClass says so while the installed definitions are of another version, which stays.
func TestUnsupportedVersion(t *testing.T) {
	t.Parallel()
	var written gwv1.GatewayClass
	client := clientOf(t, func(w http.ResponseWriter, r *http.Request) {
		if err := json.NewDecoder(r.Body).Decode(&written); err != nil {
			t.Error(err)
		}
		_ = json.NewEncoder(w).Encode(&written)
	})
	c := &controller{o: Options{Log: slog.New(slog.DiscardHandler)}, api: client}
	d := &api.Definition{Name: "httproutes.gateway.networking.k8s.io", Bundle: "v1.6.3", Channel: api.Standard}
	class := &gwv1.GatewayClass{ObjectMeta: metav1.ObjectMeta{Name: "fairlead", Generation: 1}}
	of := func(version string) map[string]string {
		return map[string]string{"gateway.networking.k8s.io/bundle-version": version, api.ChannelAnnotation: "standard"}
	}
	for _, step := range []struct {
		annotations map[string]string
		want        string
	}{
		{of("v1.7.0"), "False UnsupportedVersion the installed definitions are of bundle v1.7.0; v1.6.3 is supported"},
		{of("v1.6.9"), "True SupportedVersion "},
		{of(""), "False UnsupportedVersion the installed definitions have no bundle version; v1.6.3 is supported"},
		{nil, "True SupportedVersion "},
	} {
		c.found(d, step.annotations)
		if err := c.writeClass(t.Context(), class); err != nil {
			t.Fatal(err)
		}
		class.Status = written.Status
		k := meta.FindStatusCondition(class.Status.Conditions, "SupportedVersion")
		if got := fmt.Sprintf("%s %s %s", k.Status, k.Reason, k.Message); got != step.want {
			t.Errorf("%v: %q, want %q", step.annotations, got, step.want)
		}
	}
}

// The number of routes is written once in countPeriod while nothing else of a Gateway's status changes, and other changes at once.
func TestCountsAreGathered(t *testing.T) {
	t.Parallel()
	writes := 0
	client := clientOf(t, func(w http.ResponseWriter, r *http.Request) {
		writes++
		_, _ = io.Copy(w, r.Body)
	})
	c := &controller{api: client, counted: map[types.UID]time.Time{}}
	g := &gwv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "front", UID: "g"}}
	status := func(routes int32, reason string) gwv1.GatewayStatus {
		conditions := []metav1.Condition{{Type: "Programmed", Status: metav1.ConditionTrue, Reason: reason}}
		return gwv1.GatewayStatus{
			Conditions: conditions,
			Listeners:  []gwv1.ListenerStatus{{Name: "http", AttachedRoutes: routes, Conditions: slices.Clone(conditions)}},
		}
	}
	write := func(what string, want gwv1.GatewayStatus, written bool) {
		t.Helper()
		before := writes
		c.postponed = false
		if err := c.writeGateway(t.Context(), g, want); err != nil {
			t.Fatal(err)
		}
		if got := writes > before; got != written {
			t.Errorf("%s is written: %t, want %t", what, got, written)
		}
		if written {
			g.Status = want
		}
	}
	write("the first status", status(1, "Programmed"), true)
	write("the first number", status(2, "Programmed"), true)
	for i := range int32(20) {
		write("another number", status(3+i, "Programmed"), false)
		if !c.postponed {
			t.Error("nobody writes it later")
		}
	}
	write("another condition", status(23, "Other"), true)
	write("another number", status(24, "Other"), false)
	c.counted[g.UID] = time.Now().Add(-countPeriod)
	write("another number, later", status(24, "Other"), true)
	write("no change", status(24, "Other"), false)
	if c.postponed {
		t.Error("a status that is as it should be waits to be written")
	}

	set := &gwv1.ListenerSet{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "more", UID: "s"}}
	for i, written := range []bool{true, true, false} { // as it becomes accepted, the first number, another one
		want := gwv1.ListenerSetStatus{Listeners: []gwv1.ListenerEntryStatus{{Name: "http", AttachedRoutes: int32(i)}}}
		before := writes
		c.postponed = false
		if err := c.writeSet(t.Context(), set, want); err != nil {
			t.Fatal(err)
		}
		if got := writes > before; got != written || c.postponed == written {
			t.Errorf("%d routes of a ListenerSet are written: %t, want %t; later: %t", i, got, written, c.postponed)
		}
		set.Status = want
	}
}

// A ListenerSet whose Gateway has gone is no longer accepted; one that never was keeps its status.
func TestOrphans(t *testing.T) {
	t.Parallel()
	s := &gwv1.ListenerSet{ObjectMeta: metav1.ObjectMeta{Namespace: "b", Name: "s", Generation: 3}}
	if _, differs := orphanStatus(s); differs {
		t.Error("one without a status gets one")
	}
	for _, programmed := range []metav1.ConditionStatus{metav1.ConditionTrue, metav1.ConditionFalse} {
		s.Status = gwv1.ListenerSetStatus{
			Conditions: []metav1.Condition{{Type: "Accepted", Status: metav1.ConditionTrue}, {Type: "Programmed", Status: programmed}},
			Listeners:  []gwv1.ListenerEntryStatus{{Name: "l"}},
		}
		want, differs := orphanStatus(s)
		if !differs || len(want.Listeners) > 0 || len(want.Conditions) != 2 {
			t.Errorf("programmed %s: %t, %+v", programmed, differs, want)
		}
		for i, kind := range []string{"Accepted", "Programmed"} {
			if c := want.Conditions[i]; c.Type != kind || c.Status != metav1.ConditionFalse || c.Reason != "ParentNotAccepted" ||
				c.ObservedGeneration != 3 {
				t.Errorf("programmed %s: %+v", programmed, c)
			}
		}
		s.Status = want
		if _, differs := orphanStatus(s); differs {
			t.Error("it is written again")
		}
	}
}
