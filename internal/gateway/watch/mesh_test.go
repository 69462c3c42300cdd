package watch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// objectServer lists and watches objects, as an API server does.
type objectServer struct {
	mu      sync.Mutex
	events  []objectEvent // the version of each is its place, from 1
	changed chan struct{} // closed by the next event
	// forbidden is the resource that nobody may read, and refused is how often it was asked for.
	forbidden string
	refused   int
	redefined int // how often a definition was replaced, which ends its watches
}

// forbid has a resource refused from now on, "" for none. Its watches end.
func (s *objectServer) forbid(resource string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forbidden, s.refused = resource, 0
	close(s.changed)
	s.changed = make(chan struct{})
}

// refuses reports whether a resource is refused.
func (s *objectServer) refuses(resource string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.forbidden == resource {
		s.refused++
	}
	return s.forbidden == resource
}

type objectEvent struct {
	resource string
	Type     string          `json:"type"`
	Object   json.RawMessage `json:"object"`
}

// add adds an event of an object, as YAML.
func (s *objectServer) add(t *testing.T, resource, kind, text string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	text = fmt.Sprintf("%s\napiVersion: %s\n", text, gwv1.GroupVersion)
	o, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]any
	if err := json.Unmarshal(o, &all); err != nil {
		t.Fatal(err)
	}
	meta := all["metadata"].(map[string]any)
	meta["resourceVersion"], meta["generation"] = strconv.Itoa(len(s.events)+1), len(s.events)+1
	if o, err = json.Marshal(all); err != nil {
		t.Fatal(err)
	}
	s.events = append(s.events, objectEvent{resource, kind, o})
	close(s.changed)
	s.changed = make(chan struct{})
}

// since returns the events of a resource after a version, and what closes when there are more.
func (s *objectServer) since(resource string, version int) (out []objectEvent, now int, more <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.events[version:] {
		if e.resource == resource {
			out = append(out, e)
		}
	}
	return out, len(s.events), s.changed
}

func (s *objectServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := path.Base(r.URL.Path)
	w.Header().Set("Content-Type", "application/json")
	if s.refuses(resource) {
		w.WriteHeader(http.StatusForbidden)
		_ = json.NewEncoder(w).Encode(apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no right")).Status())
		return
	}
	if r.FormValue("watch") == "" {
		all, now, _ := s.since(resource, 0)
		items := []json.RawMessage{}
		for _, e := range all { // each is of another object
			items = append(items, e.Object)
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"metadata": map[string]any{"resourceVersion": strconv.Itoa(now)}, "items": items})
		return
	}
	version, err := strconv.Atoi(r.FormValue("resourceVersion"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	for definition := s.definition(); definition == s.definition(); {
		events, now, more := s.since(resource, version)
		for _, e := range events {
			_ = json.NewEncoder(w).Encode(e)
		}
		version = now
		_ = http.NewResponseController(w).Flush()
		select {
		case <-more:
		case <-r.Context().Done():
			return
		}
		if s.refuses(resource) {
			return
		}
	}
}

// definition returns how often a definition was replaced.
func (s *objectServer) definition() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.redefined
}

const (
	meshedRoute = `kind: HTTPRoute
metadata: {name: web, namespace: default, uid: r}
spec:
  parentRefs: [{group: "", kind: Service, name: web}]
  rules: [{backendRefs: [{name: cart, port: 80}]}]`
	cartPolicy = `kind: BackendTLSPolicy
metadata: {name: cart, namespace: default, uid: p}
spec:
  targetRefs: [{group: "", kind: Service, name: cart}]
  validation: {hostname: cart.example.com, wellKnownCACertificates: System}`
)

// meshWatch is a Watch that looks for routes at Services, and nothing else, at a cluster with the Services web and cart.
func meshWatch(t *testing.T, s *objectServer) (update func() *State, changed loop.Signal) {
	t.Helper()
	update, changed, _ = meshWatchOf(t, s, io.Discard)
	return update, changed
}

// meshWatchOf is meshWatch with a log, and with the client of the Services.
func meshWatchOf(t *testing.T, s *objectServer, log io.Writer) (update func() *State, changed loop.Signal, core *fake.Clientset) {
	t.Helper()
	s.changed = make(chan struct{})
	server := httptest.NewServer(s)
	client, err := api.NewClient(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	core = fake.NewClientset()
	for i, name := range []string{"web", "cart"} {
		o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: "u"}}
		o.Spec.ClusterIPs = []string{fmt.Sprint("10.96.0.", 7+i)}
		o.Spec.Ports = []corev1.ServicePort{{Name: "http", Port: 80}}
		if _, err := core.CoreV1().Services("default").Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	changed = loop.NewSignal()
	w := New(Options{Client: core, Gateway: client, Log: slog.New(slog.NewTextHandler(log, nil)), Changed: changed.Set})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
		server.Close()
	})
	w.FollowMesh(ctx, &running)
	return func() *State { return w.Update(ctx, &running) }, changed, core
}

// meshTargets waits until what is read has so many targets for Service web, -1 for no routes, and returns why a reference does not
// resolve. No state has others meanwhile if strict is true.
func meshTargets(t *testing.T, update func() *State, changed loop.Signal, want int, strict bool) string {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		s := update()
		m := s.Meshes[svc.Name{Namespace: "default", Name: "web"}]
		got := -1
		if m != nil {
			got = len(m.Targets)
		}
		switch {
		case s.Listed && got == want && m == nil:
			return ""
		case s.Listed && got == want:
			key := kinds.Route{Kind: kinds.HTTPRoute, Name: svc.Name{Namespace: "default", Name: "web"}}
			for _, c := range m.Parents(key)[0].Conditions {
				if c.Type == string(gwv1.RouteConditionResolvedRefs) && c.Status == metav1.ConditionFalse {
					return c.Reason
				}
			}
			return ""
		case s.Listed && strict && got >= 0:
			t.Fatalf("there were %d targets", got)
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("listed %t, %d targets, want %d", s.Listed, got, want)
		}
	}
}

// A backend with a BackendTLSPolicy is no target of routes at a Service, without any Gateway: a policy that was first counts from the
// beginning, and others when they come and until they go.
func TestPolicyAtMesh(t *testing.T) {
	t.Parallel()
	const unsupported = "UnsupportedProtocol"
	check := func(t *testing.T, update func() *State, changed loop.Signal, want int, strict bool, reason string) {
		t.Helper()
		if got := meshTargets(t, update, changed, want, strict); got != reason {
			t.Errorf("with %d targets the reason is %q, want %q", want, got, reason)
		}
	}
	t.Run("before the route", func(t *testing.T) {
		t.Parallel()
		s := &objectServer{}
		update, changed := meshWatch(t, s)
		check(t, update, changed, -1, false, "")
		s.add(t, "backendtlspolicies", "ADDED", cartPolicy)
		s.add(t, "httproutes", "ADDED", meshedRoute)
		check(t, update, changed, 0, true, unsupported)
	})
	t.Run("after the route", func(t *testing.T) {
		t.Parallel()
		s := &objectServer{}
		update, changed := meshWatch(t, s)
		s.add(t, "httproutes", "ADDED", meshedRoute)
		check(t, update, changed, 1, false, "")
		s.add(t, "backendtlspolicies", "ADDED", cartPolicy)
		check(t, update, changed, 0, false, unsupported)
		s.add(t, "backendtlspolicies", "DELETED", cartPolicy)
		check(t, update, changed, 1, false, "")
	})
}

// While policies may not be read, everything else is listed, and no route at a Service is served: a backend may have one. The log names
// the missing rights, once. What was read once counts on without the rights.
func TestPoliciesForbidden(t *testing.T) {
	t.Parallel()
	s := &objectServer{forbidden: "backendtlspolicies"}
	s.changed = make(chan struct{})
	s.add(t, "httproutes", "ADDED", meshedRoute)
	s.add(t, "backendtlspolicies", "ADDED", cartPolicy)
	var log lockedLog
	update, changed, _ := meshWatchOf(t, s, &log)
	refused := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.refused
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(60 * time.Second); refused() < 2; {
		if len(update().Meshes) > 0 {
			t.Fatal("routes are served while policies cannot be read")
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("policies were not asked for twice")
		}
	}
	for deadline := time.After(60 * time.Second); !update().Listed; {
		select {
		case <-changed:
		case <-deadline:
			t.Fatal("Gateways wait for policies that cannot be read")
		}
	}
	if u := update(); len(u.Meshes) > 0 || !strings.Contains(u.NoMeshes, "BackendTLSPolicies") {
		t.Errorf("%d meshes, and the reason is %q, while policies cannot be read", len(u.Meshes), u.NoMeshes)
	}
	text := log.String()
	if n := strings.Count(text, "rights get, list and watch"); n != 1 || !strings.Contains(text, "backendtlspolicies") {
		t.Errorf("%d warnings in the log:\n%s", n, text)
	}
	s.forbid("")
	if got := meshTargets(t, update, changed, 0, true); got != "UnsupportedProtocol" {
		t.Errorf("the reason is %q", got)
	}
	if why := update().NoMeshes; why != "" {
		t.Errorf("with the rights: %q", why)
	}
	s.forbid("backendtlspolicies")
	for deadline := time.After(60 * time.Second); refused() < 2; { // the end of the watch, and the next one
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("policies were not asked for again")
		}
	}
	if got := meshTargets(t, update, changed, 0, true); got != "UnsupportedProtocol" {
		t.Errorf("without the rights the reason is %q", got)
	}
}

// lockedLog keeps what is written to it.
type lockedLog struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lockedLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// A change of a Service, a policy or the labels of a Namespace has only what depends on it built again, and a ReferenceGrant has all.
func TestMeshesBuiltAgain(t *testing.T) {
	t.Parallel()
	w := New(Options{Log: slog.New(slog.DiscardHandler), Changed: func() {}})
	shop := func(name string) svc.Name { return svc.Name{Namespace: "shop", Name: name} }
	service := func(name, addr string) *corev1.Service {
		o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop", UID: "u"}}
		o.Spec.ClusterIPs, o.Spec.Ports = []string{addr}, []corev1.ServicePort{{Name: "http", Port: 80}}
		return o
	}
	for i, name := range []string{"one", "two"} {
		w.setService(shop(name), service(name, fmt.Sprint("10.96.0.", i+1)))
		r := &gwv1.HTTPRoute{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop", UID: "r"}}
		r.Spec.ParentRefs = []gwv1.ParentReference{{Group: new(gwv1.Group("")), Kind: new(gwv1.Kind("Service")), Name: gwv1.ObjectName(name)}}
		w.setRoute(shop(name), r)
	}
	w.build()
	check := func(what string, change func(), again ...string) {
		t.Helper()
		before := maps.Clone(w.meshes)
		change()
		w.build()
		for _, name := range []string{"one", "two"} {
			if got := w.meshes[shop(name)] != before[shop(name)]; got != slices.Contains(again, name) {
				t.Errorf("%s: %s is built again: %t", what, name, got)
			}
		}
	}
	policy := &gwv1.BackendTLSPolicy{ObjectMeta: metav1.ObjectMeta{Name: "two", Namespace: "shop", UID: "p"}}
	policy.Spec.TargetRefs = make([]gwv1.LocalPolicyTargetReferenceWithSectionName, 1)
	policy.Spec.TargetRefs[0].Kind, policy.Spec.TargetRefs[0].Name = "Service", "two"
	check("no change", func() {})
	check("a Service", func() { w.setService(shop("one"), service("one", "10.96.0.9")) }, "one")
	check("another Service", func() { w.setService(shop("three"), service("three", "10.96.0.3")) })
	check("a policy", func() { w.setPolicy(shop("two"), policy) }, "two")
	check("a Namespace", func() { setNamespace(w, svc.Name{Name: "shop"}, &corev1.Namespace{}) })
	check("a ReferenceGrant", func() { setGrant(w, shop("g"), &gwv1.ReferenceGrant{}) }, "one", "two")
}
