package gateway

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// set returns the manifest of a ListenerSet of Gateway default/g.
func set(name, listeners string) string {
	ns, name, ok := strings.Cut(name, "/")
	if !ok {
		ns, name = "default", ns
	}
	return fmt.Sprintf("\n---\nkind: ListenerSet\nmetadata: {namespace: %s, name: %s, uid: %s-%s}\nspec: "+
		"{parentRef: {name: g, namespace: default}, listeners: [%s]}", ns, name, ns, name, listeners)
}

// routeTo returns the manifest of an HTTPRoute with a parent and one backend.
func routeTo(name, parent, to string) string {
	return strings.Replace(route(name, "", to+" {}"), "parentRefs: [{name: g, namespace: default}]", "parentRefs: ["+parent+"]", 1)
}

const plainSet = "{name: l, port: 81, protocol: HTTP}"

// A ListenerSet is attached only as the Gateway allows it, by default nowhere, and its listeners are open to routes of its own
// namespace.
func TestListenerSetsNeedPermission(t *testing.T) {
	for _, c := range []struct {
		allowed, set string
		want         string
	}{
		{"", "default/s", "closed"}, {"{}", "default/s", "closed"}, {"{namespaces: {from: None}}", "default/s", "closed"},
		{"{namespaces: {from: Same}}", "default/s", "a"}, {"{namespaces: {from: Same}}", "b/s", "closed"},
		{"{namespaces: {from: All}}", "b/s", "a"}, {"{namespaces: {from: Selector}}", "b/s", "closed"},
		{"{namespaces: {from: Selector, selector: {matchLabels: {team: b}}}}", "b/s", "a"},
		{"{namespaces: {from: Selector, selector: {matchLabels: {team: c}}}}", "b/s", "closed"},
		{"{namespaces: {from: Selector, selector: {matchLabels: {team: b}}}}", "unknown/s", "closed"},
	} {
		ns, _, _ := strings.Cut(c.set, "/")
		gateway := plainGateway
		if c.allowed != "" {
			gateway = strings.Replace(plainGateway, "spec: {", "spec: {allowedListeners: "+c.allowed+", ", 1)
		}
		o := objects(t, gateway+service(ns+"/a")+set(c.set, plainSet)+routeTo(ns+"/r", "{kind: ListenerSet, name: s}", "a")+
			"\n---\nkind: Namespace\nmetadata: {name: b, labels: {team: b}}")
		name := svc.Name{Namespace: "default", Name: "g"}
		f := BuildGateway(o, name, nil)
		status := f.SetStatus(f.Sets()[0], "")
		if got := ask(t, f.Table, "http://x:81/"); got != c.want {
			t.Errorf("%s, %s: %s, want %s", c.allowed, c.set, got, c.want)
		}
		accepted, programmed, attached := "True Accepted", "True Programmed", int32(1)
		reason := "True Accepted"
		if c.want == "closed" {
			accepted, programmed, attached, reason = "False NotAllowed", "False NotAllowed", 0, "False NoMatchingParent"
		}
		got := conditionOf(status.Conditions, "Accepted") + ", " + conditionOf(status.Conditions, "Programmed")
		if n := f.Status(nil, "").AttachedListenerSets; got != accepted+", "+programmed || *n != attached {
			t.Errorf("%s, %s: %s, %d attached", c.allowed, c.set, got, *n)
		}
		if got := conditionOf(f.Parents(routesOf(f)[0])[0].Conditions, "Accepted"); got != reason {
			t.Errorf("%s, %s: the route is %s, want %s", c.allowed, c.set, got, reason)
		}
		// The permission ends.
		o.Gateways[name] = o.Gateways[name].DeepCopy()
		o.Gateways[name].Spec.AllowedListeners = nil
		if f = BuildGateway(o, name, f); ask(t, f.Table, "http://x:81/") != "closed" {
			t.Errorf("%s, %s: the listener is still open", c.allowed, c.set)
		}
	}
}

const openGateway = `
kind: Gateway
metadata: {name: g}
spec:
  gatewayClassName: fairlead
  allowedListeners: {namespaces: {from: All}}
  listeners:
  - {name: http, port: 80, protocol: HTTP, hostname: a.example.com}
  - {name: https, port: 443, protocol: HTTPS, hostname: a.example.com, tls: {certificateRefs: [{name: c}]}}
---
kind: Secret
metadata: {name: c}
---
kind: Secret
metadata: {name: c, namespace: b}`

// The listeners of the Gateway count first, then ListenerSets by age: no ListenerSet takes a host or a
// port of others, and one that is refused keeps nothing from the younger ones.
func TestListenerSetsGiveWay(t *testing.T) {
	sets := set("b/old", "{name: host, port: 80, protocol: HTTP, hostname: a.example.com}, {name: free, port: 80, protocol: HTTP, "+
		"hostname: b.example.com}, {name: tcp, port: 443, protocol: TCP}, {name: own, port: 81, protocol: HTTP}") +
		set("c/young", "{name: host, port: 80, protocol: HTTP, hostname: b.example.com}, {name: port, port: 81, protocol: TCP}, "+
			"{name: tls, port: 443, protocol: TLS, hostname: c.example.com, tls: {mode: Passthrough}}") +
		set("d/last", "{name: port, port: 80, protocol: TCP}") +
		set("e/same", "{name: p, port: 90, protocol: TCP}, {name: q, port: 90, protocol: HTTP}, {name: r, port: 91, protocol: HTTP}")
	o := objects(t, openGateway+service("a", "b/a", "c/a")+sets)
	for n, s := range o.Sets {
		s.CreationTimestamp = metav1.NewTime(time.Unix(map[string]int64{"old": 1, "young": 2, "last": 3, "same": 4}[n.Name], 0))
	}
	f := BuildGateway(o, svc.Name{Namespace: "default", Name: "g"}, nil)
	for name, want := range map[string]string{
		"b/old":   "True ListenersNotValid, True Programmed: host HostnameConflict, free NoConflicts, tcp ProtocolConflict, own NoConflicts",
		"c/young": "True ListenersNotValid, True Programmed: host HostnameConflict, port ProtocolConflict, tls NoConflicts",
		"d/last":  "False ListenersNotValid, False ListenersNotValid: port ProtocolConflict",
		"e/same":  "True ListenersNotValid, True Programmed: p ProtocolConflict, q ProtocolConflict, r NoConflicts",
	} {
		ns, n, _ := strings.Cut(name, "/")
		s := f.SetStatus(svc.Name{Namespace: ns, Name: n}, "")
		var listeners []string
		for _, l := range s.Listeners {
			_, reason, _ := strings.Cut(conditionOf(l.Conditions, "Conflicted"), " ")
			listeners = append(listeners, string(l.Name)+" "+reason)
			wants := "True Accepted, True Programmed"
			if reason != "NoConflicts" {
				wants = "False " + reason + ", False " + reason
			}
			if got := conditionOf(l.Conditions, "Accepted") + ", " + conditionOf(l.Conditions, "Programmed"); got != wants {
				t.Errorf("%s: %s is %s, want %s", name, l.Name, got, wants)
			}
		}
		got := conditionOf(s.Conditions, "Accepted") + ", " + conditionOf(s.Conditions, "Programmed") + ": " + strings.Join(listeners, ", ")
		if got != want {
			t.Errorf("%s: %s\nwant %s", name, got, want)
		}
	}
	status := f.Status(nil, "")
	accepted := conditionOf(status.Conditions, "Accepted")
	if n := *status.AttachedListenerSets; n != 3 || accepted != "True Accepted" || len(status.Listeners) != 2 {
		t.Errorf("%d attached, %+v", n, status)
	}
	if got := connect(f.Table, 443, false, "a.example.com"); got != "requests" {
		t.Error(got)
	}
}

// A route attaches to what it names: by a Gateway to no ListenerSet, and by a ListenerSet to no other one, and not to the
// Gateway. Each reference has its own status.
func TestRoutesOfListenerSets(t *testing.T) {
	text := openGateway + service("a", "b/a") + set("b/s", "{name: l, port: 80, protocol: HTTP, hostname: b.example.com}") +
		set("b/other", "{name: l, port: 80, protocol: HTTP, hostname: o.example.com}")
	hosts := []string{"a.example.com", "b.example.com", "o.example.com"}
	for _, c := range []struct{ name, parent, want, status string }{
		{"r", "{name: g}", "[a 404 404]", "True Accepted"},
		{"b/r", "{kind: ListenerSet, name: s}", "[404 a 404]", "True Accepted"},
		{"b/r", "{kind: ListenerSet, name: s, sectionName: http}", "[404 404 404]", "False NoMatchingParent"},
		{"b/r", "{name: g, namespace: default, sectionName: l}", "[404 404 404]", "False NoMatchingParent"},
		{"b/r", "{name: g, namespace: default}", "[404 404 404]", "False NotAllowedByListeners"},
		{"r", "{kind: ListenerSet, name: s, namespace: b}", "[404 404 404]", "False NotAllowedByListeners"},
		{"b/r", "{kind: ListenerSet, name: s}, {name: g, namespace: default}", "[404 a 404]", "True Accepted, False NotAllowedByListeners"},
	} {
		f := builtFrom(t, text+routeTo(c.name, c.parent, "a"))
		var got, status []string
		for _, h := range hosts {
			got = append(got, ask(t, f.Table, "http://"+h+"/"))
		}
		for _, p := range f.Parents(routesOf(f)[0]) {
			status = append(status, conditionOf(p.Conditions, "Accepted"))
		}
		if fmt.Sprint(got) != c.want || strings.Join(status, ", ") != c.status {
			t.Errorf("%s of %s: %v, %v", c.name, c.parent, got, status)
		}
	}
}

// A ListenerSet shows only certificates that it may: of its own namespace, and of the Gateway's by a ReferenceGrant for
// ListenerSets, not by one for Gateways.
func TestCertificatesOfListenerSets(t *testing.T) {
	grant := "\n---\nkind: ReferenceGrant\nmetadata: {name: g, namespace: default}\nspec:\n" +
		"  from: [{group: gateway.networking.k8s.io, kind: %s, namespace: b}]\n  to: [{group: \"\", kind: Secret}]"
	for _, c := range []struct{ ref, grant, want string }{
		{"{name: c, namespace: default}", "ListenerSet", "True ResolvedRefs"},
		{"{name: c, namespace: default}", "Gateway", "False RefNotPermitted"},
		{"{name: c, namespace: default}", "HTTPRoute", "False RefNotPermitted"},
		{"{name: x, namespace: default}", "ListenerSet", "False InvalidCertificateRef"},
		{"{name: c}", "Gateway", "True ResolvedRefs"}, {"{name: x}", "Gateway", "False InvalidCertificateRef"},
		{"{name: c, namespace: third}", "ListenerSet", "False RefNotPermitted"}, {"{name: g, namespace: third}", "", "False RefNotPermitted"},
	} {
		f := builtFrom(t, openGateway+fmt.Sprintf(grant, c.grant)+
			set("b/s", "{name: l, port: 443, protocol: HTTPS, hostname: b.example.com, tls: {certificateRefs: ["+c.ref+"]}}"))
		s := f.SetStatus(svc.Name{Namespace: "b", Name: "s"}, "")
		got := conditionOf(s.Listeners[0].Conditions, "ResolvedRefs")
		served := f.Table.Ports[443].ListenerFor("b.example.com") != nil
		if got != c.want || served != strings.HasPrefix(c.want, "True") {
			t.Errorf("%s by a grant for %s: %s, served %t", c.ref, c.grant, got, served)
		}
		own := "[]"
		if c.ref == "{name: c}" {
			own = "[b/c]"
		}
		if len(f.Granted()) > 0 {
			t.Errorf("%s: nodes need the Service of a grant: %v", c.ref, f.Granted())
		}
		if got := fmt.Sprint(f.SetSecrets(svc.Name{Namespace: "b", Name: "s"})); got != own {
			t.Errorf("%s: nodes need %s of the namespace, want %s", c.ref, got, own)
		}
	}
}

// The listeners of a Gateway are bounded, and the oldest ListenerSets keep theirs; one that does not fit leaves the room to smaller
// ones.
func TestTooManyListeners(t *testing.T) {
	o := objects(t, openGateway)
	for i := range 20 {
		var listeners []string
		for j := range 64 {
			listeners = append(listeners, fmt.Sprintf("{name: l%d, port: %d, protocol: TCP}", j, 1000+64*i+j))
		}
		for n, s := range objects(t, strings.TrimPrefix(set(fmt.Sprintf("b/s%02d", i), strings.Join(listeners, ", ")), "\n---")).Sets {
			o.Sets[n] = s
		}
	}
	f := BuildGateway(o, svc.Name{Namespace: "default", Name: "g"}, nil)
	first, last := f.SetStatus(f.Sets()[0], ""), f.SetStatus(f.Sets()[19], "")
	if got := conditionOf(last.Listeners[0].Conditions, "Accepted"); got != "False TooManyListeners" || len(f.Table.Ports) > maxListeners {
		t.Errorf("%s, %d ports", got, len(f.Table.Ports))
	}
	if got := conditionOf(first.Conditions, "Accepted"); got != "True Accepted" {
		t.Error(got)
	}
	for n, s := range objects(t, strings.TrimPrefix(set("b/z", "{name: l, port: 80, protocol: HTTP}"), "\n---")).Sets {
		o.Sets[n] = s
	}
	f = BuildGateway(o, svc.Name{Namespace: "default", Name: "g"}, nil)
	small := f.SetStatus(svc.Name{Namespace: "b", Name: "z"}, "")
	if got := conditionOf(small.Conditions, "Accepted"); got != "True Accepted" || len(f.listeners) > maxListeners {
		t.Errorf("a small one after one that does not fit is %s; %d listeners are compared", got, len(f.listeners))
	}
}
