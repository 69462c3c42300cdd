// Package loops finds redirects by which a front sends clients back to where they came from. It is pure.
package loops

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/svc"
)

// maxHops is how many redirects clients follow, one after the other (as Chrome and Firefox do).
const maxHops = 20

// request is one that a chain of redirects begins with. It is a gateway.Fields.
type request struct {
	hosts   []string // patterns that are known to lead to the front, beside the host of the request
	method  string
	headers map[string]string
	query   url.Values
}

// Header returns the value of a field.
func (r *request) Header(name string) (value string, ok bool) {
	value, ok = r.headers[name]
	return value, ok
}

// Cookie returns none.
func (r *request) Cookie(string) (value string, ok bool) { return "", false }

// Query returns the first value of a parameter.
func (r *request) Query(name string) (value string, ok bool) {
	return r.query.Get(name), r.query.Has(name)
}

// place is where a request goes.
type place struct {
	port       *gateway.Port
	host, path string
}

func (p *place) scheme() string {
	if p.port.TLS {
		return "https"
	}
	return "http"
}

func (p *place) String() string {
	return p.scheme() + "://" + p.host + ":" + strconv.Itoa(int(p.port.Number)) + p.path
}

// follow returns a place that a request from a place comes to twice, or that it comes to after too many redirects, "" if there is none.
// first reports whether the rule that takes it at the beginning is meant.
func (r *request) follow(t *gateway.Table, at place, first func(*gateway.Rule) bool) string {
	seen := map[string]bool{}
	query := r.query.Encode()
	for range maxHops + 1 {
		key := at.String() + "?" + query
		if seen[key] {
			return at.String()
		}
		seen[key] = true
		rule, prefix := r.rule(&at)
		if rule == nil || first != nil && !first(rule) {
			return ""
		}
		first = nil
		d := rule.Redirect
		if rule.HTTPS && !at.port.TLS {
			d = &filter.Redirect{Scheme: "https", Status: http.StatusPermanentRedirect}
		}
		if d == nil || rule.Closed {
			return ""
		}
		to, err := url.Parse(d.Location(at.scheme(), at.host, at.port.Number, at.path, query, prefix))
		if err != nil || !r.leads(t, &at, to) {
			return ""
		}
		query = to.RawQuery
	}
	return at.String()
}

// rule returns the rule that takes the request at a place, and the prefix that it was found by.
func (r *request) rule(at *place) (rule *gateway.Rule, prefix string) {
	if l := at.port.ListenerFor(at.host); l == nil || l.Mode != gateway.Requests {
		return nil, ""
	}
	rule, prefix, _ = at.port.Find(&gateway.Request{Host: at.host, Path: at.path, Method: r.method, Fields: r})
	return rule, prefix
}

// leads changes a place to where a redirect leads. It reports false if that is not known to be of the front.
func (r *request) leads(t *gateway.Table, at *place, to *url.URL) bool {
	number := map[string]uint16{"http": 80, "https": 443}[to.Scheme]
	if text := to.Port(); text != "" {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil {
			return false
		}
		number = uint16(n)
	}
	port, host := t.Ports[number], hostpath.Host(to.Host)
	path, ok := hostpath.Path(to.EscapedPath())
	if port == nil || !ok || port.TLS != (to.Scheme == "https") {
		return false
	}
	if host != at.host && !slices.ContainsFunc(r.hosts, func(p string) bool { return covers(p, host) }) &&
		!slices.ContainsFunc(port.Listeners, func(l *gateway.Listener) bool { return covers(l.Host, host) }) {
		return false
	}
	*at = place{port, host, path}
	return true
}

// covers reports whether a pattern names a host.
func covers(pattern, host string) bool {
	_, ok := hostpath.Intersect(pattern, host)
	return ok && pattern != ""
}

// hostOf returns a host of a pattern.
func hostOf(pattern string) string {
	if pattern == "" {
		return "any.invalid"
	}
	return strings.Replace(pattern, "*", "any", 1)
}

// each calls f with each port that takes requests.
func each(t *gateway.Table, f func(*gateway.Port) string) string {
	var numbers []int
	for n, p := range t.Ports {
		if p.TLS || !p.Streams {
			numbers = append(numbers, int(n))
		}
	}
	slices.Sort(numbers)
	for _, n := range numbers {
		if out := f(t.Ports[uint16(n)]); out != "" { //nolint:gosec // from the table
			return out
		}
	}
	return ""
}

// OfRoute returns a place to which the redirects of an HTTPRoute and of the other routes of a front send clients back, "" for none. Matches
// by regular expressions are passed over, and hosts that only DNS could lead back to the front.
func OfRoute(t *gateway.Table, r *gwv1.HTTPRoute) string {
	var hosts []string
	for _, h := range r.Spec.Hostnames {
		hosts = append(hosts, strings.ToLower(string(h)))
	}
	for i := range r.Spec.Rules {
		rule := &r.Spec.Rules[i]
		if !slices.ContainsFunc(rule.Filters, func(f gwv1.HTTPRouteFilter) bool { return f.Type == gwv1.HTTPRouteFilterRequestRedirect }) {
			continue
		}
		mine := func(found *gateway.Rule) bool {
			return found.Index == i && found.Route.Kind == string(kinds.HTTPRoute) && found.Route.Name == svc.NameOf(r)
		}
		matches := rule.Matches
		if len(matches) == 0 {
			matches = []gwv1.HTTPRouteMatch{{}}
		}
		for k := range matches {
			from, path, ok := requestOf(&matches[k], hosts)
			if !ok {
				continue
			}
			if out := each(t, func(p *gateway.Port) string { return from.at(t, p, path, mine) }); out != "" {
				return fmt.Sprintf("rules[%d]: the redirect sends clients back to %s", i, out)
			}
		}
	}
	return ""
}

// at follows a request for a path from each host of a port that it can be for.
func (r *request) at(t *gateway.Table, p *gateway.Port, path string, mine func(*gateway.Rule) bool) string {
	hosts := r.hosts
	if len(hosts) == 0 {
		hosts = []string{""}
	}
	for _, l := range p.Listeners {
		for _, h := range hosts {
			if pattern, ok := hostpath.Intersect(l.Host, h); ok {
				if out := r.follow(t, place{p, hostOf(pattern), path}, mine); out != "" {
					return out
				}
			}
		}
	}
	return ""
}

// requestOf returns a request that a match takes. ok is false if it has a regular expression.
func requestOf(m *gwv1.HTTPRouteMatch, hosts []string) (r *request, path string, ok bool) {
	r, path = &request{hosts: hosts, method: http.MethodGet, headers: map[string]string{}, query: url.Values{}}, "/"
	if m.Path != nil {
		if m.Path.Type != nil && *m.Path.Type == gwv1.PathMatchRegularExpression {
			return nil, "", false
		}
		if m.Path.Value != nil {
			path = *m.Path.Value
		}
	}
	if m.Method != nil {
		r.method = string(*m.Method)
	}
	for _, h := range m.Headers {
		if h.Type != nil && *h.Type == gwv1.HeaderMatchRegularExpression {
			return nil, "", false
		}
		r.headers[strings.ToLower(string(h.Name))] = h.Value
	}
	for _, q := range m.QueryParams {
		if q.Type != nil && *q.Type == gwv1.QueryParamMatchRegularExpression {
			return nil, "", false
		}
		r.query.Set(string(q.Name), q.Value)
	}
	path, ok = hostpath.Path(path)
	return r, path, ok
}

// OfIngress is OfRoute for an Ingress. Paths that are expressions are passed over.
func OfIngress(t *gateway.Table, in *networkingv1.Ingress) string {
	mine := func(found *gateway.Rule) bool {
		return found.Route.Kind == "Ingress" && found.Route.Name == svc.NameOf(in)
	}
	for i := range in.Spec.Rules {
		rule := &in.Spec.Rules[i]
		if rule.HTTP == nil {
			continue
		}
		from := &request{hosts: []string{strings.ToLower(rule.Host)}, method: http.MethodGet}
		for k := range rule.HTTP.Paths {
			path, ok := hostpath.Path("/" + strings.TrimPrefix(rule.HTTP.Paths[k].Path, "/"))
			if !ok {
				continue
			}
			out := each(t, func(p *gateway.Port) string {
				return from.follow(t, place{p, hostOf(strings.ToLower(rule.Host)), path}, mine)
			})
			if out != "" {
				return fmt.Sprintf("rules[%d].http.paths[%d]: the redirect sends clients back to %s", i, k, out)
			}
		}
	}
	return ""
}
