package lbview

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
)

// hostsOf returns hostnames as text.
func hostsOf(list []gwv1.Hostname) (out []string) {
	for _, h := range list {
		out = append(out, string(h))
	}
	return out
}

func routeOf(kind gwv1.Kind, o metav1.Object, hosts []gwv1.Hostname) lbRoute {
	return lbRoute{Kind: string(kind), Namespace: o.GetNamespace(), Name: o.GetName(), Hosts: hostsOf(hosts), Leads: []lbLead{}}
}

// requestsOf reads an HTTPRoute.
func requestsOf(r *gwv1.HTTPRoute) lbRouteObject {
	out := lbRouteObject{
		shown:   routeOf(kinds.HTTPRoute, r, r.Spec.Hostnames),
		parents: r.Spec.ParentRefs, status: r.Status.Parents,
	}
	out.leads = func() (leads []lbLead) {
		for i := range r.Spec.Rules {
			rule := &r.Spec.Rules[i]
			var matches []string
			for k := range rule.Matches {
				matches = append(matches, matchText(&rule.Matches[k]))
			}
			leads = append(leads, lbLead{strings.Join(matches, " or "), ruleTarget(r.Namespace, rule)})
		}
		return leads
	}
	return out
}

// callsOf reads a GRPCRoute.
func callsOf(r *gwv1.GRPCRoute) lbRouteObject {
	out := lbRouteObject{
		shown:   routeOf(kinds.GRPCRoute, r, r.Spec.Hostnames),
		parents: r.Spec.ParentRefs, status: r.Status.Parents,
	}
	out.leads = func() (leads []lbLead) {
		rules := kinds.RulesOfGRPC(r)
		for i := range rules {
			var matches []string
			for _, m := range r.Spec.Rules[i].Matches {
				text := "every method"
				if m.Method != nil {
					text = "/" + valueOf(m.Method.Service, "*") + "/" + valueOf(m.Method.Method, "*")
				}
				matches = append(matches, text+headersText(len(m.Headers), 0))
			}
			leads = append(leads, lbLead{strings.Join(matches, " or "), ruleTarget(r.Namespace, &rules[i])})
		}
		return leads
	}
	return out
}

// streamOf reads a route of connections or of datagrams.
func streamOf(s *kinds.Stream) lbRouteObject {
	n := s.Route()
	return lbRouteObject{
		shown:   lbRoute{Kind: string(n.Kind), Namespace: n.Namespace, Name: n.Name.Name, Hosts: hostsOf(s.Hostnames), Leads: []lbLead{}},
		parents: s.Parents, status: s.Status,
		leads: func() []lbLead {
			var to []string
			for i := range s.Backends {
				to = append(to, backendText(n.Namespace, &s.Backends[i], len(s.Backends) > 1))
			}
			return []lbLead{{To: cmp.Or(strings.Join(to, ", "), "no backend")}}
		},
	}
}

// ingressOf reads an Ingress.
func ingressOf(in *networkingv1.Ingress) lbRoute {
	out := lbRoute{Kind: "Ingress", Namespace: in.Namespace, Name: in.Name, Leads: []lbLead{}}
	to := func(b *networkingv1.IngressBackend) string {
		switch {
		case b.Service != nil && b.Service.Port.Name != "":
			return fmt.Sprintf("%s/%s:%s", in.Namespace, b.Service.Name, b.Service.Port.Name)
		case b.Service != nil:
			return fmt.Sprintf("%s/%s:%d", in.Namespace, b.Service.Name, b.Service.Port.Number)
		case b.Resource != nil:
			return b.Resource.Kind + " " + b.Resource.Name
		}
		return "no backend"
	}
	for i := range in.Spec.Rules {
		r := &in.Spec.Rules[i]
		if r.Host != "" {
			out.Hosts = append(out.Hosts, r.Host)
		}
		if r.HTTP == nil {
			continue
		}
		for k := range r.HTTP.Paths {
			p := &r.HTTP.Paths[k]
			kind := ""
			if p.PathType != nil && *p.PathType == networkingv1.PathTypeExact {
				kind = "= "
			}
			out.Leads = append(out.Leads, lbLead{r.Host + " " + kind + cmp.Or(p.Path, "/"), to(&p.Backend)})
		}
	}
	if in.Spec.DefaultBackend != nil {
		out.Leads = append(out.Leads, lbLead{"default", to(in.Spec.DefaultBackend)})
	}
	return out
}

func valueOf[T any](p *T, or T) T {
	if p == nil {
		return or
	}
	return *p
}

// matchText returns a match of an HTTPRoute.
func matchText(m *gwv1.HTTPRouteMatch) string {
	path := "/"
	if m.Path != nil {
		path = valueOf(m.Path.Value, "/")
		switch valueOf(m.Path.Type, gwv1.PathMatchPathPrefix) {
		case gwv1.PathMatchExact:
			path = "= " + path
		case gwv1.PathMatchRegularExpression:
			path = "~ " + path
		case gwv1.PathMatchPathPrefix:
		}
	}
	if m.Method != nil {
		path = string(*m.Method) + " " + path
	}
	return path + headersText(len(m.Headers), len(m.QueryParams))
}

// headersText is the note at a match that asks for more.
func headersText(headers, queries int) (out string) {
	if headers > 0 {
		out += fmt.Sprintf(" with %d header fields", headers)
	}
	if queries > 0 {
		out += fmt.Sprintf(" with %d query parameters", queries)
	}
	return out
}

// ruleTarget returns where a rule leads.
func ruleTarget(namespace string, r *gwv1.HTTPRouteRule) string {
	for i := range r.Filters {
		if d := r.Filters[i].RequestRedirect; d != nil {
			return fmt.Sprintf("redirect %d", valueOf(d.StatusCode, 302))
		}
	}
	var out []string
	for i := range r.BackendRefs {
		out = append(out, backendText(namespace, &r.BackendRefs[i].BackendRef, len(r.BackendRefs) > 1))
	}
	return cmp.Or(strings.Join(out, ", "), "no backend")
}

// backendText returns a backend, with its weight if there are several.
func backendText(namespace string, b *gwv1.BackendRef, several bool) string {
	out := string(valueOf(b.Namespace, gwv1.Namespace(namespace))) + "/" + string(b.Name)
	if b.Port != nil {
		out += fmt.Sprintf(":%d", *b.Port)
	}
	if b.Kind != nil && *b.Kind != "Service" {
		out = string(*b.Kind) + " " + out
	}
	if several {
		out += fmt.Sprintf(" (weight %d)", valueOf(b.Weight, 1))
	}
	return out
}

// maxRows is how many routes of a front the report about all Services has.
const maxRows = 50

// print writes the listeners and at most so many routes, first the ones with a problem. rules adds where each match leads.
func (f *lbFront) print(out io.Writer, service string, most int, rules bool) error {
	if f == nil {
		return nil
	}
	what := f.Kind
	if f.Name != "" {
		what += " " + f.Name
	}
	fmt.Fprintf(out, "\n%s is the front of %s\n", service, map[bool]string{true: what, false: "all Ingresses"}[f.Name != ""])
	if f.Problem != "" {
		fmt.Fprintf(out, "  not served as it asks: %s\n", f.Problem)
	}
	w := tabwriter.NewWriter(out, 0, 4, 3, ' ', 0)
	if len(f.Listeners) > 0 {
		fmt.Fprintln(w, "  LISTENER\tPORT\tPROTOCOL\tHOST\tROUTES\tPROBLEM")
	}
	for i := range f.Listeners {
		l := &f.Listeners[i]
		fmt.Fprintf(w, "  %s\t%d\t%s\t%s\t%d\t%s\n", base.PlainLine(l.name()), l.Port, l.Protocol, cmp.Or(l.Host, "*"), l.Routes,
			cmp.Or(l.Problem, "-"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	w = tabwriter.NewWriter(out, 0, 4, 3, ' ', 0)
	shown := f.first(most)
	if len(shown) > 0 {
		fmt.Fprintln(w, "  ROUTE\tLISTENERS\tHOSTS\tLEADS TO\tPROBLEM")
	}
	for _, r := range shown {
		fmt.Fprintf(w, "  %s %s/%s\t%s\t%s\t%s\t%s\n", r.Kind, r.Namespace, r.Name, cmp.Or(strings.Join(r.Listeners, ","), "-"),
			cmp.Or(base.PlainLine(strings.Join(r.Hosts, ",")), "*"), base.PlainLine(r.targets()), cmp.Or(r.Problem, "-"))
		for _, l := range r.Leads {
			if rules {
				fmt.Fprintf(w, "    %s\t\t\t%s\t\n", base.PlainLine(cmp.Or(l.Match, "everything")), base.PlainLine(l.To))
			}
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if more := len(f.Routes) - len(shown); more > 0 {
		fmt.Fprintf(out, "  and %d more routes: fairlead lb status %s\n", more, service)
	}
	return nil
}

// routes returns the routes of a front, none of nil.
func (f *lbFront) routes() []lbRoute {
	if f == nil {
		return nil
	}
	return f.Routes
}

// first returns at most so many routes, the ones with a problem before the others.
func (f *lbFront) first(most int) (out []lbRoute) {
	for _, wrong := range []bool{true, false} {
		for _, r := range f.Routes {
			if (r.Problem != "") == wrong && len(out) < most {
				out = append(out, r)
			}
		}
	}
	return out
}

// targets returns where the rules lead, each once.
func (r *lbRoute) targets() string {
	var out []string
	seen := map[string]bool{}
	for _, l := range r.Leads {
		if !seen[l.To] {
			seen[l.To] = true
			out = append(out, l.To)
		}
	}
	return cmp.Or(strings.Join(out, ", "), "-")
}
