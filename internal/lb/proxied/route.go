package proxied

import (
	"net/http"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/lb/proxied/authz"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/pages"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/trace/request"
)

// Router chooses where each request of a listener goes. Many goroutines call it at a time.
type Router interface {
	// Route returns where a request goes. It may change the head: the Pod gets it as it is then.
	Route(r *http1.Request, from Origin) Route
}

// Origin is where a request comes from.
type Origin struct {
	Client, At netip.AddrPort
	Secure     bool   // by TLS
	ServerName string // by which the client has asked for the certificate
}

// Route is where a request goes. Either To or Reply is set.
type Route struct {
	// To has the Pods, how to speak to them (Transport, by Engine.Configure), how clients stay at one, and how long they may
	// be silent. The configuration of the listener decides about all else: who is admitted, and the access log.
	To *Config
	// Reply is the answer to a request that no Pod gets.
	Reply *Reply
	// Ask, if there is one, is asked at Asked before anything of the request is sent to a Pod or a mirror.
	Ask   *authz.Question
	Asked *Config
	// Done, if there is one, is called when the request is over.
	Done func()
	// Mirrors get copies of the request; their results do not change the answer.
	Mirrors []*Config
	// Retry, if there is one, is when the request goes to a Pod again.
	Retry *policy.Retry
	// Pages, if there are some, are asked for at Paged in place of answers.
	Pages *pages.Pages
	Paged *Config
	// Spare is true if To answers for a backend without endpoints, with the status of its page.
	Spare bool
	// Session, if there is one, chooses the Pod, and is told to the client.
	Session *pods.Session
	// Body bounds the body of the request, in bytes, beside the bound of the listener; 0 without a bound.
	Body int64
	// Compress, if not nil, are the content codings of answers in place of the listener's.
	Compress []string
	// Edit, if there is one, changes the head of a Pod's answer, and Refusal every answer of the load balancer's own, also Reply.
	Edit    func(*http1.Response)
	Refusal func(*Reply)
	// Deadline is when the exchange must be over, zero without a bound. Then Late is the answer.
	Deadline time.Time
	// Count, if there is one, counts the request for its route.
	Count *traffic.Route

	rule *gateway.Rule // that has taken the request, nil if none has
	why  string        // of Reply
}

// Tell tells whoever traces the request which rule has taken it, where it leads, and why there is a Reply.
func (r *Route) Tell(to *request.Record) {
	if to == nil {
		return
	}
	if r.rule != nil {
		of := &r.rule.Route
		to.Routed(request.Route{Kind: of.Kind, Namespace: of.Namespace, Name: of.Name.Name, Rule: r.rule.Index})
	}
	if r.Reply != nil {
		to.Decided(r.why)
	} else {
		to.Led(r.To.Destination().String())
	}
}

// Reply is an answer of the load balancer's own.
type Reply struct {
	Status int
	// Fields go out beside Date, Content-Type and Content-Length.
	Fields []http1.Field
	// Body is nil for the text of the status, in which case Fields have no Content-Type.
	Body []byte
	// asked is true for the answer to the question whether a page may send a request.
	asked bool
}

// Late returns the answer to a call of gRPC that has taken longer than its Deadline: DEADLINE_EXCEEDED, in the form of an answer without
// messages.
func Late() *Reply { return callReply("4", "the call has taken longer than its grpc-timeout") }

func callReply(code, message string) *Reply {
	return &Reply{Status: http.StatusOK, Body: []byte{}, Fields: []http1.Field{
		fieldOf("Content-Type", "application/grpc"), fieldOf("Grpc-Status", code), fieldOf("Grpc-Message", message),
		fieldOf("Cache-Control", "no-store"),
	}}
}

func fieldOf(name, value string) http1.Field {
	return http1.Field{Name: []byte(name), Value: []byte(value)}
}

// retryMaintained is when clients of a route in maintenance may ask again, in seconds.
const retryMaintained = "60"

// maintained is the answer of a route in maintenance: 503, which no cache keeps, or UNAVAILABLE for a call of gRPC.
func maintained(m *policy.Maintenance, r *http1.Request) *Reply {
	if pages.IsCall(r) {
		return callReply("14", "the route is in maintenance")
	}
	reply := &Reply{Status: http.StatusServiceUnavailable, Body: m.Page, Fields: []http1.Field{
		fieldOf("Retry-After", retryMaintained), fieldOf("Cache-Control", "no-store"),
	}}
	if m.Page != nil {
		reply.Fields = append(reply.Fields, fieldOf("Content-Type", m.ContentType))
	}
	return reply
}

// Route returns where a request goes. It is the one place where that is decided.
func (c *Config) Route(r *http1.Request, from Origin) Route {
	if c.Router == nil {
		return Route{To: c}
	}
	return c.Router.Route(r, from)
}
