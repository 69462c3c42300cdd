// Package traffic counts what the Services of the proxied way and their endpoints carry, and shows it as metrics. Counting
// takes no lock; how many series there are is bounded.
package traffic

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// Bounds of what has series: what is beyond is counted together, with the label Other.
const (
	maxServices  = 1000
	maxEndpoints = 2000 // of all Services
	maxOfService = 200  // of these
)

// Other is the value of a label of what is counted together since there is too much of it.
const Other = "other"

// limits are the bounds, unless a test wants others.
type limits struct{ services, endpoints, ofService, routes int }

// Book has the counters of all Services.
type Book struct {
	most limits

	mu        sync.Mutex
	services  map[svc.Name]*Service
	other     *Service  // of Services beyond the bound
	endpoints int       // that have series
	routes    int       // likewise
	rested    time.Time // when routes were looked for that give their series away
}

// NewBook returns a Book without Services.
func NewBook() *Book { return newBook(limits{maxServices, maxEndpoints, maxOfService, maxRoutes}) }

func newBook(most limits) *Book {
	b := &Book{most: most, services: map[svc.Name]*Service{}}
	b.other = b.newService(svc.Name{})
	return b
}

func (b *Book) newService(n svc.Name) *Service {
	s := &Service{book: b, name: n, endpoints: map[netip.AddrPort]*Endpoint{}}
	s.rest, s.restRoute.service = &Endpoint{service: s}, n
	return s
}

// Service returns the counters of a Service, which are made if necessary.
func (b *Book) Service(n svc.Name) *Service {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.services[n]
	if s == nil {
		if len(b.services) >= b.most.services {
			return b.other
		}
		s = b.newService(n)
		b.services[n] = s
	}
	return s
}

// Drop forgets a Service. What still counts by its counters has no series.
func (b *Book) Drop(n svc.Name) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := b.services[n]; s != nil {
		b.endpoints -= len(s.endpoints)
		b.routes -= len(s.routes)
		s.dropped = true
		delete(b.services, n)
	}
}

// Rejection is why a connection or request got no Pod.
type Rejection int

// The reasons.
const (
	TooMany     Rejection = iota // open files of this process
	OverLimit                    // the connection limit of the Service
	OutOfRange                   // not in the source ranges
	ClientLimit                  // the limits of a client
	Unverified                   // no client certificate, or one that is not valid
	rejections
)

// String returns the value of the label.
func (r Rejection) String() string {
	return [rejections]string{"too-many", "connection-limit", "source-range", "client-limit", "client-certificate"}[r]
}

// classes are the classes of statuses, 1xx to 5xx, after 0 for none.
const classes = 6

// classOf returns the class of a status.
func classOf(status int) int {
	if c := status / 100; c > 0 && c < classes {
		return c
	}
	return 0
}

// buckets are the upper bounds of the histogram, in seconds.
//
//nolint:gochecknoglobals // constant
var buckets = [...]float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}

// answerBuckets are the upper bounds of the histogram of an endpoint. There are fewer than for a Service, because a node has many more
// endpoints.
//
//nolint:gochecknoglobals // constant
var answerBuckets = [...]time.Duration{
	5 * time.Millisecond, 25 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond,
	time.Second, 5 * time.Second, 30 * time.Second,
}

// Mirroring is what became of a copy of a request.
type Mirroring int

// What can become of one.
const (
	MirrorAnswered Mirroring = iota
	MirrorFailed             // no whole answer in time
	MirrorDropped            // too many, or a body that is too long
	mirrorings
)

// String returns the value of the label.
func (m Mirroring) String() string { return [mirrorings]string{"answered", "failed", "dropped"}[m] }

// Authorization is what an authorization server has decided about a request.
type Authorization int

// What it can decide.
const (
	Allowed Authorization = iota
	Denied
	Undecided // no answer, and the request is refused
	authorizations
)

// String returns the value of the label.
func (a Authorization) String() string {
	return [authorizations]string{"allowed", "denied", "undecided"}[a]
}

// Service has the counters of a Service. Its methods are safe for concurrent use.
type Service struct {
	book *Book
	name svc.Name // empty for the one of all others

	requests  [classes]atomic.Uint64
	durations [len(buckets) + 1]atomic.Uint64
	nanos     atomic.Int64 // of all durations
	http      atomic.Bool  // it has had requests

	opened, received, sent, retries atomic.Uint64
	denied                          atomic.Uint64 // retries
	rejected                        [rejections]atomic.Uint64
	mirrored                        [mirrorings]atomic.Uint64
	authorized                      [authorizations]atomic.Uint64

	// What follows is guarded by the book's mu.

	endpoints map[netip.AddrPort]*Endpoint
	rest      *Endpoint // of endpoints beyond the bounds
	routes    map[RouteName]*Route
	restRoute Route // of routes beyond the bound
	dropped   bool
}

// Request counts a request of HTTP that has ended. A status of 0 means that the client got no answer. took is negative for
// what is not a matter of one answer, such as a WebSocket.
func (s *Service) Request(status int, took time.Duration) {
	s.http.Store(true)
	s.requests[classOf(status)].Add(1)
	if took < 0 {
		return
	}
	seconds, i := took.Seconds(), 0
	for i < len(buckets) && seconds > buckets[i] {
		i++
	}
	s.durations[i].Add(1)
	s.nanos.Add(int64(took))
}

// Opened counts a connection of a client, or a session of UDP.
func (s *Service) Opened() { s.opened.Add(1) }

// Carried counts bytes of clients, and to them.
func (s *Service) Carried(received, sent int64) {
	s.received.Add(uint64(max(received, 0)))
	s.sent.Add(uint64(max(sent, 0)))
}

// Retried counts a further attempt for a request or a connection.
func (s *Service) Retried() { s.retries.Add(1) }

// RetryDenied counts a retry that a rule asks for, and its budget does not allow.
func (s *Service) RetryDenied() { s.denied.Add(1) }

// Mirrored counts a copy of a request.
func (s *Service) Mirrored(m Mirroring) { s.mirrored[m].Add(1) }

// Authorized counts a request about which an authorization server was asked.
func (s *Service) Authorized(a Authorization) { s.authorized[a].Add(1) }

// Rejected counts what got no Pod.
func (s *Service) Rejected(why Rejection) { s.rejected[why].Add(1) }

// Endpoint returns the counters of an endpoint, which several users may share. Each calls Leave once.
func (s *Service) Endpoint(at netip.AddrPort) *Endpoint {
	s.book.mu.Lock()
	defer s.book.mu.Unlock()
	e := s.endpoints[at]
	switch {
	case e != nil:
	case s.dropped || s.name == svc.Name{} || len(s.endpoints) >= s.book.most.ofService || s.book.endpoints >= s.book.most.endpoints:
		e = s.rest
	default:
		e = &Endpoint{service: s, at: at}
		s.endpoints[at] = e
		s.book.endpoints++
	}
	e.users++
	return e
}

// Endpoint has the counters of an endpoint of a Service. Its methods are safe for concurrent use.
type Endpoint struct {
	service *Service
	at      netip.AddrPort // not valid for what is counted together
	users   int            // guarded by the book's mu

	requests            [classes]atomic.Uint64
	answers             [len(answerBuckets) + 1]atomic.Uint64
	nanos               atomic.Int64 // until answers began
	open                atomic.Int64
	failures, ejections atomic.Uint64
	retries             atomic.Uint64 // of what it had before
	received, sent      atomic.Uint64 // bytes of clients, and to them
}

// Leave gives the counters back: with the last user the series end.
func (e *Endpoint) Leave() {
	b := e.service.book
	b.mu.Lock()
	defer b.mu.Unlock()
	e.users--
	if e.users == 0 && e.service.endpoints[e.at] == e {
		delete(e.service.endpoints, e.at)
		if !e.service.dropped {
			b.endpoints--
		}
	}
}

// Answered counts a request that the endpoint had. A status of 0 means that it has not answered.
func (e *Endpoint) Answered(status int, after time.Duration) {
	e.requests[classOf(status)].Add(1)
	if status == 0 {
		return
	}
	i := 0
	for i < len(answerBuckets) && after > answerBuckets[i] {
		i++
	}
	e.answers[i].Add(1)
	e.nanos.Add(int64(after))
}

// Carried counts bytes of clients that it was sent, and its own to them.
func (e *Endpoint) Carried(received, sent int64) {
	e.received.Add(uint64(max(received, 0)))
	e.sent.Add(uint64(max(sent, 0)))
}

// Use counts a connection or a request that begins, and with -1 one that ends.
func (e *Endpoint) Use(n int64) { e.open.Add(n) }

// Failed counts an attempt at which it was not reached.
func (e *Endpoint) Failed() { e.failures.Add(1) }

// Retried counts a further attempt for what it had before.
func (e *Endpoint) Retried() { e.retries.Add(1) }

// Ejected counts that it gets no clients for some time.
func (e *Endpoint) Ejected() { e.ejections.Add(1) }
