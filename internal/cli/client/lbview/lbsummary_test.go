package lbview

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"

	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/explain"
)

func summaryOf(t *testing.T, namespace string, change map[string]string) (*Summary, map[string]int) {
	t.Helper()
	lists := maps.Clone(frontLists)
	maps.Copy(lists, change)
	config, reads := apiOf(t, lists)
	s, err := SummaryOf(t.Context(), kubernetes.NewForConfigOrDie(config), config, namespace)
	if err != nil {
		t.Fatal(err)
	}
	return s, reads
}

const gatewayAPI = "/apis/gateway.networking.k8s.io/v1/"

// standsAt are routes without, or with a foreign, status: their class decides, unless it may not be read.
const standsAt = `
- metadata: {name: ours, namespace: shop}
  spec: {parentRefs: [{name: door}]}
- metadata: {name: foreign, namespace: shop}
  spec: {parentRefs: [{name: theirs}]}
- metadata: {name: written, namespace: shop}
  spec: {parentRefs: [{name: theirs}]}
  status: {parents: [{controllerName: other.example/gateway, parentRef: {name: theirs}, conditions: []}]}
- metadata: {name: none, namespace: shop}
  spec: {parentRefs: [{name: none}]}
- metadata: {name: both, namespace: shop}
  spec: {parentRefs: [{name: theirs}, {name: door}]}
  status: {parents: [{controllerName: fairlead.dev/gateway, parentRef: {name: door}, conditions: [{type: Accepted, status: "True"}]}]}
- metadata: {name: kind, namespace: shop}
  spec: {parentRefs: [{name: x, group: example.com, kind: Router}]}`

const twoGateways = `
- metadata: {name: door, namespace: shop}
  spec: {gatewayClassName: fairlead, listeners: []}
- metadata: {name: theirs, namespace: shop}
  spec: {gatewayClassName: other, listeners: []}`

// A route or an Ingress of another controller is foreign, and what the user may not read makes neither a problem nor a served one.
func TestStandingOfRoutes(t *testing.T) {
	const ingresses, classes = "/apis/networking.k8s.io/v1/ingresses", "/apis/networking.k8s.io/v1/ingressclasses"
	both := map[string]string{gatewayAPI + "httproutes": standsAt, gatewayAPI + "gateways": twoGateways, gatewayAPI + "tcproutes": "[]",
		classes: frontLists[classes][:len(frontLists[classes])-1] + `, {metadata: {name: other}, spec: {controller: other.example/x}}]`,
		ingresses: frontLists[ingresses] + `
- metadata: {name: fine, namespace: shop, uid: i3}
  spec: {ingressClassName: fairlead, rules: [{host: f.example, http: {paths: [
    {path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}}]}}]}
  status: {loadBalancer: {ingress: [{ip: 192.0.2.1}]}}
- metadata: {name: silent, namespace: shop, uid: i4, annotations: {fairlead.dev/front: own}}
  spec: {ingressClassName: fairlead, rules: [{host: s.example, http: {paths: [
    {path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}}]}}]}
- metadata: {name: unclassed, namespace: shop}
  spec: {}
- metadata: {name: lost, namespace: shop}
  spec: {ingressClassName: lost}`}
	with := func(more map[string]string) map[string]string {
		out := maps.Clone(both)
		maps.Copy(out, more)
		return out
	}
	tenant := map[string]string{ingresses: forbidden, "/apis/networking.k8s.io/v1/namespaces/shop/ingresses": both[ingresses],
		"/api/v1/namespaces/shop/services": "[]", "/api/v1/namespaces/shop/events": frontLists["/api/v1/events"],
		gatewayAPI + "namespaces/shop/httproutes": standsAt}
	for name, c := range map[string]struct {
		namespace string
		change    map[string]string
		want      map[string]string // Status: Reason by name
	}{
		"all may be read": {"", both, map[string]string{"ours": "problem: its controller has not looked at it yet",
			"foreign": "foreign: GatewayClass other is of controller other.example/gateway",
			"written": "foreign: controller other.example/gateway serves it", "none": "problem: there is no Gateway shop/none", "both": "served: ",
			"kind": "foreign: no controller has looked at it, and fairlead serves no such parent",
			"tea":  "problem: tls[0]: Secret team/c: it does not exist", "fine": "served: ",
			"books":  "problem: rules[0].http.paths[1].backend: there is no Service shop/none",
			"silent": "problem: its controller has written no address",
			"single": "problem: rules[0].http.paths[0].backend: there is no Service team/none",
			"lost":   "unknown: there is no IngressClass lost", "unclassed": "unknown: it names no class, and no IngressClass is the default"}},
		"no GatewayClasses, no Events": {"", with(map[string]string{gatewayAPI + "gatewayclasses": forbidden, "/api/v1/events": forbidden}),
			map[string]string{"ours": "unknown: you may not list gatewayclasses, and no controller has looked at it",
				"foreign": "unknown: you may not list gatewayclasses, and no controller has looked at it",
				"both":    "unknown: you may not list gatewayclasses", "fine": "served: ",
				"tea": "problem: its controller has written no address"}},
		"no Gateways, no IngressClasses": {"", with(map[string]string{gatewayAPI + "gateways": forbidden, classes: forbidden}),
			map[string]string{"ours": "unknown: you may not list gateways", "none": "unknown: you may not list gateways", "both": "unknown: ",
				"fine": "unknown: you may not list ingressclasses", "tea": "problem: tls[0]: Secret team/c: it does not exist"}},
		"a tenant": {"shop", with(tenant), map[string]string{"fine": "unknown: not all that it leads to may be read: ",
			"lost": "unknown: there is no IngressClass lost"}},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := summaryOf(t, c.namespace, c.change)
			got := map[string]string{}
			for i := range s.Routes {
				r := &s.Routes[i]
				if r.Name == "foreign" && r.Kind == "Ingress" {
					r.Name = "theirs"
				}
				got[r.Name] = string(r.Status) + ": " + r.Reason
				if at := "Service team/single-fairlead-ingress"; name == "all may be read" && slices.Contains(r.Parents, at) != (r.Name == "single") {
					t.Errorf("%s is of %q", r.Name, r.Parents)
				}
			}
			for name, want := range c.want {
				if has, ok := got[name]; !ok || !strings.HasPrefix(has, want) {
					t.Errorf("%s is %q, want %q", name, has, want)
				}
			}
			if theirs := got["theirs"]; name == "all may be read" && theirs != "foreign: IngressClass other is of controller other.example/x" {
				t.Errorf("an Ingress of another class is %q", theirs)
			}
		})
	}
}

// Of many load balancers and routes the page gets the ones with a problem, and how many others there are; nothing is read twice.
func TestSummaryIsCut(t *testing.T) {
	var services, claims, speakers, routes strings.Builder
	for i := range 300 {
		fmt.Fprintf(&services, "- {metadata: {name: s%03d, namespace: shop}, spec: {type: LoadBalancer, ports: [{port: 80}]}, "+
			"status: {loadBalancer: {ingress: [{ip: 192.0.2.%d}]}}}\n", i, i%250)
		fmt.Fprintf(&routes, "- metadata: {name: r%03d, namespace: shop}\n  spec: {parentRefs: [{name: door}]}\n", i)
		if i < 299 {
			routes.WriteString("  status: {parents: [{controllerName: fairlead.dev/gateway, parentRef: {name: door}, conditions: []}]}\n")
		}
	}
	services.WriteString("- {metadata: {name: silent, namespace: shop}, spec: {type: LoadBalancer}, " +
		"status: {loadBalancer: {ingress: [{ip: 198.51.100.1}]}}}\n")
	fmt.Fprint(&claims, "- {metadata: {name: 198.51.100.1, annotations: {fairlead.dev/lb-services: shop/silent}}}\n")
	for i := range 20 {
		fmt.Fprintf(&speakers, "- {metadata: {name: n%02d}, status: {eligible: true, announce: bgp, addressCount: 1, "+
			"addresses: [{address: 192.0.2.9, via: bgp}]}}\n", i)
	}
	fmt.Fprint(&claims, "- {metadata: {name: 192.0.2.9, annotations: {fairlead.dev/lb-services: 'shop/s009,shop/s259'}}}\n")
	s, reads := summaryOf(t, "", map[string]string{"/api/v1/services": services.String(), gatewayAPI + "httproutes": routes.String(),
		gatewayAPI + "tcproutes": "[]", "/apis/networking.k8s.io/v1/ipaddresses": claims.String(),
		"/apis/fairlead.dev/v1/speakers":       speakers.String(),
		"/apis/networking.k8s.io/v1/ingresses": "[]"})
	if len(s.Services) != 200 || s.ServicesLeft != 101 || s.Services[0].Name != "silent" || s.Services[0].Status != explain.HasProblem {
		t.Errorf("%d Services, %d left out, the first is %s: %s", len(s.Services), s.ServicesLeft, s.Services[0].Name, s.Services[0].Status)
	}
	a := s.Services[1].Addresses[0]
	if s.Services[1].Name != "s009" || len(a.Owners) != 8 || a.OwnersLeft != 12 || a.Status != explain.Served {
		t.Errorf("an address of 20 nodes: %+v", s.Services[1])
	}
	if len(s.Routes) != 200 || s.RoutesLeft != 100 || s.Routes[0].Name != "r299" || s.Routes[1].Status != explain.Served {
		t.Errorf("%d routes, %d left out, first %+v", len(s.Routes), s.RoutesLeft, s.Routes[0])
	}
	for at, n := range reads {
		if strings.HasPrefix(at, gatewayAPI) && n != 1 {
			t.Errorf("%s is read %d times", path.Base(at), n)
		}
	}
}

// Without the right to read Speakers, no address is said to be announced by no node, and the command fails.
func TestUnreadSpeakers(t *testing.T) {
	lists := maps.Clone(frontLists)
	lists["/apis/fairlead.dev/v1/speakers"] = forbidden
	lists["/apis/networking.k8s.io/v1/ipaddresses"] = "- {metadata: {name: 192.0.2.1, " +
		"annotations: {fairlead.dev/lb-services: shop/door-fairlead}}}"
	r := reportOf(t, lists)
	if a := r.Services[0].Addresses[0]; a.Status != explain.NotKnown || a.Reason != "which node announces an address is not known" {
		t.Errorf("%+v", a)
	}
	if err := r.unread(); err == nil || !strings.Contains(err.Error(), "which node announces an address is not known") {
		t.Errorf("the error is %v", err)
	}
	if err := reportOf(t, frontLists).unread(); err != nil {
		t.Errorf("with all rights: %v", err)
	}
}
