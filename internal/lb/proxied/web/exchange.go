package web

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/hubble/seen"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/accesslog"
	"github.com/fairlead/fairlead/internal/lb/proxied/authz"
	"github.com/fairlead/fairlead/internal/lb/proxied/compress"
	"github.com/fairlead/fairlead/internal/lb/proxied/heads"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/mark"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/trace/request"
)

// client is the end of an exchange at its client: a connection of HTTP/1.1, or a stream of HTTP/2.
type client interface {
	// source is the body of the request. whole returns all of it, if it is there and not longer than
	// most; takeWhole takes it.
	source() source
	whole(most int) ([]byte, bool)
	takeWhole(n int)
	// interim passes an interim answer on, and proceed sends 100.
	interim(*http1.Response) error
	proceed() error
	// answer begins the answer x.res, which has a body, and returns where that goes. begun reports whether something of it
	// may have been sent.
	answer(body source, cookie string) sink
	begun() bool
	// reply is an answer of the load balancer's own.
	reply(*proxied.Reply)
	// left reports whether the client has gone.
	left() bool
	// tunnel carries bytes both ways after the Pod's consent.
	tunnel(u *upstream) error
}

// pod is the end of an exchange at its Pod.
type pod interface {
	sink // of the request's body
	// head sends the head of the request, with the next flush, and a body that is whole.
	head(x *exchange, whole []byte, end bool)
	// answer reads the next head of the answer. It fails with os.ErrDeadlineExceeded after poll.
	answer(r *http1.Response, poll time.Duration) error
	// source is the body of the answer.
	source(x *exchange) source
	// stale reports whether the Pod has done nothing with the request, as far as that can be known: a kept connection had
	// ended. unseen reports that it is known.
	stale() bool
	unseen(err error) bool
	// abort ends it from another goroutine. release is the last call; reusable reports whether both messages are whole.
	abort()
	release(x *exchange, reusable bool)
}

// exchange is a request and what becomes of it.
type exchange struct {
	engine *engine
	conn   *clientConn
	config *proxied.Config // of the listener
	to     *proxied.Config // has the Pods: see proxied.Route
	edit   func(*http1.Response)
	// refusal changes answers of the load balancer's own, unless it is nil.
	refusal func(*proxied.Reply)
	counts  *traffic.Route // nil unless a route has it
	// codings are what the answer may be compressed by, and accepts what the client accepts.
	codings  []string
	accepts  compress.Accepts
	question *authz.Question // nil unless an authorization server was asked
	copied   *mirrored       // nil unless there are mirrors
	again    *retrying       // nil unless its rule has a retry
	page     *paged          // nil unless a page may take the place of the answer
	forPage  bool            // the Pod is asked for a page
	held     *pods.Session   // nil unless its rule has sessions
	client   client
	second   bool // the client speaks HTTP/2
	req      *http1.Request
	res      http1.Response
	body     []byte // of the request, if that goes out with the head
	key      string // of a WebSocket, see heading
	// upgrades is true if the client asks for another protocol, and websocket if that is one that it gets.
	upgrades, websocket bool

	search     reaching // for a Pod
	member     *pods.Member
	link       *pods.Link
	drained    atomic.Bool
	most       int64           // bytes that the body may have, 0 without a bound
	bodyLong   atomic.Bool     // the body is longer than it may be
	counted    *proxied.Config // by Host.AdmitRequest, nil if it was not
	deadline   time.Time       // zero without one
	hasInterim bool            // 100 was sent to the client
	answering  bool            // the answer has begun
	isHead     bool            // the method is HEAD. The bytes of the request end with its head: they may be overwritten while a body is read
	unread     bool            // the client may still send something of its body
	reusable   bool            // so is the connection to the Pod
	upload     *upload
	down       pump // the body of the answer
	cookies    []string

	// What follows is for the access log.

	began, asked, answered time.Time // the latter are zero if that has not been
	pod                    netip.AddrPort
	podStatus, status      int
	received, sent         atomic.Int64
	line                   heads.Line
	watched                bool            // it is shown to whoever records flows
	id                     string          // by which it is found again, empty for none
	trace                  *request.Record // nil unless a user traces it

	active atomic.Int64 // when something was carried last, since conn.began

	mu   sync.Mutex
	back pod // has the request
	over bool
}

// begin prepares for a request by a configuration.
func (x *exchange) begin(c *proxied.Config) {
	x.config, x.to, x.edit, x.refusal, x.counts, x.codings, x.copied, x.again, x.held = c, c, nil, nil, nil, nil, nil, nil, nil
	x.page = nil
	x.key, x.upgrades, x.began, x.asked, x.answered = "", x.req.Upgrades, time.Now(), time.Time{}, time.Time{}
	x.pod, x.podStatus, x.status, x.deadline = netip.AddrPort{}, 0, 0, time.Time{}
	x.hasInterim, x.answering, x.unread, x.reusable, x.upload, x.over = false, false, false, false, nil, false
	x.isHead, x.accepts, x.question = string(x.req.Method) == http.MethodHead, 0, nil
	x.drained.Store(false)
	x.bodyLong.Store(false)
	x.received.Store(0)
	x.sent.Store(0)
	x.touch()
	x.line, x.cookies, x.id, x.trace = heads.Line{}, nil, "", nil
	if x.watched = c.Watches(); x.watched || c.Logs() {
		x.line = heads.LineOf(x.req, x.second)
	}
}

// forget keeps nothing of the last request.
func (x *exchange) forget() {
	x.engine, x.conn, x.config, x.to, x.edit, x.refusal, x.client, x.req, x.link = nil, nil, nil, nil, nil, nil, nil, nil, nil
	x.copied, x.again, x.held, x.codings, x.question, x.counts, x.search = nil, nil, nil, nil, nil, nil, reaching{}
	x.line, x.cookies, x.upload, x.back, x.trace, x.page = heads.Line{}, nil, nil, nil, nil, nil
	x.down.to, x.down.from = nil, nil
}

// end gives back what the request has.
func (x *exchange) end() {
	x.leave()
	if x.counted != nil {
		x.engine.host.ForgetRequest(x.counted)
		x.counted = nil
	}
	if x.config == nil {
		return
	}
	count(x)
	if x.config.Logs() {
		x.record(x.line, x.status, x.sent.Load())
	}
	if x.watched {
		show(x, x.line, x.status)
	}
	if x.trace != nil {
		x.trace.End(&request.End{Front: x.config.Service.String(), Listener: x.conn.at, Client: x.conn.client, Second: x.second,
			TLS: x.conn.secure, Status: x.status, Asked: x.asked, Answered: x.answered})
	}
}

// count counts a request that has ended.
func count(x *exchange) {
	took := time.Since(x.began)
	if x.status == http.StatusSwitchingProtocols || x.key != "" {
		took = -1
	}
	x.config.Carried(x.counts, x.status, took, x.received.Load(), x.sent.Load())
}

// touch notes that something was carried.
func (x *exchange) touch() { x.active.Store(int64(time.Since(x.conn.began))) }

// silentFor is how long nothing was carried.
func (x *exchange) silentFor() time.Duration {
	return time.Since(x.conn.began) - time.Duration(x.active.Load())
}

// limit is how long the Pod may be silent, and grace how much longer the client's connection stays.
func (x *exchange) limit() time.Duration { return x.to.Spec.IdleTimeout.Std() }
func (x *exchange) grace() time.Duration { return x.engine.idleGrace }

// patience is how long a Pod may be silent before its answer begins: if the client has sent all, that may be longer than the limit.
func (x *exchange) patience() time.Duration {
	t, limit := x.to.Spec.RequestTimeout.Std(), x.limit()
	if t > 0 && (t < limit || x.upload == nil || x.upload.came.Load()) {
		return t
	}
	return limit
}

// poll is how long something is waited for before a look at the rest.
func (x *exchange) poll() time.Duration {
	return policy.Within(x.deadline, min(pollInterval, x.patience()/4, x.limit()/4))
}

// drain ends the request: its Pod has left, and the time to drain is over.
func (x *exchange) drain() {
	x.drained.Store(true)
	x.abort()
}

// abort ends what the Pod has of it. It can be called by any goroutine.
func (x *exchange) abort() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.over = true
	if x.back != nil {
		x.back.abort()
	}
}

// attach makes a Pod's end be that of the request, nil none.
func (x *exchange) attach(b pod) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.back = b; x.over && b != nil {
		b.abort()
	}
}

// record writes the line of a request.
func (x *exchange) record(r heads.Line, status int, sent int64) {
	e := accesslog.Entry{
		Client: x.conn.client, Pod: x.pod, Before: -1, During: -1, After: -1, Status: status, PodStatus: x.podStatus,
		Received: x.received.Load(), Sent: sent, Agent: r.Agent, Began: x.began, RequestID: x.id,
		Kind: accesslog.KindOf(r.Proto, r.GRPC, x.conn.secure, status),
	}
	scheme := "http"
	if x.conn.secure {
		scheme = "https"
		e.TLS(x.conn.tls)
		e.Domain, e.Subject = x.conn.tls.ServerName, mark.Subject(&x.conn.tls)
	}
	if r.Method != "" { // else it is none
		e.Request = r.Text(scheme, x.conn.at.Port())
	}
	if !x.asked.IsZero() {
		e.Before = x.asked.Sub(x.began)
		if !x.answered.IsZero() {
			e.During, e.After = x.answered.Sub(x.asked), time.Since(x.answered)
		}
	}
	x.config.Record(e)
}

// show shows a request to whoever records flows, unless it was none.
func show(x *exchange, r heads.Line, status int) {
	if r.Method == "" {
		return
	}
	protocol := r.Proto
	if protocol == "HTTP/2.0" {
		protocol = "HTTP/2" // as proxies call it
	}
	x.config.Show(&seen.Request{
		Service: x.to.Destination(), Client: x.conn.client, At: x.conn.at, Pod: x.pod, Method: r.Method, Host: r.Host, Target: r.URI,
		Protocol: protocol, Secure: x.conn.secure, Status: status, Began: x.began, Answered: x.answered,
	})
}

// marksOf are what the Service of a request asks for.
func marksOf(x *exchange) mark.Marks { return mark.Marks(x.to.Spec.Headers) }

// withhold keeps trailers of the request from the Pod that the client may not set.
func withhold(x *exchange, trailers []http1.Field) {
	marks := marksOf(x)
	marks.Trailers(trailers)
	x.question.Withhold(trailers)
}

// retried counts a further attempt, for the Pod of the one before it and, unless it is for a copy, for the front.
func retried(x *exchange, before *pods.Member) {
	if _, copies := x.client.(*mirror); !copies {
		x.config.Traffic().Retried()
	}
	before.Traffic().Retried()
}

// choose returns a member for the request, none of tried.
func choose(x *exchange, tried []*pods.Member) (*pods.Member, error) {
	if x.held != nil {
		return x.held.Choose(x.to.Pool, x.conn.client.Addr(), tried)
	}
	return x.to.Sticky.Choose(x.to.Pool, x.conn.client.Addr(), x.cookies, tried)
}

// keep returns the cookie by which further requests of the client go to a member, "" if there is none, or sets the header field of a
// session.
func keep(x *exchange, m *pods.Member) (cookie string) {
	if x.to.Sticky.Cookies() {
		return x.to.Sticky.Keep(x.to.Pool, m, x.cookies, http1.ValuesOf(x.res.Fields, http1.SetCookie), x.conn.secure)
	}
	if x.held == nil {
		return ""
	}
	token := x.held.Token(x.to.Pool, m)
	name := x.held.Field()
	if token == "" {
		return ""
	}
	if name == "" {
		return x.held.Cookie(token, x.conn.secure)
	}
	x.res.Fields = slices.DeleteFunc(x.res.Fields, func(f http1.Field) bool { return strings.EqualFold(string(f.Name), name) })
	x.res.Fields = append(x.res.Fields, http1.Field{Name: []byte(name), Value: []byte(token)})
	return ""
}

// use makes a member have the request.
func (x *exchange) use(m *pods.Member) bool {
	x.member = m
	return x.to.Pool.Add(m, x.link)
}

func (x *exchange) leave() {
	if x.member != nil {
		x.to.Pool.Remove(x.member, x.link)
		if x.answering {
			x.to.Pool.Carried(x.member, x.received.Load(), x.sent.Load())
		}
		x.member = nil
	}
}
