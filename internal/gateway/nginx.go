package gateway

import (
	"cmp"
	"fmt"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/svc"
)

// annotatedIngress is an Ingress with what its annotations for ingress-nginx ask for.
type annotatedIngress struct {
	*networkingv1.Ingress
	*nginx.Options
	https nginx.HTTPS
	made  *madeIngress
	// maintained is one for all paths: a page may be long.
	maintained *policy.Maintenance
	// doubt is why its value is probably meant otherwise, "" if it is not.
	doubt string
}

// maxIgnored bounds the text about annotations without effect, in bytes: an Event has 1,024.
const maxIgnored = 900

// read reads the annotations of an Ingress.
func (b *ingressBuilder) read(in *networkingv1.Ingress) *annotatedIngress {
	made := b.before.made[in]
	if made == nil {
		made = &madeIngress{options: nginx.Read(in.Annotations)}
	}
	b.front.made[in] = made
	o := made.options
	a := &annotatedIngress{Ingress: in, Options: o, made: made, https: o.HTTPS(b.objects.Secured[svc.NameOf(in)])}
	wrong, ignored := "", o.Ignored
	a.maintained, wrong = policy.ReadMaintenanceOf(in.Annotations[svc.MaintenanceAnnotation], o.Canary != nil)
	if text := "annotation " + svc.MaintenanceAnnotation + ": " + wrong; wrong != "" && a.maintained == nil {
		ignored = append([]string{text}, ignored...)
	} else if wrong != "" {
		a.doubt = text
	}
	if closed := o.Problem(); closed != "" {
		b.problem(in, "%s", closed)
	}
	if text := strings.Join(ignored, "; "); text != "" {
		b.front.Ignored[svc.NameOf(in)] = strings.ToValidUTF8(text[:min(len(text), maxIgnored)], "")
	}
	for i := range in.Spec.Rules {
		if a.expressions() {
			b.expressed[svc.Name{Namespace: in.Namespace, Name: strings.ToLower(in.Spec.Rules[i].Host)}] = true
		}
	}
	return a
}

// expressions reports whether paths are regular expressions.
func (a *annotatedIngress) expressions() bool { return a.UseRegex || a.RewriteTarget != "" }

// protocol returns the protocol of a backend with an appProtocol.
func (a *annotatedIngress) protocol(app string) (BackendProtocol, bool) {
	switch a.Backend {
	case nginx.Backend{TLS: true}:
		return HTTPS, true
	case nginx.Backend{TLS: true, GRPC: true}:
		return H2, true
	case nginx.Backend{GRPC: true}:
		return H2C, true
	}
	return backendProtocol(app, false)
}

// apply gives a rule what does not depend on its path.
func (b *ingressBuilder) apply(a *annotatedIngress, r *Rule) {
	if r.Closed = a.Closed != ""; r.Closed {
		return
	}
	r.https = a.https
	r.Maintenance = a.maintained
	r.Timeout, r.Body, r.Any = a.Timeout, a.Body, a.Any
	if len(a.Allow)+len(a.Deny) > 0 {
		r.Access = &filter.Access{Allow: a.Allow, Deny: a.Deny}
	}
	if a.PerSecond+a.PerMinute+a.AtATime > 0 {
		r.Limits = filter.NewLimits(a.PerSecond, a.PerMinute, a.Burst, a.AtATime, a.Unlimited)
	}
	if d := a.Redirect; d != nil {
		r.Redirect = &filter.Redirect{To: d.URL, Status: d.Status}
	}
	b.protect(a, r)
	if text, has := a.Annotations[dialect.LBCompress]; has {
		var err error
		if r.Compress, err = dialect.ReadEncodings(text); err != nil {
			b.problem(a.Ingress, "annotation %s: %s; it has no effect", dialect.LBCompress, err)
		}
	}
	r.Filters.Rewrite.Host = a.BackendHost
	if a.ForwardedPrefix != "" {
		r.Filters.Request.Set = []filter.Field{{Name: "X-Forwarded-Prefix", Value: a.ForwardedPrefix}}
	}
	r.Session = a.Session
	if a.CORS != nil {
		wrong := ""
		if r.CORS, wrong = filter.ReadCORS(a.CORS); wrong != "" {
			b.problem(a.Ingress, "annotations %scors-*: %s; pages of other origins get nothing", nginx.Prefix, wrong)
			r.CORS = &filter.CORS{}
		}
	}
	if a.Retry != nil {
		wrong := ""
		if r.Retry, wrong = policy.ReadRetry(a.Retry, a.RetryWithin); wrong != "" {
			b.problem(a.Ingress, "annotations %sproxy-next-upstream*: %s", nginx.Prefix, wrong)
		}
	}
}

// protect gives a rule who may send requests.
func (b *ingressBuilder) protect(a *annotatedIngress, r *Rule) {
	if a.Auth != nil {
		b.auth(a, r)
	}
	if a.Basic != nil {
		b.basic(a, r)
	}
}

// annotate gives the rule of a match what depends on its path.
func (b *ingressBuilder) annotate(a *annotatedIngress, m *match) {
	const challenges = "/.well-known/acme-challenge" // whoever orders a certificate has none yet; so in ingress-nginx
	r := m.Rule
	if strings.HasPrefix(m.path, challenges) {
		r.https = nginx.NeverHTTPS
	}
	target := a.RewriteTarget
	if target == "" || r.Closed || m.kind == lastMatch || target == m.path { // so in ingress-nginx, for / to /
		return
	}
	r.Filters.Rewrite.Path = &filter.PathChange{Whole: true, To: target, Groups: m.regex}
	if m.regex == nil {
		r.Filters.Rewrite.Path.Groups = filter.Anything // there are no groups
	}
}

// expressionMatch returns the match of a path that is a regular expression. One that cannot be used closes the paths that begin with
// the text before its first special character: a less specific rule must not get their requests.
func (b *ingressBuilder) expressionMatch(a *annotatedIngress, host, text, at string) *match {
	key, compile := "path ", filter.CompilePrefix
	if !a.expressions() { // it protects, beside the expressions of another Ingress
		key, compile = "either ", filter.CompileEither
	}
	re, wrong := b.front.regexes.Add(host, key+text, text, compile)
	if wrong == "" {
		return &match{kind: regexMatch, path: text, regex: re}
	}
	return b.closed(a, text, filter.Literal(text), at, wrong)
}

// closed returns the match of a path that cannot be used, which closes the paths that begin with a part of it.
func (b *ingressBuilder) closed(a *annotatedIngress, text, literal, at, wrong string) *match {
	b.problem(a.Ingress, "%s.path: %s; requests for paths that begin with %.100q are answered with 503", at, wrong, literal)
	return &match{kind: regexMatch, path: text, regex: filter.Beginning(literal), Rule: &Rule{Route: keyOf(a.Ingress), Closed: true}}
}

// addHosts adds what annotations ask for beside the paths of an Ingress, after all Ingresses have theirs.
func (b *ingressBuilder) addHosts(a *annotatedIngress) {
	if len(a.Aliases) == 0 && !a.WWW && a.AppRoot == "" {
		return
	}
	aliases := a.Aliases
	for i := range a.Spec.Rules {
		host := strings.ToLower(a.Spec.Rules[i].Host)
		if b.owners[host] != a.Namespace {
			continue
		}
		if a.AppRoot != "" {
			b.appRoot(a, host, &a.Spec.Rules[i])
		}
		if a.WWW && host != "" && host[0] != '*' {
			b.www(a, host)
		}
		for _, alias := range aliases {
			if b.free(a, "server-alias", alias) {
				b.rules[alias], b.shut[alias] = slices.Clone(b.rules[host]), b.shut[alias] || b.shut[host]
				b.asked[alias] = b.asked[alias] || b.asksTLS(host) // never in clear text what the host has only in HTTPS
				if s := cmp.Or(b.secrets[alias], b.secrets[host], b.secrets[hostpath.Wide(host)]); s.Namespace == a.Namespace {
					b.secrets[alias] = s
				}
			}
		}
		aliases = nil // they are for the first host
	}
}

// free reports whether a further host is for no other Ingress. It takes the host.
func (b *ingressBuilder) free(a *annotatedIngress, annotation, host string) bool {
	if b.owns(a.Ingress, host) && b.rules[host] == nil {
		return true
	}
	b.problem(a.Ingress, "annotation %s%s: host %q belongs to another Ingress", nginx.Prefix, annotation, host)
	return false
}

// appRoot sends requests for / to another path.
func (b *ingressBuilder) appRoot(a *annotatedIngress, host string, rule *networkingv1.IngressRule) {
	root := func(p networkingv1.HTTPIngressPath) bool { return p.Path == "/" || p.Path == "" }
	if a.Closed != "" || rule.HTTP == nil || !slices.ContainsFunc(rule.HTTP.Paths, root) {
		return
	}
	r := &Rule{Route: keyOf(a.Ingress), Index: -1} // before an exact path of the Ingress
	b.apply(a, r)
	r.Redirect = &filter.Redirect{To: a.AppRoot, Status: http.StatusFound}
	b.rules[host] = append(b.rules[host], &match{Rule: r, kind: exactMatch, path: "/"})
}

// www sends requests for a host with www. to the one without, or the other way round.
func (b *ingressBuilder) www(a *annotatedIngress, host string) {
	other, with := strings.CutPrefix(host, "www.")
	if !with {
		other = "www." + host
	}
	if !b.free(a, "from-to-www-redirect", other) {
		return
	}
	r := &Rule{
		Route: keyOf(a.Ingress), Closed: a.Closed != "",
		Redirect: &filter.Redirect{Host: host, Status: http.StatusPermanentRedirect},
	}
	b.rules[other] = []*match{{Rule: r, kind: prefixMatch}}
}

// canary adds an alternative to the backends of other Ingresses of its namespace.
func (b *ingressBuilder) canary(a *annotatedIngress) {
	taken := false
	for i := range a.Spec.Rules {
		spec := &a.Spec.Rules[i]
		host := strings.ToLower(spec.Host)
		if b.owners[host] != a.Namespace || spec.HTTP == nil {
			continue
		}
		for j := range spec.HTTP.Paths {
			at := fmt.Sprintf("rules[%d].http.paths[%d]", i, j)
			for k, m := range b.rules[host] {
				if m.Rule.Route.Kind != kindIngress || m.kind == lastMatch || !samePath(m, &spec.HTTP.Paths[j]) {
					continue
				}
				taken = true
				rule, own := *m.Rule, *m // the other Ingress keeps its own
				rule.Backends, own.Rule, own.toHTTPS = slices.Clone(rule.Backends), &rule, nil
				b.rules[host][k] = &own
				b.addCanary(a, host, &own, &spec.HTTP.Paths[j].Backend, at+".backend")
				break
			}
		}
	}
	if !taken {
		b.problem(a.Ingress, "annotation %scanary: no other Ingress of the namespace has a host and a path of it", nginx.Prefix)
	}
}

// samePath reports whether a match was made from a path.
func samePath(m *match, p *networkingv1.HTTPIngressPath) bool {
	exact := valueOf(p.PathType, networkingv1.PathTypeImplementationSpecific) == networkingv1.PathTypeExact
	if exact != (m.kind == exactMatch) || m.Rule.Index < 0 {
		return false
	}
	if m.kind == regexMatch && m.regex != nil {
		return m.path == p.Path
	}
	path, ok := hostpath.Path(p.Path)
	if m.kind == prefixMatch {
		path = strings.TrimSuffix(path, "/")
	}
	return ok && m.path == path
}

// addCanary adds an alternative to the backend of a match.
func (b *ingressBuilder) addCanary(a *annotatedIngress, host string, m *match, backend *networkingv1.IngressBackend, at string) {
	main, c := m.Rule, a.Canary
	if a.Closed != "" || main.Closed || main.Redirect != nil {
		return
	}
	if len(main.Backends) != 1 || slices.ContainsFunc(b.rules[host], func(o *match) bool { return o.of == m }) {
		b.problem(a.Ingress, "%s: another Ingress is the canary of this path already", at)
		return
	}
	var own Rule
	b.protect(a, &own)
	if own.Auth != nil && !reflect.DeepEqual(own.Auth, main.Auth) || own.Basic != nil && !reflect.DeepEqual(own.Basic, main.Basic) {
		b.problem(a.Ingress, "annotations %sauth-*: the other Ingress of this path has not the same; the canary gets no requests", nginx.Prefix)
		return
	}
	w := Weighted{Weight: 1}
	if w.Backend, w.Valid = b.resolve(a, backend, at); !w.Valid {
		return
	}
	b.target(main, &w)
	always := func(to Weighted, header, cookie *filter.Match) {
		rule, further := *main, *m
		rule.Backends, rule.total = []Weighted{to}, 1
		if further.Rule, further.cookie, further.of = &rule, cookie, m; header != nil {
			further.headers = []filter.Match{*header}
		}
		b.rules[host] = append(b.rules[host], &further)
	}
	switch {
	case c.Header == "":
	case c.Value != "":
		always(w, &filter.Match{Name: c.Header, Value: c.Value}, nil)
	case c.Pattern != "":
		re, wrong := b.front.regexes.Add(host, "value "+c.Pattern, c.Pattern, func(text string) (*regexp.Regexp, string) {
			return filter.CompileRegex(`(?s:.*)(?:` + text + `)(?s:.*)`)
		})
		if wrong != "" {
			b.problem(a.Ingress, "annotation %scanary-by-header-pattern: %s", nginx.Prefix, wrong)
			return
		}
		always(w, &filter.Match{Name: c.Header, Regex: re}, nil)
	default:
		always(w, &filter.Match{Name: c.Header, Value: "always"}, nil)
		always(main.Backends[0], &filter.Match{Name: c.Header, Value: "never"}, nil)
	}
	if c.Cookie != "" {
		always(w, nil, &filter.Match{Name: c.Cookie, Value: "always"})
		always(main.Backends[0], nil, &filter.Match{Name: c.Cookie, Value: "never"})
	}
	if c.Weight > 0 {
		main.Backends[0].Weight, w.Weight = uint32(c.Total-c.Weight), uint32(c.Weight) //nolint:gosec // bounded
		main.Backends, main.total = append(main.Backends, w), uint64(c.Total)          //nolint:gosec // bounded
	}
}

// closeHosts closes the hosts whose protection is not served, for each Ingress.
func (b *ingressBuilder) closeHosts() {
	for host, matches := range b.rules {
		for i := 0; b.shut[host] && i < len(matches); i++ {
			with := *matches[i]
			with.Rule = &Rule{Route: with.Rule.Route, Index: with.Rule.Index, Closed: true}
			matches[i] = &with
		}
	}
}

// asksTLS reports whether TLS is asked for at a host.
func (b *ingressBuilder) asksTLS(host string) bool {
	wide := hostpath.Wide(host)
	return b.asked[host] || wide != "" && b.asked[wide] && b.owners[wide] == b.owners[host]
}

// redirectToHTTPS has the rules that ask for it sent to HTTPS, at the hosts where that holds.
func (b *ingressBuilder) redirectToHTTPS() {
	for host, matches := range b.rules {
		asked := b.asksTLS(host)
		for i, m := range matches {
			if when := m.Rule.https; when == nginx.NeverHTTPS || when == nginx.AskedHTTPS && !asked || m.Rule.Closed {
				continue
			}
			if m.toHTTPS == nil {
				rule, with := *m.Rule, *m
				rule.HTTPS, with.Rule = true, &rule
				m.toHTTPS = &with
			}
			matches[i] = m.toHTTPS
		}
	}
}
