package proxied

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/basic"
	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/lb/proxied/authz"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/pages"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/svc"
)

// router is the Router of a port of a front. It does not change.
type router struct {
	port    *gateway.Port
	targets map[gateway.Target]*Config
	key     string // of the front
	users   map[basic.Source]*basic.Users
	usage   *usage
	// sessions are those of the rules that have had requests: *pods.Sessions by *gateway.Rule.
	sessions sync.Map
	counts   traffic.Routes
}

// routeName names the route of a rule in metrics.
func routeName(rule *gateway.Rule) traffic.RouteName {
	return traffic.RouteName{Kind: rule.Route.Kind, Name: rule.Route.Name}
}

// RetryLater is a refusal with a status, which asks the client to try again in a second.
func RetryLater(status int) *Reply {
	return &Reply{Status: status, Fields: []http1.Field{{Name: []byte("Retry-After"), Value: []byte("1")}}}
}

// reply returns an answer of the load balancer's own, and why, for whoever traces the request.
func reply(status int, why string) Route { return Route{Reply: &Reply{Status: status}, why: why} }

// Why requests are answered here.
const (
	badPath    = "the path of the request is not valid"
	unreadPods = "the endpoints of the backend have not been read yet"
)

// Route returns where a request goes.
func (o *router) Route(r *http1.Request, from Origin) Route {
	target := string(r.Target)
	path, query, asked := strings.Cut(target, "?")
	canonical, ok := hostpath.Path(path)
	if !ok {
		return reply(http.StatusBadRequest, badPath)
	}
	host := hostpath.Host(string(r.Host))
	if from.Secure && !o.port.Admits(host, hostpath.Host(from.ServerName)) {
		return reply(http.StatusMisdirectedRequest, "the host of the request is of another listener than the name that the client gave in TLS")
	}
	rule, prefix, verdict := o.port.Find(&gateway.Request{
		Host: host, Path: canonical, Method: string(r.Method), Fields: &head{r: r, query: query},
	})
	switch verdict {
	case gateway.NoRoute:
		return reply(http.StatusNotFound, noRoute(o.port, host))
	case gateway.Disputed:
		return reply(http.StatusBadRequest, "programs read the path in two ways, for which there are different rules")
	case gateway.Routed:
	}
	origin := ""
	if rule.CORS != nil {
		origin, _ = (&head{r: r}).Header("origin")
	}
	out := o.answer(rule, r, host, canonical, query, prefix, origin, from)
	if out.Reply == nil {
		if asked {
			query = "?" + query
		}
		out = o.lead(rule, r, path, canonical, query, prefix, origin, from)
	}
	if rule.Route.Kind != "" { // else it stands for paths that no rule looks at
		out.rule = rule
		out.Count = o.counts.Of(rule, routeName(rule))
	}
	if rule.CORS != nil {
		out.Refusal = func(answer *Reply) {
			if m := rule.CORS.Answer(origin); !answer.asked {
				answer.Fields = modify(answer.Fields, &m)
			}
		}
	}
	return out
}

// noRoute tells why no rule has taken a request.
func noRoute(p *gateway.Port, host string) string {
	if p.ListenerFor(host) == nil {
		return "no listener of this port has the host of the request"
	}
	return "no rule of a route matches the request"
}

// loginWhy tells why a client may not pass by its password.
func loginWhy(status int) string {
	if status == http.StatusUnauthorized {
		return "the route asks for a name and a password, and the request has none that are right"
	}
	return "the passwords of the route cannot be verified now: its Secret has none, or there are too many tries"
}

// lead returns where a request goes whose path was path, and is canonical now. query has its "?".
func (o *router) lead(rule *gateway.Rule, r *http1.Request, path, canonical, query, prefix, origin string, from Origin) Route {
	out := o.protect(rule, r, canonical+query, from)
	if out.Reply != nil {
		return out
	}
	w, session := o.pick(rule, r)
	if w == nil || !w.Valid && !rule.Spared(w) {
		return reply(rule.Refusal(), "no backendRef of the rule is valid, or has a weight above 0")
	}
	at := rule.Target(w)
	if !w.Valid {
		at = *rule.Spare
	}
	to := o.targets[at]
	if to == nil {
		return reply(http.StatusServiceUnavailable, unreadPods)
	}
	if spare := o.spare(rule, w, to); spare != nil {
		to, session, out.Spare = spare, nil, true
		cause := causeOf(rule, w, path+query)
		cause.Tell(r, http.StatusServiceUnavailable)
	} else if rule.Errors != nil {
		if out.Paged = o.targets[*rule.Pages]; out.Paged != nil {
			out.Pages = pages.For(rule.Errors, r, causeOf(rule, w, path+query),
				w.Backend.Protocol == gateway.H2C || w.Backend.Protocol == gateway.H2)
		}
	}
	changed := rule.Filters.Rewrite.Path.Apply(canonical, prefix)
	if changed == "" {
		return reply(http.StatusBadRequest, "the rewritten path is not valid")
	}
	if changed != path {
		r.Target = []byte(changed + query)
	}
	if h := rule.Filters.Rewrite.Host; h != "" {
		r.Host = []byte(h)
	}
	for _, m := range []*filter.Modifier{&rule.Filters.Request, &w.Filters.Request} {
		r.Fields = modify(r.Fields, m)
	}
	if out.Compress = rule.Compress; rule.Route.Kind == string(kinds.GRPCRoute) {
		text, _ := (&head{r: r}).Header("grpc-timeout")
		if d := policy.Deadline(text); d > 0 {
			out.Deadline = time.Now().Add(d)
		}
	}
	out.To, out.Mirrors, out.Retry, out.Session, out.Body = to, o.mirrors(rule, w), rule.Retry, session, rule.Body
	if !rule.Filters.Response.Empty() || !w.Filters.Response.Empty() || rule.CORS != nil {
		out.Edit = func(answer *http1.Response) {
			answer.Fields = modify(answer.Fields, &w.Filters.Response)
			if rule.CORS != nil {
				m := rule.CORS.Answer(origin)
				answer.Fields = modify(answer.Fields, &m)
			}
			answer.Fields = modify(answer.Fields, &rule.Filters.Response)
		}
	}
	if most := rule.Limits.AtATimeFor(from.Client.Addr()); most > 0 {
		if out.Done = o.usage.hold(from.Client.Addr(), rule.Route.Name, most); out.Done == nil {
			return Route{Reply: RetryLater(http.StatusTooManyRequests), why: "the client has too many requests at a time for the route"}
		}
	}
	return out
}

// spare returns what answers in place of a backend that cannot be used or has no endpoints, nil if it has some, or nothing answers for
// it.
func (o *router) spare(rule *gateway.Rule, w *gateway.Weighted, to *Config) *Config {
	if rule.Spare == nil || w.Valid && !to.Pool.Empty() {
		return nil
	}
	return o.targets[*rule.Spare]
}

// causeOf is why a default backend is asked.
func causeOf(rule *gateway.Rule, w *gateway.Weighted, uri string) pages.Cause {
	return pages.Cause{URI: uri, Ingress: rule.Route.Name, Service: w.Backend.Name, Port: w.Backend.Port}
}

// protect begins a route with what a rule protects its backends by: a reply for who has no right name and password, and a question about
// the others. uri is the path of the request, in the form that rules are compared with, and its query.
func (o *router) protect(rule *gateway.Rule, r *http1.Request, uri string, from Origin) (out Route) {
	if rule.Any && rule.Access.Names(from.Client.Addr()) {
		return out
	}
	var no *Reply // for who may pass in another way
	if rule.Any && !rule.Access.Admits(from.Client.Addr()) {
		no = &Reply{Status: http.StatusForbidden}
	}
	if rule.Basic != nil {
		ask := o.login(rule, r, from)
		switch {
		case ask == nil && rule.Any:
			return out
		case ask != nil && (!rule.Any || ask.Status != http.StatusUnauthorized):
			return Route{Reply: ask, why: loginWhy(ask.Status)}
		case ask != nil:
			no = ask // it tells the client what it can do, and 403 does not
		}
	}
	if rule.Auth == nil {
		out.Reply = no
		if no != nil {
			out.why = "neither its address nor a password lets the client pass"
		}
		return out
	}
	if out.Asked = o.targets[rule.Asked()]; out.Asked == nil {
		return reply(http.StatusServiceUnavailable, "the authorization server has no Service, or its endpoints have not been read yet")
	}
	out.Ask = authz.Ask(&rule.Auth.Auth, r, from.Client.Addr(), from.Secure, uri)
	if no != nil && no.Status == http.StatusUnauthorized {
		out.Ask.Instead = &authz.Refusal{Status: no.Status, Fields: no.Fields}
	}
	return out
}

// answer returns the reply to a request that goes to no backend, without one for the others. origin is that of the page, "" without one
// or without CORS.
func (o *router) answer(rule *gateway.Rule, r *http1.Request, host, path, query, prefix, origin string, from Origin) Route {
	switch {
	case rule.Closed:
		return reply(http.StatusServiceUnavailable, "what protects the rule cannot be done: see the status of the route")
	case rule.HTTPS && !from.Secure:
		out := redirect(&filter.Redirect{Scheme: "https", Status: http.StatusPermanentRedirect}, host, path, query, prefix, from)
		out.why = "the route sends clients without TLS to https"
		return out
	case !rule.Any && !rule.Access.Admits(from.Client.Addr()):
		return reply(http.StatusForbidden, "the route does not admit the address of the client")
	case !o.usage.allowsBy(from.Client.Addr(), rule.Route.Name, rule.Limits.For(from.Client.Addr())):
		return Route{Reply: RetryLater(http.StatusTooManyRequests), why: "the client sends more requests than the limits of the route allow"}
	}
	if origin != "" && string(r.Method) == http.MethodOptions {
		fields := head{r: r}
		if method, asks := fields.Header("access-control-request-method"); asks {
			headers, _ := fields.Header("access-control-request-headers")
			return preflight(rule.CORS, origin, method, headers)
		}
	}
	if m := rule.Maintenance; m != nil {
		return Route{Reply: maintained(m, r), why: "the route is in maintenance: annotation " + svc.MaintenanceAnnotation}
	}
	if d := rule.Redirect; d != nil {
		return redirect(d, host, path, query, prefix, from)
	}
	return Route{}
}

// pick returns the backend of a request: that of its session, or one by the weights.
func (o *router) pick(rule *gateway.Rule, r *http1.Request) (*gateway.Weighted, *pods.Session) {
	if rule.Session == nil {
		return rule.Pick(rand.Uint64()), nil
	}
	all := o.sessionsOf(rule)
	name, header := all.Source()
	token := ""
	if header {
		fields := head{r: r}
		token, _ = fields.Header(strings.ToLower(name))
	} else {
		token = pods.CookieIn(http1.ValuesOf(r.Fields, http1.Cookie), name)
	}
	session, at := all.Read(token, time.Now())
	if at < 0 || !rule.Backends[at].Valid {
		w := rule.Pick(rand.Uint64())
		if at = slices.IndexFunc(rule.Backends, func(b gateway.Weighted) bool { return w != nil && b.Backend == w.Backend }); at < 0 {
			return nil, nil
		}
		session.Use(at)
		return w, session
	}
	session.Use(at)
	return &rule.Backends[at], session
}

// sessionsOf returns the sessions of a rule.
func (o *router) sessionsOf(rule *gateway.Rule) *pods.Sessions {
	if all, ok := o.sessions.Load(rule); ok {
		return all.(*pods.Sessions)
	}
	var backends []string
	for i := range rule.Backends {
		b := &rule.Backends[i].Backend
		backends = append(backends, fmt.Sprintf("%s:%d", b.Name, b.Port))
	}
	scope := fmt.Sprintf("%s %s %d", rule.Route.Kind, rule.Route.Name, rule.Index)
	all, _ := o.sessions.LoadOrStore(rule, pods.NewSessions(rule.Session, o.key, scope, backends))
	return all.(*pods.Sessions)
}

// mirrors returns what gets copies of a request.
func (o *router) mirrors(rule *gateway.Rule, w *gateway.Weighted) (out []*Config) {
	for _, list := range [...][]gateway.Mirror{rule.Filters.Mirrors, w.Filters.Mirrors} {
		for i := range list {
			if m := o.targets[rule.Mirror(&list[i])]; m != nil && list[i].Takes(rand.Uint64()) {
				out = append(out, m)
			}
		}
	}
	return out
}

// preflight answers a browser's question whether a page of another origin may send a request.
func preflight(c *filter.CORS, origin, method, headers string) Route {
	status, fields := c.Preflight(origin, method, headers)
	r := &Reply{Status: status, asked: true}
	for _, f := range fields {
		r.Fields = append(r.Fields, http1.Field{Name: []byte(f.Name), Value: []byte(f.Value)})
	}
	return Route{Reply: r, why: "the question of a browser (CORS) is answered here"}
}

// redirect answers with another place, at the port by which the client came unless that is changed.
func redirect(d *filter.Redirect, host, path, query, prefix string, from Origin) Route {
	scheme := "http"
	if from.Secure {
		scheme = "https"
	}
	to := d.Location(scheme, host, from.At.Port(), path, query, prefix)
	return Route{
		Reply: &Reply{Status: d.Status, Fields: []http1.Field{{Name: []byte("Location"), Value: []byte(to)}}},
		why:   "the rule has a redirect",
	}
}

// modify changes fields as a modifier asks for.
func modify(fields []http1.Field, m *filter.Modifier) []http1.Field {
	if m.Empty() {
		return fields
	}
	remove := func(name string) {
		kept := fields[:0]
		for _, f := range fields {
			if !bytes.EqualFold(f.Name, []byte(name)) {
				kept = append(kept, f)
			}
		}
		fields = kept
	}
	for _, name := range m.Remove {
		remove(name)
	}
	for _, f := range m.Set {
		remove(f.Name)
		fields = append(fields, http1.Field{Name: []byte(f.Name), Value: []byte(f.Value)})
	}
	for _, f := range m.Add {
		fields = append(fields, http1.Field{Name: []byte(f.Name), Value: []byte(f.Value)})
	}
	return fields
}

// head is the head of a request as rules look at it.
type head struct {
	r      *http1.Request
	query  string
	parsed bool
	// values are the first values of the parameters, once one has been asked for.
	values map[string]string
}

// Header returns the value of a field; several are joined by commas.
func (h *head) Header(name string) (value string, ok bool) {
	if name == "host" {
		return string(h.r.Host), true
	}
	var all []string
	for i := range h.r.Fields {
		if f := &h.r.Fields[i]; bytes.EqualFold(f.Name, []byte(name)) {
			all = append(all, string(f.Value))
		}
	}
	return strings.Join(all, ","), len(all) > 0
}

// Cookie returns the value of the first cookie of a name.
func (h *head) Cookie(name string) (value string, ok bool) {
	value = pods.CookieIn(http1.ValuesOf(h.r.Fields, http1.Cookie), name)
	return value, value != ""
}

// Query returns the first value of a parameter.
func (h *head) Query(name string) (value string, ok bool) {
	if !h.parsed {
		h.parsed, h.values = true, map[string]string{}
		for part := range strings.SplitSeq(h.query, "&") {
			key, v, _ := strings.Cut(part, "=")
			key, err := url.QueryUnescape(key)
			v, err2 := url.QueryUnescape(v)
			if _, has := h.values[key]; err == nil && err2 == nil && !has {
				h.values[key] = v
			}
		}
	}
	value, ok = h.values[name]
	return value, ok
}
