package gateway

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/svc"
)

// Request is a request as rules see it. Host and Path are canonical.
type Request struct {
	Host, Path, Method string
	Fields             Fields
}

// Fields are the parts of a request that only some rules need.
type Fields interface {
	// Header returns the value of a field, whose name is in lower case; several are joined by commas.
	Header(name string) (value string, ok bool)
	// Cookie returns the value of the first cookie of a name.
	Cookie(name string) (value string, ok bool)
	// Query returns the first value of a parameter of the query.
	Query(name string) (value string, ok bool)
}

// Table is the route table of a front.
type Table struct {
	Ports map[uint16]*Port
	// Datagrams are the ports of UDP.
	Datagrams map[uint16]*Port
	// Subjects is true if a port asks clients for certificates, or would if it were open: backends get their subjects, and at no port
	// what a client itself says about it.
	Subjects bool
}

// Port is a port of a front.
type Port struct {
	Number uint16
	// TLS is true if clients begin with TLS.
	TLS bool
	// Streams is true if a listener takes whole connections, or datagrams (Connection).
	Streams   bool
	Listeners []*Listener
	// Clients is how certificates of clients of HTTPS are verified, nil if none is asked for.
	Clients *Clients
	hosts   *hostpath.Index[*Listener]
}

// Listener is the part of a port that is for some hosts.
type Listener struct {
	Name string
	// Host is the pattern of its hosts, "" for all.
	Host string
	// Certificates are the Secrets of HTTPS; the first is for clients that name no host that another one is for.
	Certificates []svc.Name
	Mode         ListenerMode
	hosts        *hostpath.Index[*paths]
	streams      *hostpath.Index[*Rule]
	// onlyBest is true if rules of a less specific host are no fallback (Ingress).
	onlyBest bool
}

// ListenerMode is what happens to the connections of a listener.
type ListenerMode int

// The modes.
const (
	Requests    ListenerMode = iota // each request is routed
	Passthrough                     // a connection is routed as it is; also datagrams
	Terminated                      // a connection is routed after its TLS has ended here
)

// Connection returns the listener for a connection that begins with a name of TLS, "" for one without, and the rule that takes it.
// Either is nil if there is none.
func (p *Port) Connection(name string) (l *Listener, rule *Rule) {
	if l = p.ListenerFor(name); l != nil && l.streams != nil {
		rule, _ = l.streams.Find(name)
	}
	return l, rule
}

// ListenerFor returns the listener for a host, nil if there is none.
func (p *Port) ListenerFor(host string) *Listener {
	l, _ := p.hosts.Find(host)
	return l
}

// Match is a match of a rule, with the pattern of its hosts. A path is a prefix unless something else is noted.
type Match struct {
	Rule             *Rule
	Host, Path       string
	Exact, Last      bool           // Last is for every path that no other match takes
	Begins           bool           // with Path, as text: also in the middle of a segment
	Regex            *regexp.Regexp // takes the path, of which Path is the text
	Method           string
	Headers, Queries []filter.Match
	Cookie           *filter.Match
	Call             []filter.Match // the service and the method of a GRPCRoute, without a name; an empty one is for each
}

// Each calls yield with the matches of the listener, in no order. The ones of whole connections have only a host.
func (l *Listener) Each(yield func(*Match)) {
	for host, p := range l.hosts.All() {
		for _, m := range p.from {
			out := &Match{m.Rule, host, m.path, m.kind == exactMatch, m.kind == lastMatch, m.kind == regexMatch && m.regex == nil, m.regex,
				m.method, m.headers, m.queries, m.cookie, nil}
			if c := m.call; c != nil {
				out.Call = c.Matches()
			}
			yield(out)
		}
	}
	for host, rule := range l.streams.All() {
		yield(&Match{Rule: rule, Host: host})
	}
}

// Verdict is what becomes of a request that no rule takes.
type Verdict int

// The verdicts.
const (
	Routed   Verdict = iota
	NoRoute          // 404
	Disputed         // 400: servers read its path in different ways
)

// Admits reports whether requests for a host may come on a connection whose TLS was begun with the name sni.
func (p *Port) Admits(host, sni string) bool {
	return !p.TLS || p.ListenerFor(host) == p.ListenerFor(sni)
}

// Find returns the rule for a request and the path prefix that it was found by, "" if it was not found by one.
func (p *Port) Find(r *Request) (rule *Rule, prefix string, v Verdict) {
	l := p.ListenerFor(r.Host)
	if l == nil {
		return nil, "", NoRoute
	}
	m := l.find(r, r.Path)
	if other := hostpath.Alternative(r.Path); other != "" {
		if second := l.find(r, other); second != m && (second == nil || m == nil || second.Rule != m.Rule) {
			return nil, "", Disputed
		}
	}
	if m == nil {
		return nil, "", NoRoute
	}
	if m.kind == prefixMatch {
		prefix = m.path
	}
	return m.Rule, prefix, Routed
}

func (l *Listener) find(r *Request, path string) (found *match) {
	l.hosts.Each(r.Host, func(p *paths) bool {
		found = p.find(r, path)
		return found == nil && !l.onlyBest
	})
	return found
}

type pathKind int

// The kinds of path matches, in the order of their precedence.
const (
	exactMatch pathKind = iota
	regexMatch
	prefixMatch
	lastMatch // every path, after the others
	callMatch // of a GRPCRoute: see callIndex
)

// match is one match of a rule.
type match struct {
	Rule    *Rule
	kind    pathKind
	path    string         // of a prefix without the slash at its end
	regex   *regexp.Regexp // of the path; a regexMatch without one is for each path that begins with path
	method  string
	headers []filter.Match
	queries []filter.Match
	cookie  *filter.Match
	order   int // of the match, within its rule
	call    *filter.Call
	of      *match // what a canary is an alternative to
	toHTTPS *match // the same with Rule.HTTPS, once it was needed
}

// takes reports whether a match is for a request, whose path was compared already unless it has a regular expression.
func (m *match) takes(r *Request, path string) bool {
	if m.method != "" && m.method != r.Method {
		return false
	}
	for i := range m.headers {
		if !m.headers[i].Takes(r.Fields.Header(m.headers[i].Name)) {
			return false
		}
	}
	for i := range m.queries {
		if !m.queries[i].Takes(r.Fields.Query(m.queries[i].Name)) {
			return false
		}
	}
	if m.cookie != nil && !m.cookie.Takes(r.Fields.Cookie(m.cookie.Name)) {
		return false
	}
	if m.kind == regexMatch && m.regex == nil {
		return strings.HasPrefix(path, m.path)
	}
	return m.regex == nil || len(path) <= filter.MaxInput && m.regex.MatchString(path)
}

// compareMatches orders the matches with the same path by the precedence of the specification: a method, then more header
// fields, then more parameters; then a cookie (of Ingresses); then the older route, then the one whose name comes first, then the
// first rule.
func compareMatches(a, b *match) int {
	return cmp.Or(
		cmp.Compare(b2i(b.method != ""), b2i(a.method != "")),
		cmp.Compare(len(b.headers), len(a.headers)),
		cmp.Compare(len(b.queries), len(a.queries)),
		cmp.Compare(b2i(b.cookie != nil), b2i(a.cookie != nil)),
		a.Rule.Route.Compare(b.Rule.Route),
		cmp.Compare(a.Rule.Index, b.Rule.Index),
		cmp.Compare(a.order, b.order),
	)
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// paths are the matches of a host.
type paths struct {
	exact   map[string][]*match
	regexes []*match
	root    node
	last    []*match
	calls   callIndex
	// byLength is true if of an expression and a prefix the longer text counts (Ingress).
	byLength bool
	bounded  bool     // a path that is too long for expressions is closed (Ingress)
	from     []*match // of which it was made, to be compared with
}

// node is a prefix, in a trie of segments.
type node struct {
	below   map[string]*node
	matches []*match
}

func newPaths(matches []*match) *paths {
	p := &paths{exact: map[string][]*match{}, from: matches}
	sorted := slices.SortedStableFunc(slices.Values(matches), compareMatches)
	for _, m := range sorted {
		switch m.kind {
		case exactMatch:
			p.exact[m.path] = append(p.exact[m.path], m)
		case regexMatch:
			p.regexes, p.byLength = append(p.regexes, m), m.Rule.Route.Kind == kindIngress
			p.bounded = p.bounded || p.byLength && m.regex != nil
		case prefixMatch:
			n := p.root.at(m.path)
			n.matches = append(n.matches, m)
		case callMatch:
			p.calls.add(m)
		case lastMatch:
			p.last = append(p.last, m)
		}
	}
	slices.SortStableFunc(p.regexes, func(a, b *match) int { return cmp.Compare(len(b.path), len(a.path)) })
	p.calls.sort()
	return p
}

// at returns the node of a prefix, which is made if necessary.
func (n *node) at(prefix string) *node {
	if prefix == "" {
		return n
	}
	for s := range strings.SplitSeq(prefix[1:], "/") {
		if n.below == nil {
			n.below = map[string]*node{}
		}
		next := n.below[s]
		if next == nil {
			next = &node{}
			n.below[s] = next
		}
		n = next
	}
	return n
}

// unread closes the paths that the expressions of an Ingress do not look at: a rule that asks for less must not get them.
var unread = &match{Rule: &Rule{Closed: true}}

// find returns the match with the highest precedence that is for a request.
func (p *paths) find(r *Request, path string) *match {
	if p.bounded && len(path) > filter.MaxInput {
		return unread
	}
	if m := first(p.exact[path], r, path); m != nil {
		return m
	}
	regex := first(p.regexes, r, path)
	if regex != nil && !p.byLength {
		return regex
	}
	prefix := p.root.find(r, path, path[1:])
	if regex != nil && (prefix == nil || len(regex.path) > len(prefix.path) || len(regex.path) == len(prefix.path) && regex.regex != nil) {
		return regex
	}
	if prefix != nil {
		return prefix
	}
	if m := first(p.last, r, path); m != nil {
		return m
	}
	return p.calls.find(r, path)
}

// find returns the match of the longest prefix. rest is the part of the path below the node.
func (n *node) find(r *Request, path, rest string) *match {
	if len(n.below) > 0 {
		segment, after, more := strings.Cut(rest, "/")
		if next := n.below[segment]; next != nil {
			if !more {
				after = ""
			}
			if m := next.find(r, path, after); m != nil {
				return m
			}
		}
	}
	return first(n.matches, r, path)
}

func first(matches []*match, r *Request, path string) *match {
	for _, m := range matches {
		if m.takes(r, path) {
			return m
		}
	}
	return nil
}
