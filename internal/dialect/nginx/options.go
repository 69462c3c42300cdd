package nginx

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/policy"
)

// Prefix begins the names of all annotations.
const Prefix = "nginx.ingress.kubernetes.io/"

// Options is what the annotations of an Ingress ask for. The zero value asks for nothing.
type Options struct {
	// Closed is why no request may pass, "" if they may: who asks for protection must not be served without it.
	Closed string
	// ClosedHost means that no request may pass at any path of the hosts, also of other Ingresses: nginx has the protection there.
	ClosedHost bool
	// Ignored has the annotations without effect, each with the reason.
	Ignored []string

	// UseRegex makes paths regular expressions, and so does a RewriteTarget.
	UseRegex                                             bool
	RewriteTarget, AppRoot, ForwardedPrefix, BackendHost string
	// DefaultBackend is a Service of the namespace that answers while the one of a path has no endpoint, "" for none.
	DefaultBackend string
	// Errors, if not nil, are the answers that DefaultBackend answers in place of.
	Errors *policy.Errors
	// SSLRedirect is nil without the annotation.
	SSLRedirect *bool
	ForceSSL    bool
	// Redirect, if not nil, answers all requests.
	Redirect *Redirect
	WWW      bool
	Aliases  []string
	Backend  Backend
	// Body bounds the bodies of requests, in bytes; 0 for no bound.
	Body        int64
	Timeout     time.Duration // 0 without one
	Allow, Deny []netip.Prefix
	// PerSecond and PerMinute bound the requests of a client, 0 for no bound; it may have Burst times as many at once. AtATime
	// bounds the ones that it waits for. Clients of Unlimited have no bound.
	PerSecond, PerMinute, Burst, AtATime int
	Unlimited                            []netip.Prefix
	CORS                                 *gwv1.HTTPCORSFilter
	Session                              *policy.Session
	// Retry, if not nil, is when a request goes to a Pod again, and RetryWithin bounds the time of all attempts, 0 without a bound.
	Retry       *gwv1.HTTPRouteRetry
	RetryWithin time.Duration
	// Auth, if not nil, has a Service be asked about each request.
	Auth *Auth
	// Basic, if not nil, has clients give a name and a password.
	Basic *Basic
	// Any means that a client that passes one of Allow and Deny, Auth and Basic need not pass the others.
	Any bool
	// Canary, if not nil, makes the Ingress an alternative to another one.
	Canary *Canary
}

// Protects reports whether requests for the paths must not get to a rule that asks for less.
func (o *Options) Protects() bool {
	return o.Closed != "" || o.Auth != nil || o.Basic != nil || len(o.Allow)+len(o.Deny) > 0 || o.PerSecond+o.PerMinute+o.AtATime > 0 ||
		o.ForceSSL || o.SSLRedirect != nil && *o.SSLRedirect
}

// Redirect answers with another place.
type Redirect struct {
	URL    string
	Status int
}

// Backend is the protocol that backends are spoken to in.
type Backend struct{ TLS, GRPC bool }

// Canary is which requests for the paths of another Ingress the Ingress gets: the ones with the Header, else the ones with the Cookie,
// and of the others Weight of Total.
type Canary struct {
	Header, Value, Pattern, Cookie string
	Weight, Total                  int
}

// Bounds of values, in bytes and in items: an annotation may have 256 KiB, and each request could pay for it.
const (
	maxValue  = 4096
	maxList   = 64 << 10
	maxRanges = 1000
	maxNames  = 64
)

// Has reports whether an Ingress has annotations of ingress-nginx.
func Has(annotations map[string]string) bool {
	for key := range annotations {
		if strings.HasPrefix(key, Prefix) {
			return true
		}
	}
	return false
}

// Read reads the annotations of an Ingress.
func Read(annotations map[string]string) *Options {
	r := &reader{Options: &Options{}, all: annotations}
	if !Has(annotations) {
		return r.Options
	}
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		if name, ours := strings.CutPrefix(key, Prefix); ours {
			r.read(name, strings.TrimSpace(annotations[key]))
		}
	}
	r.combine()
	return r.Options
}

// reader reads the annotations of one Ingress.
type reader struct {
	*Options
	all     map[string]string
	auth    Auth
	basic   Basic
	canary  Canary
	cors    gwv1.HTTPCORSFilter
	session policy.Session
	retry   gwv1.HTTPRouteRetry
	retries bool
	errors  policy.Errors
	// The flags of annotations that others are parts of.
	hasCORS, isCanary, credentials bool

	status map[string]int // of redirects, by annotation
	to     map[string]string
	send   time.Duration
}

// value returns the value of another annotation.
func (r *reader) value(name string) string { return strings.TrimSpace(r.all[Prefix+name]) }

func (r *reader) close(name, format string, args ...any) {
	if r.Closed == "" {
		r.Closed = "annotation " + Prefix + name + ": " + fmt.Sprintf(format, args...)
	}
}

func (r *reader) ignore(name, format string, args ...any) {
	r.Ignored = append(r.Ignored, "annotation "+Prefix+name+": "+fmt.Sprintf(format, args...))
}

// read reads one annotation.
func (r *reader) read(name, value string) {
	a, known := annotations[name]
	switch {
	case !known && protects(name):
		r.close(name, "it is unknown, and could be meant to protect")
		r.ClosedHost = r.ClosedHost || meansHost(name)
	case !known:
		r.ignore(name, "it is unknown, and has no effect")
	case a.read == nil && a.guards:
		if !a.off(value) {
			r.close(name, "%s", a.none)
			r.ClosedHost = r.ClosedHost || a.host
		}
	case a.read == nil:
		r.ignore(name, "it has no effect: %s", a.none)
	default:
		if a.needs != "" && r.value(a.needs) == "" {
			r.ignore(name, "it has no effect without %s", a.needs)
			return
		}
		if err := a.parse(r, value); err != nil && a.guards {
			r.close(name, "%s", err)
		} else if err != nil {
			r.ignore(name, "it has no effect: %s", err)
		}
	}
}

// protects reports whether the name of an unknown annotation looks like protection, as one with a typing error does.
func protects(name string) bool {
	name = strings.ToLower(name)
	return meansHost(name) || slices.ContainsFunc(protection, func(part string) bool { return strings.Contains(name, part) })
}

// meansHost reports whether the name of an unknown annotation looks like one that protects a whole host.
func meansHost(name string) bool {
	for known, a := range annotations {
		if a.host && distance(strings.ToLower(name), known) <= maxTypos {
			return true
		}
	}
	return false
}

// maxTypos is how many letters a name may have wrong, or too many, or too few.
const maxTypos = 3

// distance is how many letters of a must be changed, added or taken away to make b (Levenshtein).
func distance(a, b string) int {
	if len(a) > len(b)+maxTypos {
		return maxTypos + 1
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		corner := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := corner
			if a[i] != b[j] {
				change++
			}
			corner, row[j+1] = row[j+1], min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// protection are parts of the names of annotations that protect.
//
//nolint:gochecknoglobals // constant
var protection = []string{"auth", "list", "range", "limit", "modsecurity", "owasp", "snippet", "satisfy", "verify", "secret", "waf"}

// combine does what several annotations ask for together.
func (r *reader) combine() {
	if r.hasCORS {
		r.combineCORS()
	}
	r.combineAuth()
	r.combineBasic()
	if r.value("affinity") == "cookie" {
		r.session.Name = orElse(r.session.Name, "INGRESSCOOKIE")
		r.session.Secure = r.session.Secure || r.session.SameSite == "None" // which browsers take only together
		r.Session = &r.session
	}
	r.Timeout = max(r.Timeout, r.send)
	if r.PerSecond+r.PerMinute > 0 && r.Burst == 0 {
		r.Burst = defaultBurst
	}
	for _, kind := range []string{"temporal-redirect", "permanent-redirect"} {
		if to := r.to[kind]; to != "" && r.Redirect == nil {
			r.Redirect = &Redirect{URL: to, Status: r.status[kind]}
			if r.Redirect.Status == 0 {
				r.Redirect.Status = map[string]int{"temporal-redirect": 302, "permanent-redirect": 301}[kind]
			}
		}
	}
	if r.isCanary {
		if r.canary.Total == 0 {
			r.canary.Total = 100
		}
		r.canary.Weight = min(r.canary.Weight, r.canary.Total)
		r.Canary = &r.canary
	}
	if r.retries {
		r.Retry = &r.retry
	}
	if len(r.errors.Codes) > 0 && r.DefaultBackend != "" {
		r.Errors = &r.errors
	}
}

// combineCORS adds the defaults of ingress-nginx.
func (r *reader) combineCORS() {
	c := &r.cors
	if c.AllowOrigins == nil {
		c.AllowOrigins = []gwv1.CORSOrigin{} // with no valid one no page is allowed
		if _, named := r.all[Prefix+"cors-allow-origin"]; !named {
			c.AllowOrigins = append(c.AllowOrigins, "*")
		}
	}
	if c.AllowMethods == nil {
		c.AllowMethods = []gwv1.HTTPMethodWithWildcard{"GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS"}
	}
	if c.AllowHeaders == nil {
		c.AllowHeaders = []gwv1.HTTPHeaderName{
			"DNT", "Keep-Alive", "User-Agent", "X-Requested-With", "If-Modified-Since", "Cache-Control", "Content-Type", "Range", "Authorization",
		}
	}
	if c.MaxAge == 0 {
		c.MaxAge = 1728000
	}
	// With "*" ingress-nginx sends an answer that browsers refuse for requests with credentials. An answer that names the origin
	// would let every page use the sessions of its visitors.
	_, named := r.all[Prefix+"cors-allow-credentials"]
	c.AllowCredentials = new((r.credentials || !named) && !slices.Contains(c.AllowOrigins, "*"))
	if *c.AllowCredentials { // then "*" is the name of a field for browsers, which no backend sends
		c.ExposeHeaders = slices.DeleteFunc(c.ExposeHeaders, func(h gwv1.HTTPHeaderName) bool { return h == "*" })
	}
	r.CORS = c
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// Redirects reports whether annotations may send clients elsewhere than to the same place by HTTPS.
func Redirects(all map[string]string) bool {
	for key, value := range all {
		name, ours := strings.CutPrefix(key, Prefix)
		if a, known := annotations[name]; ours && known && a.redirects && !a.off(value) {
			return true
		}
	}
	return false
}
