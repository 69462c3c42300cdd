package gateway

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/svc"
)

// compiled is a route as a table has it. Its rules do not depend on the Gateways that it attaches to.
type compiled struct {
	from    requests
	hosts   []string // "" for all
	matches []*match
	// invalid is the first invalid field of the rules, and wholly reports whether all rules are invalid. A rule that is invalid answers
	// with its Refusal, so that no other rule takes its requests.
	invalid string
	wholly  bool
	// unresolved is the first reference that leads to no backend.
	reason     gwv1.RouteConditionReason
	unresolved string
	targets    []Target // each once: most rules of a route lead to the same one
	// skipped is true if no listener takes the route: its expressions are not compiled. program is the size of the others.
	skipped bool
	program int
	// inside is true if the clients are within the cluster.
	inside bool
	// maintained is what clients get in place of all backends, nil if they get these, and unusual what is wrong with the value.
	maintained *policy.Maintenance
	unusual    string
}

// compileRoute reads the rules of a route. admitted reports whether a listener takes it, and inside whether its clients are
// within the cluster.
func compileRoute(o *Objects, r requests, admitted, inside bool) *compiled {
	c := &compiled{from: r, reason: gwv1.RouteReasonResolvedRefs, skipped: !admitted, inside: inside, hosts: hostpath.All(r.Hostnames())}
	c.maintained, c.unusual = policy.ReadMaintenance(r.Object().GetAnnotations()[svc.MaintenanceAnnotation])
	valid, rules := 0, r.Rules()
	for i := range rules {
		b := &ruleCompiler{objects: o, route: c, at: fmt.Sprintf("rules[%d]", i), spec: &rules[i]}
		if b.compile(i) {
			valid++
		}
	}
	c.wholly = valid == 0 && len(rules) > 0
	return c
}

// leadsTo adds a target.
func (c *compiled) leadsTo(t Target) {
	if !slices.Contains(c.targets, t) {
		c.targets = append(c.targets, t)
	}
}

// maxRoutePrograms is the size of the programs of all regular expressions of a route, in instructions.
const maxRoutePrograms = 10_000

// ruleCompiler reads a rule.
type ruleCompiler struct {
	objects *Objects
	route   *compiled
	at      string
	spec    *gwv1.HTTPRouteRule
	invalid bool
}

// fail records an invalid field. Only the first message is kept.
func (b *ruleCompiler) fail(format string, args ...any) {
	b.invalid = true
	if b.route.invalid == "" {
		b.route.invalid = b.at + fmt.Sprintf(format, args...)
	}
}

// compile adds the matches of the rule to the route. It reports whether all of the rule is served.
func (b *ruleCompiler) compile(index int) bool {
	rule := &Rule{Index: index, Route: b.route.from.Age(), Maintenance: b.route.maintained}
	within := b.timeouts(rule)
	rule.Filters, rule.Redirect = b.filters(rule, b.spec.Filters, ".filters", true)
	for i := range b.spec.Filters {
		if f := &b.spec.Filters[i]; f.Type == gwv1.HTTPRouteFilterCORS && f.CORS != nil {
			rule.CORS = read(b, filter.ReadCORS, f.CORS, fmt.Sprintf(".filters[%d].cors", i))
		} else if f.Type == gwv1.HTTPRouteFilterExternalAuth && f.ExternalAuth != nil {
			b.auth(rule, f.ExternalAuth, fmt.Sprintf(".filters[%d].externalAuth", i))
		}
	}
	if b.spec.Retry != nil {
		wrong := ""
		if rule.Retry, wrong = policy.ReadRetry(b.spec.Retry, within); wrong != "" {
			b.fail(".retry.%s", wrong)
		}
	}
	b.session(rule)
	for i := range b.spec.BackendRefs {
		b.backend(rule, i)
	}
	matches := b.matchesOf(rule, index)
	if b.invalid { // no request may pass without what the rule asks for
		rule.Filters, rule.Redirect, rule.CORS, rule.Backends, rule.total = Filters{}, nil, nil, nil, 0
		rule.Retry, rule.Session, rule.Auth = nil, nil, nil
	}
	b.route.matches = append(b.route.matches, matches...)
	return !b.invalid
}

// session reads the session persistence of the rule.
func (b *ruleCompiler) session(rule *Rule) {
	if b.spec.SessionPersistence == nil {
		return
	}
	s, wrong := policy.ReadSession(b.spec.SessionPersistence)
	if wrong == "" && s.Header && s.Name != "" && !filter.ValidField(s.Name, "x") {
		wrong = "sessionName: want the name of a field that belongs to no connection"
	}
	if rule.Session = s; wrong != "" {
		b.fail(".sessionPersistence.%s", wrong)
	}
}

// timeouts reads the timeouts of the rule. It returns that of a whole request, 0 without one.
func (b *ruleCompiler) timeouts(rule *Rule) (request time.Duration) {
	t := b.spec.Timeouts
	if t == nil {
		return 0
	}
	read := func(field string, d *gwv1.Duration) time.Duration {
		if d == nil {
			return 0
		}
		v, err := time.ParseDuration(string(*d))
		if err != nil || v < 0 {
			b.fail(".timeouts.%s: want a duration as 10s or 1m30s", field)
		}
		return cmp.Or(v, policy.NoTimeout)
	}
	request = read("request", t.Request)
	rule.Timeout = request
	if v := read("backendRequest", t.BackendRequest); rule.Timeout <= 0 && v != 0 || v > 0 && v < rule.Timeout {
		rule.Timeout = v
	}
	return max(request, 0)
}

// matchesOf returns the matches of the rule, of the kind of its route.
func (b *ruleCompiler) matchesOf(rule *Rule, index int) []*match {
	if r := b.route.from.GRPC; r != nil {
		return b.calls(rule, r.Spec.Rules[index].Matches)
	}
	return b.matches(rule)
}

// matches returns the matches of the rule.
func (b *ruleCompiler) matches(rule *Rule) (out []*match) {
	if len(b.spec.Matches) == 0 {
		return []*match{{Rule: rule, kind: prefixMatch}}
	}
	for i := range b.spec.Matches {
		m := &match{Rule: rule, kind: prefixMatch, order: i}
		spec, at := &b.spec.Matches[i], fmt.Sprintf(".matches[%d]", i)
		ok := b.path(m, spec.Path, at+".path")
		m.method = string(valueOf(spec.Method, ""))
		for j, h := range spec.Headers {
			regex := valueOf(h.Type, gwv1.HeaderMatchExact) == gwv1.HeaderMatchRegularExpression
			b.value(&m.headers, strings.ToLower(string(h.Name)), h.Value, regex, fmt.Sprintf("%s.headers[%d]", at, j))
		}
		for j, q := range spec.QueryParams {
			regex := valueOf(q.Type, gwv1.QueryParamMatchExact) == gwv1.QueryParamMatchRegularExpression
			b.value(&m.queries, string(q.Name), q.Value, regex, fmt.Sprintf("%s.queryParams[%d]", at, j))
		}
		if ok {
			out = append(out, m)
		}
	}
	return out
}

// path reads the path of a match. It reports false for one that takes no path.
func (b *ruleCompiler) path(m *match, spec *gwv1.HTTPPathMatch, at string) bool {
	if spec == nil {
		return true
	}
	value := valueOf(spec.Value, "/")
	switch valueOf(spec.Type, gwv1.PathMatchPathPrefix) {
	case gwv1.PathMatchRegularExpression:
		m.kind, m.path, m.regex = regexMatch, value, b.regex(value, at)
		return m.regex != nil
	case gwv1.PathMatchExact:
		m.kind = exactMatch
	case gwv1.PathMatchPathPrefix:
		m.kind = prefixMatch
	default:
		b.fail("%s.type: want Exact, PathPrefix or RegularExpression", at)
		return false
	}
	path, ok := hostpath.Path(value)
	if !ok {
		b.fail("%s.value: %.100q is no path that all servers read alike", at, value)
		return false
	}
	if m.path = path; m.kind == prefixMatch {
		m.path = strings.TrimSuffix(path, "/")
	}
	return true
}

// value adds a match of a header field or of a parameter. Of several with the same name the first counts. With an invalid
// expression it takes every value: the rule answers with its Refusal, rather than that one asks for less.
func (b *ruleCompiler) value(to *[]filter.Match, name, value string, regex bool, at string) {
	if slices.ContainsFunc(*to, func(v filter.Match) bool { return v.Name == name }) {
		return
	}
	v := filter.Match{Name: name, Value: value}
	if regex {
		v.Regex = cmp.Or(b.regex(value, at), filter.Anything)
	}
	*to = append(*to, v)
}

// regex compiles an expression within the bounds of its route, nil if it is not valid.
func (b *ruleCompiler) regex(text, at string) *regexp.Regexp {
	if b.route.skipped {
		return filter.Anything
	}
	const together = "the regular expressions of the route are too complex together"
	size, wrong := 0, together
	if b.route.program <= maxRoutePrograms {
		if size, wrong = filter.RegexSize(text); wrong == "" && b.route.program+size > maxRoutePrograms {
			wrong = together
		}
		b.route.program += min(size, filter.MaxProgram)
	}
	if wrong != "" {
		b.fail("%s: %s", at, wrong)
		return nil
	}
	re, wrong := filter.CompileRegex(text)
	if wrong != "" {
		b.fail("%s: %s", at, wrong)
	}
	return re
}

// backend adds a backend of the rule.
func (b *ruleCompiler) backend(rule *Rule, i int) {
	ref, at := &b.spec.BackendRefs[i], fmt.Sprintf(".backendRefs[%d]", i)
	w := Weighted{Weight: uint32(max(0, valueOf(ref.Weight, 1)))} //nolint:gosec // the definition of the kind bounds it
	var redirect *filter.Redirect
	if w.Filters, redirect = b.filters(rule, ref.Filters, at+".filters", false); redirect != nil {
		b.fail("%s.filters: a redirect has no backend", at)
	}
	w.Backend, w.Valid = b.resolve(&ref.BackendObjectReference, at, protocolOf(b.route.from))
	if w.Valid {
		b.route.leadsTo(rule.Target(&w))
	}
	rule.Backends = append(rule.Backends, w)
	rule.total += uint64(w.Weight)
}

// resolve returns the backend that a reference leads to.
func (b *ruleCompiler) resolve(ref *gwv1.BackendObjectReference, at string, protocol BackendProtocol) (out Backend, ok bool) {
	out, reason, wrong := b.objects.resolve(b.route.from.Kind(), b.route.from.Name().Namespace, ref, protocol)
	told := wrong
	if b.route.inside && out.Policy != (svc.Name{}) { // the meshes leave such a backend out
		reason = gwv1.RouteReasonUnsupportedProtocol
		told = fmt.Sprintf("Service %s has a BackendTLSPolicy, and none counts for routes at a Service: it gets no requests", out.Name)
	}
	if told != "" && b.route.unresolved == "" {
		b.route.reason, b.route.unresolved = reason, b.at+at+": "+told
	}
	out.Local = wrong == "" && b.route.inside && b.objects.Services[out.Name].Local
	return out, wrong == ""
}

// resolve returns the backend that a reference of a route leads to, or why there is none. protocol is HTTP1 for an HTTPRoute, where
// the port of the Service decides, and H2C for a GRPCRoute.
func (o *Objects) resolve(kind gwv1.Kind, namespace string, ref *gwv1.BackendObjectReference, protocol BackendProtocol) (
	out Backend, reason gwv1.RouteConditionReason, wrong string,
) {
	miss := func(reason gwv1.RouteConditionReason, format string, args ...any) (Backend, gwv1.RouteConditionReason, string) {
		return Backend{}, reason, fmt.Sprintf(format, args...)
	}
	name := svc.Name{Namespace: string(valueOf(ref.Namespace, gwv1.Namespace(namespace))), Name: string(ref.Name)}
	if group, kind := valueOf(ref.Group, ""), valueOf(ref.Kind, "Service"); group != "" || kind != "Service" {
		return miss(gwv1.RouteReasonInvalidKind, "objects of kind %s are no backends; want a Service", kind)
	}
	if !o.Grants.Permit(kinds.From(kind, namespace), "Service", name) {
		return miss(gwv1.RouteReasonRefNotPermitted, "no ReferenceGrant of namespace %s permits it", name.Namespace)
	}
	service := o.Services[name]
	switch {
	case service == nil:
		return miss(gwv1.RouteReasonBackendNotFound, "there is no Service %s", name)
	case service.External:
		return miss(gwv1.RouteReasonInvalidKind, "Service %s is of type ExternalName, which could name any address", name)
	case ref.Port == nil:
		return miss(gwv1.RouteReasonBackendNotFound, "port is missing")
	}
	port := service.Find(*ref.Port, protocol == UDP)
	if port == nil {
		transport := map[bool]string{true: "UDP", false: "TCP"}[protocol == UDP]
		return miss(gwv1.RouteReasonBackendNotFound, "Service %s has no port %d of %s", name, *ref.Port, transport)
	}
	var policy svc.Name
	if protocol != UDP && kind != kinds.TCPRoute {
		policy = o.Policies.At(name).For(port.Name)
	}
	if protocol == HTTP1 || protocol == H2C {
		of, ok := backendProtocol(port.Protocol, policy != svc.Name{})
		if of == H2C {
			protocol = H2C
		}
		if !ok || protocol == H2C && (port.Protocol == "kubernetes.io/ws" || port.Protocol == "kubernetes.io/wss") {
			return miss(gwv1.RouteReasonUnsupportedProtocol, "Service %s: appProtocol %.100s is not served", name, port.Protocol)
		}
	}
	return Backend{Name: name, Port: port.Number, PortName: port.Name, Protocol: protocol, Policy: policy}, gwv1.RouteReasonResolvedRefs, ""
}

// backendProtocol returns what an appProtocol asks for (KEP-3726). One with TLS needs a BackendTLSPolicy: nothing else tells whom to
// trust.
func backendProtocol(app string, secure bool) (p BackendProtocol, ok bool) {
	switch app {
	case "kubernetes.io/h2c", "grpc":
		return H2C, true
	case "https", "kubernetes.io/wss", "tls":
		return HTTP1, secure
	}
	return HTTP1, true
}

// read reads one filter of a rule.
func read[S, F any](b *ruleCompiler, with func(S) (F, string), spec S, at string) F {
	f, wrong := with(spec)
	if wrong != "" {
		b.fail("%s.%s", at, wrong)
	}
	return f
}

// filters reads the filters of a rule, or of one of its backends, which cannot have all of them.
func (b *ruleCompiler) filters(rule *Rule, specs []gwv1.HTTPRouteFilter, at string, rules bool) (f Filters, redirect *filter.Redirect) {
	for i := range specs {
		spec, at := &specs[i], fmt.Sprintf("%s[%d]", at, i)
		switch {
		case spec.Type == gwv1.HTTPRouteFilterRequestHeaderModifier && spec.RequestHeaderModifier != nil:
			f.Request = read(b, filter.ReadModifier, spec.RequestHeaderModifier, at+".requestHeaderModifier")
		case spec.Type == gwv1.HTTPRouteFilterResponseHeaderModifier && spec.ResponseHeaderModifier != nil:
			f.Response = read(b, filter.ReadModifier, spec.ResponseHeaderModifier, at+".responseHeaderModifier")
		case spec.Type == gwv1.HTTPRouteFilterRequestRedirect && spec.RequestRedirect != nil && rules:
			redirect = read(b, filter.ReadRedirect, spec.RequestRedirect, at+".requestRedirect")
		case spec.Type == gwv1.HTTPRouteFilterCORS && spec.CORS != nil && rules: // see compile
		case spec.Type == gwv1.HTTPRouteFilterExternalAuth && spec.ExternalAuth != nil && rules: // likewise
		case spec.Type == gwv1.HTTPRouteFilterRequestMirror && spec.RequestMirror != nil:
			if m, ok := b.mirror(spec.RequestMirror, at+".requestMirror"); ok {
				b.route.leadsTo(rule.Mirror(&m))
				f.Mirrors = append(f.Mirrors, m)
			}
		case spec.Type == gwv1.HTTPRouteFilterURLRewrite && spec.URLRewrite != nil && rules:
			f.Rewrite = read(b, filter.ReadRewrite, spec.URLRewrite, at+".urlRewrite")
		default:
			b.fail("%s.type: filter %s is not served here", at, spec.Type)
		}
	}
	return f, redirect
}
