package gateway

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/gateway/services"
	"github.com/fairlead/fairlead/internal/svc"
)

// mirrorsOf returns the mirrors of the rule for /, with how many of 600 requests each gets, and the ResolvedRefs and Accepted of
// its route.
func mirrorsOf(t *testing.T, text string) (mirrors, resolved, accepted string) {
	t.Helper()
	f := builtFrom(t, plainGateway+text)
	rule, _, v := f.Table.Ports[80].Find(&Request{Host: "h", Path: "/", Method: "GET", Fields: fields{}})
	if v != Routed {
		t.Fatalf("verdict %d", v)
	}
	var out []string
	targets := fmt.Sprint(f.Targets)
	for i := range rule.Filters.Mirrors {
		m, n := &rule.Filters.Mirrors[i], 0
		for random := range uint64(600) {
			if m.Takes(random) {
				n++
			}
		}
		if out = append(out, fmt.Sprint(m.Backend.Name, "=", n)); !strings.Contains(targets, fmt.Sprint(rule.Mirror(m))) {
			t.Errorf("no target for %v in %s", m.Backend, targets)
		}
	}
	s := f.Parents(kinds.Route{Kind: kinds.HTTPRoute, Name: svc.Name{Namespace: "default", Name: "r"}})[0].Conditions
	return strings.Join(out, " "), conditionOf(s, "ResolvedRefs"), conditionOf(s, "Accepted")
}

// A mirror gets its share of the requests. One that leads to no backend is left out, which the status tells, and one that is not
// valid refuses the rule.
func TestMirrors(t *testing.T) {
	const fine, resolved = "True Accepted", "True ResolvedRefs"
	for filter, want := range map[string][3]string{
		"{backendRef: {name: b, port: 80}}":                                           {"default/b=600", resolved, fine},
		"{backendRef: {name: b, port: 80}, percent: 20}":                              {"default/b=120", resolved, fine},
		"{backendRef: {name: b, port: 80}, percent: 0}":                               {"default/b=0", resolved, fine},
		"{backendRef: {name: b, port: 80}, fraction: {numerator: 1, denominator: 3}}": {"default/b=200", resolved, fine},
		"{backendRef: {name: b, port: 80}, fraction: {numerator: 50}}":                {"default/b=300", resolved, fine},
		"{backendRef: {name: c, port: 80}}":                                           {"", "False BackendNotFound", fine},
		"{backendRef: {name: b, port: 81}}":                                           {"", "False BackendNotFound", fine},
		"{backendRef: {name: b, namespace: other, port: 80}}":                         {"", "False RefNotPermitted", fine},
		"{backendRef: {name: b, kind: Pod, port: 80}}":                                {"", "False InvalidKind", fine},
		"{backendRef: {name: b, port: 80}, percent: 101}":                             {"", resolved, "False UnsupportedValue"},
		"{backendRef: {name: b, port: 80}, fraction: {numerator: 2, denominator: 1}}": {"", resolved, "False UnsupportedValue"},
		"{backendRef: {name: b, port: 80}, fraction: {numerator: 0, denominator: 0}}": {"", resolved, "False UnsupportedValue"},
		"{backendRef: {name: b, port: 80}, percent: 5, fraction: {numerator: 1}}":     {"", resolved, "False UnsupportedValue"},
		"{backendRef: {name: granted, namespace: open, port: 80}, percent: 50}":       {"open/granted=300", resolved, fine},
		"{backendRef: {name: b, port: 80}}}, {type: RequestMirror, requestMirror: {backendRef: {name: a, port: 80}}": {
			"default/b=600 default/a=600", resolved, fine,
		},
	} {
		mirrors, refs, accepted := mirrorsOf(t, `
---
kind: HTTPRoute
metadata: {name: r}
spec:
  parentRefs: [{name: g}]
  rules: [{timeouts: {request: 3s}, filters: [{type: RequestMirror, requestMirror: `+filter+`}], backendRefs: [{name: a, port: 80}]}]
---
kind: ReferenceGrant
metadata: {name: g, namespace: open}
spec:
  from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: default}]
  to: [{group: "", kind: Service, name: granted}]`+service("a", "b", "other/b", "open/granted"))
		if got := [3]string{mirrors, refs, accepted}; got != want {
			t.Errorf("%s: %q, want %q", filter, got, want)
		}
	}
}

// A mirror whose Service comes later is there then: the route is compiled again.
func TestMirrorAppears(t *testing.T) {
	o := objects(t, plainGateway+grpcRoute("r", `  rules:
  - filters: [{type: RequestMirror, requestMirror: {backendRef: {name: b, port: 80}}}]
    backendRefs: [{name: a, port: 80}]`)+service("a"))
	name := svc.Name{Namespace: "default", Name: "g"}
	f := BuildGateway(o, name, nil)
	if got := grpcStatus(f, "ResolvedRefs"); !strings.HasPrefix(got, "False BackendNotFound rules[0].filters[0].requestMirror.backendRef: ") {
		t.Error(got)
	}
	b := svc.Name{Namespace: "default", Name: "b"}
	if !f.Refers(b) {
		t.Error("the front does not follow the mirror's Service")
	}
	o.Services[b] = &services.Service{Ports: []services.Port{{Number: 80}}}
	if f = BuildGateway(o, name, f); len(f.Targets) != 2 || f.Targets[0].Protocol != H2C || f.Targets[1].Protocol != H2C {
		t.Errorf("targets %v", f.Targets)
	}
}

// The shorter one of a rule's timeouts counts, and 0s is none.
func TestTimeouts(t *testing.T) {
	for timeouts, want := range map[string]time.Duration{
		"{}":                                   0,
		"{request: 3s}":                        3 * time.Second,
		"{request: 3s, backendRequest: 1s}":    time.Second,
		"{request: 0s}":                        policy.NoTimeout,
		"{backendRequest: 0s}":                 policy.NoTimeout,
		"{request: 0s, backendRequest: 5s}":    5 * time.Second,
		"{request: 3s, backendRequest: 0s}":    3 * time.Second,
		"{request: 0s, backendRequest: 0s}":    policy.NoTimeout,
		"{request: 1h, backendRequest: 1m30s}": 90 * time.Second,
	} {
		f := builtFrom(t, plainGateway+`
---
kind: HTTPRoute
metadata: {name: r}
spec:
  parentRefs: [{name: g}]
  rules: [{timeouts: `+timeouts+`, backendRefs: [{name: a, port: 80}]}]`+service("a"))
		if len(f.Targets) != 1 || f.Targets[0].Timeout != want {
			t.Errorf("%s: %+v, want %v", timeouts, f.Targets, want)
		}
	}
}
