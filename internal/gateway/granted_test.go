package gateway

import (
	"fmt"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
)

// A listener shows a certificate of another namespace while a ReferenceGrant there permits just that, and the Service of the
// grant opens it to nodes.
func TestGrantedSecrets(t *testing.T) {
	const gateway = "kind: Gateway\nmetadata: {name: g}\nspec:\n  gatewayClassName: fairlead\n  listeners:\n" +
		"  - {name: l, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: c, namespace: b}]}}"
	const secrets = "\n---\nkind: Secret\nmetadata: {name: c, namespace: b}"
	grant := func(name, namespace, kind, of, to string) string {
		return fmt.Sprintf("\n---\nkind: ReferenceGrant\nmetadata: {name: %s, namespace: %s}\nspec:\n"+
			"  from: [{group: gateway.networking.k8s.io, kind: %s, namespace: %s}]\n  to: [%s]", name, namespace, kind, of, to)
	}
	const all, one, other = `{group: "", kind: Secret}`, `{group: "", kind: Secret, name: c}`, `{group: "", kind: Secret, name: d}`
	for what, c := range map[string]struct{ objects, want, granted string }{
		"all":     {secrets + grant("x", "b", "Gateway", "default", all), "True ResolvedRefs", "map[b/x:[Secret b/c]]"},
		"by name": {secrets + grant("x", "b", "Gateway", "default", one), "True ResolvedRefs", "map[b/x:[Secret b/c]]"},
		"the first of two": {
			secrets + grant("z", "b", "Gateway", "default", one) + grant("x", "b", "Gateway", "default", all), "True ResolvedRefs",
			"map[b/x:[Secret b/c]]",
		},
		"another name":      {secrets + grant("x", "b", "Gateway", "default", other), "False RefNotPermitted", "map[]"},
		"another kind":      {secrets + grant("x", "b", "HTTPRoute", "default", all), "False RefNotPermitted", "map[]"},
		"another origin":    {secrets + grant("x", "b", "Gateway", "c", all), "False RefNotPermitted", "map[]"},
		"another namespace": {secrets + grant("x", "default", "Gateway", "default", all), "False RefNotPermitted", "map[]"},
		"Services":          {secrets + grant("x", "b", "Gateway", "default", `{group: "", kind: Service}`), "False RefNotPermitted", "map[]"},
		"no Secret":         {grant("x", "b", "Gateway", "default", all), "False InvalidCertificateRef", "map[]"},
	} {
		f := BuildGateway(objects(t, gateway+c.objects), svc.Name{Namespace: "default", Name: "g"}, nil)
		got := conditionOf(f.Status(nil, "").Listeners[0].Conditions, "ResolvedRefs")
		if granted := fmt.Sprint(f.Granted()); got != c.want || granted != c.granted {
			t.Errorf("%s: %s, granted %s; want %s, %s", what, got, granted, c.want, c.granted)
		}
		if served := f.Table.Ports[443] != nil; served != (c.want == "True ResolvedRefs") {
			t.Errorf("%s: served %t", what, served)
		}
	}
}

// A ReferenceGrant that only a ListenerSet needs concerns neither the Gateway nor other ListenerSets.
func TestGrantsOfAListenerSet(t *testing.T) {
	f := builtFrom(t, openGateway+
		"\n---\nkind: ReferenceGrant\nmetadata: {name: g, namespace: third}\nspec:\n"+
		"  from: [{group: gateway.networking.k8s.io, kind: ListenerSet, namespace: b}]\n  to: [{group: \"\", kind: Secret}]"+
		"\n---\nkind: Secret\nmetadata: {name: c, namespace: third}"+
		set("b/s", "{name: l, port: 443, protocol: HTTPS, hostname: b.example.com, tls: {certificateRefs: [{name: c, namespace: third}]}}")+
		set("b/other", "{name: l, port: 444, protocol: TCP}"))
	for set, want := range map[svc.Name]string{
		{}: "[]", {Namespace: "b", Name: "s"}: "[third/g]", {Namespace: "b", Name: "other"}: "[]",
	} {
		if got := fmt.Sprint(f.GrantsOf(set)); got != want {
			t.Errorf("%s: %s, want %s", set, got, want)
		}
	}
}
