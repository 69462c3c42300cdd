package routes

import (
	"context"
	"fmt"
	"strings"
	"testing"
)

// withHeader is a rule for a prefix with a header field, whose value is an expression if it begins with "~".
func withHeader(path, name, value, backends string) string {
	field := fmt.Sprintf("{name: %s, value: '%s'}", name, value)
	if expression, is := strings.CutPrefix(value, "~"); is {
		field = fmt.Sprintf("{type: RegularExpression, name: %s, value: '%s'}", name, expression)
	}
	return fmt.Sprintf("{matches: [{path: {type: PathPrefix, value: %s}, headers: [%s]}], backendRefs: [%s]}", path, field, backends)
}

const (
	webBackend  = "{name: web, port: 80}"
	cartBackend = "{name: cart, port: 80}"
	noBackend   = "{name: nothing, port: 80}"
)

// Where several matches can be for one request, a plan tells of the requests that one example of each match does not show.
func TestExpressions(t *testing.T) {
	const web, cart, none = webBackend, cartBackend, noBackend
	const rx = `"nginx.ingress.kubernetes.io/use-regex": "true"|`
	const redirecting = rx + "ingressClassName: nginx, tls: [{hosts: [a.example], secretName: cert}], "
	at := func(rules ...string) string { return route("r", strings.Join(rules, ","), "a.example") }
	with := func(rules ...string) string { return gatewayText + "\n---\n" + at(rules...) }
	exact := func(path string) string {
		return "{matches: [{path: {type: Exact, value: " + path + "}}], backendRefs: [" + web + "]}"
	}
	problem := func(rule int) string {
		return fmt.Sprintf("HTTPRoute shop/r at Gateway infra/web: is not served as it asks: BackendNotFound: rules[%d].backendRefs[0]", rule)
	}
	const lost = "no longer served: 500: it has no backend that can be used"
	of := func(path string) string { return "http and https://a.example" + path }
	byZ := strings.Replace(byRegex("/s.*", none), "'/s.*'}", "'/s.*'}, headers: [{name: Z, value: '1'}]", 1)
	for _, c := range []struct {
		name, before, after string
		want                []string
	}{
		{"two rules swap places", with(byRegex("/[ab].*", web), byRegex("/[0b].*", none)), at(byRegex("/[0b].*", none), byRegex("/[ab].*", web)),
			[]string{of("/ (paths matching /[ab].*), as /b: " + lost + " (HTTPRoute shop/r, rules[0]); it went to Service shop/web:80 | CUT"),
				problem(0)}},
		{"two paths of an Ingress swap places",
			ingress("x", rx, "a.example /[ab].* web ImplementationSpecific", "a.example /[0b].* nothing ImplementationSpecific"),
			ingress("x", rx, "a.example /[0b].* nothing ImplementationSpecific", "a.example /[ab].* web ImplementationSpecific"), []string{
				"http://a.example/ (paths matching /[ab].*), as /b: " + lost + " (Ingress shop/x); it went to Service shop/web:80 | CUT",
				"Ingress shop/x: is not served as it asks: rules[0]"}},
		{"two rules swap places that have no request in common", with(byRegex("/a.*", web), byRegex("/b.*", cart)),
			at(byRegex("/b.*", cart), byRegex("/a.*", web)), nil},
		{"two rules with expressions of a header swap places", with(withHeader("/", "x", "~[ab].*", web), withHeader("/", "x", "~[0b].*", none)),
			at(withHeader("/", "x", "~[0b].*", none), withHeader("/", "x", "~[ab].*", web)), []string{
				of("/ with header x matching [0b].*: may change: HTTPRoute shop/r, rules[0] and HTTPRoute shop/r, rules[1] (/): no example was " +
					"found of what it takes | CUT: requests that other matches took may be answered with 500"),
				of("/ with header x matching [ab].*: may change: HTTPRoute shop/r, rules[1] and HTTPRoute shop/r, rules[0] (/): no example was " +
					"found of what it takes | CUT: requests may be answered with 500"), problem(0)}},
		{"a host comes beside a wildcard", ingress("x", rx, "*.example /v[0-9]+ web ImplementationSpecific"),
			ingress("z", rx, "a.example /v[0-5]+ web ImplementationSpecific"), []string{
				"http://a.example/ (paths matching /v[0-9]+), as /v6: no longer served: 404; it went to Service shop/web:80 | CUT"}},
		{"a host goes beside a wildcard", ingress("x", rx, "*.example /v[0-5]+ web ImplementationSpecific") + "\n---\n" +
			ingress("z", rx, "a.example /v[0-9]+ web ImplementationSpecific"),
			"delete " + ingress("z", rx, "a.example /v[0-9]+ web ImplementationSpecific"), []string{
				"http://a.example/ (paths matching /v[0-9]+), as /v6: no longer served: 404; it went to Service shop/web:80 | CUT"}},
		{"behind a redirect to HTTPS",
			ingress("x", redirecting, "a.example /a[0-9a-z]*.* web ImplementationSpecific", "a.example /[ab].* web ImplementationSpecific"),
			ingress("x", redirecting, "a.example /a[0-9a-z]*.* web ImplementationSpecific", "a.example /[ab].* nothing ImplementationSpecific"),
			[]string{"https://a.example/ (paths matching /[ab].*), as /b: " + lost + " (Ingress shop/x); it went to Service shop/web:80 | CUT",
				"Ingress shop/x: is not served as it asks: rules[1]"}},
		{"an encoded character of a prefix", with(to("/a%20b", web)), at(to("/a%20b", web), byRegex("/.*[0-9]", none)), []string{
			of("/ (paths matching /.*[0-9]), as /a%20b/0: " + lost + " (HTTPRoute shop/r, rules[1]); it went to Service shop/web:80 | CUT"),
			problem(1),
			of("/ (paths matching /.*[0-9]): answered with 500: it has no backend that can be used, and not with 404")}},
		{"other characters of a prefix", with(to("'/a[{ä'", web)), at(to("'/a[{ä'", web), byRegex("/.*[0-9|]", none)), []string{
			of("/ (paths matching /.*[0-9|]), as /a[{ä/0: " + lost + " (HTTPRoute shop/r, rules[1]); it went to Service shop/web:80 | CUT"),
			problem(1),
			of("/ (paths matching /.*[0-9|]): answered with 500")}},
		{"a character of an expression", with(byRegex(`/[a\[].*`, web), to("/", cart)), at(byRegex("/a.*", web), to("/", cart)),
			[]string{of(`/ (paths matching /[a\[].*), as /[: goes to Service shop/cart:80 instead of Service shop/web:80`)}},
		{"a line of another path", with(to("/a", web), byRegex("/v[0-9]+", web)), at(byRegex("/v[0-5]+", web)), []string{
			of("/ (paths matching /v[0-9]+), as /v6: no longer served: 404; it went to Service shop/web:80 | CUT"),
			of("/a: no longer served: 404; it went to Service shop/web:80 | CUT")}},
		{"what overlaps is refused", with(byRegex(`/\b[ab]z.*`, web), byRegex("/b.*", none), to("/", cart)),
			at(byRegex("/b.*", none), to("/", cart)), []string{
				of(`/ (paths matching /\b[ab]z.*): may change: HTTPRoute shop/r, former rules[0] and HTTPRoute shop/r, rules[0] ` +
					"(/ (paths matching /b.*)): which paths they share is not known | CUT: requests may be answered with 500"), problem(0),
				of(`/ (paths matching /\b[ab]z.*): goes to Service shop/cart:80 instead of Service shop/web:80`)}},
		{"what is refused has other paths", with(byRegex(`/z\b[ab]z.*`, web), byRegex("/ab.*", none), to("/old", none), to("/", cart)),
			at(byRegex(`/z\b[ab]z.*`, web), byRegex("/ab.*", none), to("/old", none), to("/", cart), to("/q", web), to("/Azz", web)), []string{
				"HTTPRoute shop/r at Gateway infra/web: is still not served",
				of("/Azz: goes to Service shop/web:80 instead of Service shop/cart:80"),
				of("/q: goes to Service shop/web:80 instead of Service shop/cart:80")}},
		{"an expression of a header takes more", with(withHeader("/api", "x", "~a.*", web)),
			at(withHeader("/api", "x", "~(a|b).*", web)), []string{
				of("/api with header x matching (a|b).*: may change: HTTPRoute shop/r, rules[0] and HTTPRoute shop/r, former rules[0] (/api): an "),
				of("/api with header x matching a.*: may change: HTTPRoute shop/r, former rules[0] and HTTPRoute shop/r, rules[0]: an example")}},
		{"a path becomes a prefix beside an expression that cannot be followed", with(exact("/a"), byRegex(`/files/([a-z]|%20)+`, web)),
			at(to("/a", web), byRegex(`/files/([a-z]|%20)+`, web)), []string{of("/a: is served now: goes to Service shop/web:80")}},
		{"fields of two rules", with(withHeader("/s", "k", "1", web)), at(withHeader("/s", "k", "1", web), byZ),
			[]string{of("/ (paths matching /s.*) with header z=1, as /s with header z=1, header k=1: " + lost + " (HTTPRoute shop/r, rules[1]); " +
				"it went to Service shop/web:80 | CUT"), problem(1), of("/ (paths matching /s.*) with header z=1: answered with 500")}},
		{"fields of one rule behind a longer prefix", with(withHeader("/", "k", "1", web)), at(withHeader("/", "k", "1", web), to("/s", none)),
			[]string{of("/ with header k=1, as /s: " + lost + " (HTTPRoute shop/r, rules[1]); it went to Service shop/web:80 | CUT"),
				problem(1),
				of("/s: answered with 500: it has no backend that can be used, and not with 404")}},
		{"a rule before others", with(to("/", web), withHeader("/a", "k", "1", cart)) + "\n---\n" + route("s", to("/", cart), "a.example"),
			at(to("/new", web), to("/", web), withHeader("/a", "k", "1", cart)) + "\n---\n" +
				route("s", to("/x", cart)+","+to("/", cart), "a.example"),
			[]string{of("/x: goes to Service shop/cart:80 instead of Service shop/web:80")}},
	} {
		t.Run(c.name, func(t *testing.T) { check(t, planOf(t, NewWorld(), c.before, c.after), c.want) })
	}
}

// What expressions of a tenant cost is bounded, for a host and for a plan, in what is looked at. Where the bound is reached, a plan says
// that it does not know all. Ports with the same expressions share the paths that a walk has found.
func TestBounds(t *testing.T) {
	hostile := func(host int) string {
		var rules []string
		for i := range 10 {
			rules = append(rules, byRegex(fmt.Sprintf("/(?:.?){300}%d", i), webBackend))
		}
		rules = append(rules, byRegex("/.*[ab].{20}[bc].{20}", webBackend))
		return route(fmt.Sprintf("r%d", host), strings.Join(rules, ","), fmt.Sprintf("x%d.example", host))
	}
	const hosts = 6
	w := NewWorld()
	text := always + gatewayText
	for i := range hosts {
		text += "\n---\n" + hostile(i)
	}
	for _, o := range objects(t, text) {
		w.Put(o)
	}
	plan := func(ctx context.Context, hosts int) (out []string, work int) {
		p := NewPlan(w, began)
		for i := range hosts {
			p.Add(nil, objects(t, route(fmt.Sprintf("z%d", i), to("/x", cartBackend), fmt.Sprintf("x%d.example", i)))[0])
		}
		out = lines(p.Fronts(ctx))
		return out, mostWork - p.work.left
	}
	// A walk notices that it is over the bound after what it looks at for one character.
	const most = mostOfHost + mostInsts
	got, one := plan(t.Context(), 1)
	check(t, got, []string{"http and https://x0.example/x: is served now: goes to Service shop/cart:80",
		"http and https://x0.example/x: may change: HTTPRoute shop/z0, rules[0] and HTTPRoute shop/r0, rules[0] (/ (paths matching " +
			"/(?:.?){300}0)): which paths they share is not known"})
	if one < mostOfHost/2 || one > 2*most {
		t.Errorf("a host takes work of %d, of %d", one, most)
	}
	if got, all := plan(t.Context(), hosts); len(got) != 2*hosts || all > one+hosts*most {
		t.Errorf("%d hosts with the same expressions take work of %d, and one %d:\n%s", hosts, all, one, strings.Join(got, "\n"))
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if _, work := plan(over, 1); work > mostInsts {
		t.Errorf("when the time is over, a plan goes on with work of %d", work)
	}
	// So many states take more than half of what there is for a host: they are not walked through at each port.
	const long = "/[ab]*a[ab]{11}"
	before := gatewayText + "\n---\n" + route("r", byRegex(long, webBackend)+","+byRegex("/q", webBackend), "a.example")
	check(t, planOf(t, NewWorld(), before, route("r", byRegex(long, webBackend)+","+byRegex("/[q]", webBackend), "a.example")), nil)
}

// The patterns that have all hosts of a pattern are found by its labels.
func TestWider(t *testing.T) {
	for host, want := range map[string]string{"": "[]", "x": "[x ]", "a.b.c": "[a.b.c *.b.c *.c ]", "*.b.c": "[*.b.c *.c ]", "*.c": "[*.c ]"} {
		var got []string
		for wide := range wider(host) {
			got = append(got, wide)
		}
		if fmt.Sprint(got) != want {
			t.Errorf("%q: %q, want %s", host, got, want)
		}
	}
}
