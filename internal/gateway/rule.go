package gateway

import (
	"time"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway/basic"
	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/kinds"
	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/svc"
)

// Rule is what becomes of the requests that one of its matches takes.
type Rule struct {
	Route   kinds.Object
	Index   int // within the route
	Filters Filters
	// Redirect, if not nil, answers requests instead of a backend.
	Redirect *filter.Redirect
	// CORS, if not nil, answers the questions of browsers, and tells them what they may use.
	CORS     *filter.CORS
	Backends []Weighted
	total    uint64 // of the weights
	// Closed answers all requests with 503: what protects the rule cannot be done.
	Closed bool
	// Basic, if not nil, has clients give a name and a password. Without its Secret no request passes.
	Basic *basic.Rule
	// Auth, if not nil, is who lets requests go to a backend.
	Auth *Auth
	// Maintenance, if not nil, answers instead of a backend or a redirect.
	Maintenance *policy.Maintenance
	// HTTPS sends requests without TLS to the same place with it, before all else but Closed. https is when an Ingress asks for that.
	HTTPS bool
	https nginx.HTTPS
	// Access, if not nil, is which clients get an answer other than 403. With Any it is enough that one of Access, Basic and Auth lets a
	// client pass.
	Access *filter.Access
	Any    bool
	// Limits, if not nil, bound the requests of a client for all rules of the route together.
	Limits *filter.Limits
	// Body bounds the bodies of requests, in bytes; 0 is what the front has for all.
	Body int64
	// Timeout is how long a backend may be silent before the answer is 504; 0 is what the front has for all, and policy.NoTimeout none.
	Timeout time.Duration
	// Compress, if not nil, are the content codings of answers, the best first, in place of the front's.
	Compress []string
	// Retry, if not nil, is when a request goes to a backend again.
	Retry *policy.Retry
	Spare *Target // answers while the chosen backend has no endpoint or cannot be used, unless it is nil
	// Errors, if not nil, are the answers that Pages answers in place of.
	Errors *policy.Errors
	Pages  *Target
	// Session, if not nil, keeps the requests of a client at one endpoint.
	Session *policy.Session
}

// Weighted is a backend of a rule.
type Weighted struct {
	Weight uint32
	// Backend has no port by name if the reference is not Valid, and is zero if it names no Service. Its share of the requests is answered
	// by the rule's Spare, or with its Refusal.
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
	Timeout time.Duration // as Rule has it
	Session bool          // clients stay at one endpoint
	// Route is a route of connections or of datagrams, zero for requests: its connections end when it loses the backend.
	Route kinds.Route
}

// Spared reports whether the rule's Spare answers for a backend because its Service, or the port of it, cannot be used.
func (r *Rule) Spared(w *Weighted) bool {
	return !w.Valid && r.Spare != nil && w.Backend.Name != (svc.Name{})
}

// Target returns where a backend of a rule leads to.
func (r *Rule) Target(w *Weighted) Target {
	if w.Backend.Protocol == TCP || w.Backend.Protocol == UDP {
		return Target{Backend: w.Backend, Route: kinds.Route{Kind: gwv1.Kind(r.Route.Kind), Name: r.Route.Name}}
	}
	return Target{Backend: w.Backend, Timeout: r.Timeout, Session: r.Session != nil}
}

// Revocation is a Service that a route names and must not reach: no ReferenceGrant permits it, or no more.
type Revocation struct {
	Route   kinds.Route
	Service svc.Name
}

// BackendProtocol is a protocol that backends are spoken to in.
type BackendProtocol string

// The protocols.
const (
	HTTP1 BackendProtocol = "http"
	H2C   BackendProtocol = "h2c"
	HTTPS BackendProtocol = "https" // with certificates that are not verified; only of Ingresses
	H2    BackendProtocol = "h2"    // likewise, by HTTP/2
	TCP   BackendProtocol = "tcp"   // bytes as they are
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
	Request, Response filter.Modifier
	Rewrite           filter.Rewrite
	Mirrors           []Mirror
}

// Mirror is a backend that gets copies of a share of the requests. Its answers go nowhere.
type Mirror struct {
	Backend Backend
	filter.Share
}

// Mirror returns where a mirror of a rule leads to.
func (r *Rule) Mirror(m *Mirror) Target { return Target{Backend: m.Backend, Timeout: r.Timeout} }

// mirror reads a filter of type RequestMirror. ok is false if it leads to no backend: then requests go on without it, as the
// specification asks, and the route's status tells.
func (b *ruleCompiler) mirror(spec *gwv1.HTTPRequestMirrorFilter, at string) (m Mirror, ok bool) {
	wrong := ""
	if m.Share, wrong = filter.ReadShare(spec); wrong != "" {
		b.fail("%s%s", at, wrong)
		return m, false
	}
	m.Backend, ok = b.resolve(&spec.BackendRef, at+".backendRef", protocolOf(b.route.from))
	return m, ok
}
