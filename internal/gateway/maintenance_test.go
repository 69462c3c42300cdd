package gateway

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/svc"
)

// A route in maintenance says so in its status, and stays accepted; an Ingress has an Event about a page that cannot be used. None of them
// leads to a backend, and the rules of others do.
func TestMaintained(t *testing.T) {
	long := strings.Repeat("x", policy.MaxPage+1)
	for value, want := range map[string]string{
		"": "", "false": "", "Back soon.": "all requests are answered with 503", long: "the page has 65537",
		"yes": "it counts as true", "flase": `the page "flase"`,
	} {
		f := builtFrom(t, plainGateway+service("a", "b")+strings.Replace(route("r", "", "a {path: {value: /r}}"), "metadata: {",
			"metadata: {annotations: {"+svc.MaintenanceAnnotation+`: "`+value+`"}, `, 1)+route("other", "", "b {path: {value: /o}}"))
		for _, r := range routesOf(f) {
			status := f.Parents(r)[0]
			got, message := conditionOf(status.Conditions, names.ConditionMaintenance), ""
			for _, c := range status.Conditions {
				if c.Type == names.ConditionMaintenance {
					message = c.Message
				}
			}
			of := want
			if r.Name.Name == "other" {
				of = ""
			}
			if (got == "True Maintenance") != (of != "") || !strings.Contains(message, of) || len(message) > 300 ||
				conditionOf(status.Conditions, "Accepted") != "True Accepted" {
				t.Errorf("%s, %.20q: %s %q", r.Name, value, got, message)
			}
		}
		for path, of := range map[string]string{"/r": want, "/o": ""} {
			rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "x", Path: path, Method: "GET", Fields: fields{}})
			if rule == nil || (rule.Maintenance != nil) != (of != "") {
				t.Errorf("%s, %.20q: %+v", path, value, rule)
			}
		}
		in := strings.Replace(annotated("shop/i", "a.example", "", "P / web"), "annotations: {}",
			"annotations: {"+svc.MaintenanceAnnotation+`: "`+value+`"}`, 1)
		front := BuildIngress(objects(t, strings.TrimPrefix(in, "\n---\n")+
			"\n---\nkind: Service\nmetadata: {namespace: shop, name: web}\nspec: {ports: [{port: 80}]}"), nil)
		rule, _, _ := front.Table.Ports[80].Find(&Request{Host: "a.example", Path: "/", Method: "GET", Fields: fields{}})
		problem := front.Problems[svc.Name{Namespace: "shop", Name: "i"}]
		doubtful := value == long || value == "yes" || value == "flase"
		if rule == nil || (rule.Maintenance != nil) != (want != "") ||
			(problem != "") != doubtful || !strings.Contains(problem, map[bool]string{true: want}[doubtful]) {
			t.Errorf("Ingress, %.20q: %+v, %q", value, rule, problem)
		}
	}
}

// The annotation counts for a route that was compiled without it, and so does its end.
func TestMaintainedLater(t *testing.T) {
	r := route("r", "", "a {}")
	plain := plainGateway + service("a") + r
	on := plainGateway + service("a") + strings.Replace(r, "metadata: {", "metadata: {annotations: {"+svc.MaintenanceAnnotation+`: "on"}, `, 1)
	var before *Front
	for _, manifest := range []string{plain, on, plain} {
		f := BuildGateway(objects(t, manifest), svc.Name{Namespace: "default", Name: "g"}, before)
		rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "x", Path: "/", Method: "GET", Fields: fields{}})
		if manifest == on && on == plain || rule == nil || (rule.Maintenance != nil) != (manifest == on) {
			t.Fatalf("%+v, after a front: %t, %t", rule, before != nil, on == plain)
		}
		before = f
	}
}

// A word that usually means no does not take a route down, and its owner is told: a route by a condition that is False, an Ingress by the
// text of an Event.
func TestNoMaintenance(t *testing.T) {
	const want = "it counts as false"
	f := builtFrom(t, plainGateway+service("a")+strings.Replace(route("r", "", "a {}"), "metadata: {",
		"metadata: {annotations: {"+svc.MaintenanceAnnotation+`: "no"}, `, 1))
	for _, c := range f.Parents(routesOf(f)[0])[0].Conditions {
		if c.Type == names.ConditionMaintenance && (c.Status != "False" || c.Reason != "InvalidValue" || !strings.Contains(c.Message, want)) {
			t.Errorf("%+v", c)
		}
	}
	if got := conditionOf(f.Parents(routesOf(f)[0])[0].Conditions, names.ConditionMaintenance); got != "False InvalidValue" {
		t.Errorf("condition %q", got)
	}
	rule, _, _ := f.Table.Ports[80].Find(&Request{Host: "x", Path: "/", Method: "GET", Fields: fields{}})
	if rule == nil || rule.Maintenance != nil {
		t.Errorf("%+v", rule)
	}
	front := maintainedIngresses(t, "no", "")
	name := svc.Name{Namespace: "shop", Name: "i"}
	if !strings.Contains(front.Ignored[name], want) || front.Problems[name] != "" {
		t.Errorf("Ingress: %q, %q", front.Ignored[name], front.Problems[name])
	}
}

// maintainedIngresses returns the front of an Ingress and its canary, with the annotation.
func maintainedIngresses(t *testing.T, own, canary string) *IngressFront {
	t.Helper()
	with := func(manifest, value string) string {
		return strings.Replace(manifest, "annotations: {", "annotations: {"+svc.MaintenanceAnnotation+`: "`+value+`", `, 1)
	}
	return BuildIngress(objects(t, strings.TrimPrefix(with(annotated("shop/i", "a.example", "", "P / web"), own), "\n---\n")+
		with(annotated("shop/c", "a.example", "canary: true; canary-weight: 100", "P / next"), canary)+
		"\n---\nkind: Service\nmetadata: {namespace: shop, name: web}\nspec: {ports: [{port: 80}]}"+
		"\n---\nkind: Service\nmetadata: {namespace: shop, name: next}\nspec: {ports: [{port: 80}]}"), nil)
}

// A canary is answered as the Ingress whose paths it has. Its own annotation takes nothing down, and an Event says where to put it.
func TestMaintainedCanary(t *testing.T) {
	for _, c := range []struct{ own, canary, ignored string }{
		{"", "", ""}, {"", "false", ""}, {"true", "", ""},
		{"", "true", "it has no effect on a canary"}, {"", "Back at ten.", "write it to the Ingress that has the same host and path"},
		{"true", "true", "it has no effect on a canary"}, {"", "no", "it counts as false"},
	} {
		front := maintainedIngresses(t, c.own, c.canary)
		rule, _, _ := front.Table.Ports[80].Find(&Request{Host: "a.example", Path: "/", Method: "GET", Fields: fields{}})
		if rule == nil || (rule.Maintenance != nil) != (c.own != "") || len(rule.Backends) != 2 {
			t.Errorf("%q, canary %q: %+v", c.own, c.canary, rule)
		}
		got := front.Ignored[svc.Name{Namespace: "shop", Name: "c"}]
		if (got == "") != (c.ignored == "") || !strings.Contains(got, c.ignored) || len(front.Problems) > 0 {
			t.Errorf("%q, canary %q: %q, %v", c.own, c.canary, got, front.Problems)
		}
	}
}
