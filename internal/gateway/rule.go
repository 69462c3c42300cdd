package gateway

import (
	"cmp"
	"regexp"
	"regexp/syntax"
	"strconv"
	"time"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/svc"
)

// RouteKey names the object of a rule. Age and name decide between rules that are alike.
type RouteKey struct {
	Kind    string
	Created time.Time
	svc.Name
}

// compare puts the older route first, and then the one whose name comes first.
func (k RouteKey) compare(o RouteKey) int {
	return cmp.Or(k.Created.Compare(o.Created), k.Name.Compare(o.Name), cmp.Compare(k.Kind, o.Kind))
}

// Rule is what becomes of the requests that one of its matches takes.
type Rule struct {
	Route   RouteKey
	Index   int // within the route
	Filters Filters
	// Redirect, if not nil, answers requests instead of a backend.
	Redirect *Redirect
	// CORS, if not nil, answers the questions of browsers, and tells them what they may use.
	CORS     *CORS
	Backends []Weighted
	total    uint64 // of the weights
	// Timeout is how long a backend may be silent before the answer is 504; 0 is what the front has for all.
	Timeout time.Duration
	// Retry, if not nil, is when a request goes to a backend again.
	Retry *policy.Retry
	// Session, if not nil, keeps the requests of a client at one endpoint.
	Session *policy.Session
}

// Weighted is a backend of a rule.
type Weighted struct {
	Weight uint32
	// Backend is zero if the reference is not valid: its share of the requests is answered with the rule's Refusal.
	Backend Backend
	Valid   bool
	Filters Filters
}

// Backend is a port of a Service.
type Backend struct {
	svc.Name
	Port uint16
	// PortName is the name of that port, by which EndpointSlices have it.
	PortName string
	// Protocol is the one of the Service's port (appProtocol).
	Protocol BackendProtocol
	// Policy is the BackendTLSPolicy for TLS to it, the zero Name without TLS.
	Policy svc.Name
	// Local is true if only endpoints of the client's node count.
	Local bool
}

// Target is a backend with how long it may be silent.
type Target struct {
	Backend
	Timeout time.Duration // 0 is what the front has for all
	Session bool          // clients stay at one endpoint
	// Route is a route of connections or of datagrams, zero for requests: its connections end when it loses the backend.
	Route StreamKey
}

// Target returns where a backend of a rule leads to.
func (r *Rule) Target(w *Weighted) Target {
	if w.Backend.Protocol == TCP || w.Backend.Protocol == UDP {
		return Target{Backend: w.Backend, Route: StreamKey{gwv1.Kind(r.Route.Kind), r.Route.Name}}
	}
	return Target{Backend: w.Backend, Timeout: r.Timeout, Session: r.Session != nil}
}

// Revocation is a Service that a route names and must not reach: no ReferenceGrant permits it, or no more.
type Revocation struct {
	Route   StreamKey
	Service svc.Name
}

// BackendProtocol is a protocol that backends are spoken to in.
type BackendProtocol string

// The protocols.
const (
	HTTP1 BackendProtocol = "http"
	H2C   BackendProtocol = "h2c"
	TCP   BackendProtocol = "tcp" // bytes as they are
	UDP   BackendProtocol = "udp"
)

// Pick returns a backend by the weights. random is any number, each with the same probability. It returns nil if no backend
// has a weight: then the answer is Refusal.
func (r *Rule) Pick(random uint64) *Weighted {
	if r.total == 0 {
		return nil
	}
	at := random % r.total
	for i := range r.Backends {
		w := &r.Backends[i]
		if at < uint64(w.Weight) {
			return w
		}
		at -= uint64(w.Weight)
	}
	return nil
}

// Filters change requests and answers on their way. The zero value changes nothing.
type Filters struct {
	Request, Response Modifier
	Rewrite           Rewrite
	Mirrors           []Mirror
}

// Mirror is a backend that gets copies of a share of the requests. Its answers go nowhere.
type Mirror struct {
	Backend                Backend
	numerator, denominator uint64
}

// Takes reports whether a request is one of the share. random is any number, each with the same probability.
func (m *Mirror) Takes(random uint64) bool { return random%m.denominator < m.numerator }

// Mirror returns where a mirror of a rule leads to.
func (r *Rule) Mirror(m *Mirror) Target { return Target{Backend: m.Backend, Timeout: r.Timeout} }

// Modifier changes header fields: it removes, then sets, then adds. Names are as they were written; they are compared
// without regard to case.
type Modifier struct {
	Set, Add []Field
	Remove   []string
}

// Field is a header field.
type Field struct{ Name, Value string }

// Empty reports whether a modifier changes nothing.
func (m *Modifier) Empty() bool { return len(m.Set)+len(m.Add)+len(m.Remove) == 0 }

// Rewrite changes the host and the path of a request.
type Rewrite struct {
	Host string // "" leaves it
	Path *PathChange
}

// PathChange replaces a path, or the prefix that a rule was found by.
type PathChange struct {
	Whole bool
	To    string
}

// Apply returns the new path. prefix is the one that the rule was found by.
func (c *PathChange) Apply(path, prefix string) string {
	if c == nil {
		return path
	}
	if c.Whole {
		return c.To
	}
	rest := path[min(len(prefix), len(path)):]
	to := c.To
	if to != "" && to[len(to)-1] == '/' && (rest == "" || rest[0] == '/') {
		to = to[:len(to)-1]
		if rest == "" && to == "" {
			return "/"
		}
		if rest == "" {
			return c.To
		}
	}
	if to += rest; to == "" || to[0] != '/' {
		return "/" + to
	}
	return to
}

// Redirect answers with another place.
type Redirect struct {
	Scheme, Host string // "" is that of the request
	Port         uint16 // 0 without one
	Path         *PathChange
	Status       int
}

// Location returns the value of the field Location for a request with an address scheme://host:port/path?query, of which
// host has no port.
func (d *Redirect) Location(scheme, host string, port uint16, path, query, prefix string) string {
	to := cmp.Or(d.Scheme, scheme)
	known := wellKnownPort(to)
	switch {
	case d.Port != 0:
		port = d.Port
	case d.Scheme != "" && known != 0:
		port = known
	}
	out := to + "://" + cmp.Or(d.Host, host)
	if port != 0 && port != known {
		out += ":" + strconv.Itoa(int(port))
	}
	out += d.Path.Apply(path, prefix)
	if query != "" {
		out += "?" + query
	}
	return out
}

func wellKnownPort(scheme string) uint16 {
	switch scheme {
	case "http":
		return 80
	case "https":
		return 443
	}
	return 0
}

// Bounds of regular expressions. Package regexp takes a time that is linear in the input, times the size of the program.
const (
	maxRegex = 256  // bytes
	maxInput = 4096 // bytes of a value that a regular expression looks at; a longer one does not match
	// maxProgram is the size of the program of an expression, and maxRoutePrograms that of all of a route, in instructions.
	// 256 bytes can ask for a program of many thousands: "(?:.?){1000}".
	maxProgram, maxRoutePrograms = 1000, 10_000
)

// anything matches every value.
var anything = regexp.MustCompile("")

// regexSize returns the size of the program of an expression, and what is wrong with it, "" if nothing is.
func regexSize(text string) (size int, wrong string) {
	if len(text) > maxRegex {
		return 0, "the regular expression has more than 256 bytes"
	}
	tree, err := syntax.Parse(text, syntax.Perl)
	if err != nil {
		return 0, "the regular expression is invalid: " + err.Error()
	}
	prog, err := syntax.Compile(tree.Simplify())
	if err != nil {
		return 0, "the regular expression is invalid: " + err.Error()
	}
	if size = len(prog.Inst); size > maxProgram {
		return size, "the regular expression is too complex"
	}
	return size, ""
}

// compileRegex compiles an expression that must match a whole value.
func compileRegex(text string) (*regexp.Regexp, string) {
	re, err := regexp.Compile(`^(?:` + text + `)$`)
	if err != nil {
		return nil, "the regular expression is invalid: " + err.Error()
	}
	return re, ""
}
