// Package request keeps a report of each HTTP request that a user traces. The load balancer that carries a request asks a Watch for a
// Record by the trace ID, and fills it in. While no ID is armed, that only reads one number.
package request

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Bounds of what is kept: some KB for each ID.
const (
	// ArmedFor is how long an ID is armed.
	ArmedFor = 15 * time.Second
	// maxArmed bounds the IDs that are armed at a time.
	maxArmed = 16
	// MaxSeen bounds the requests of an ID: a load balancer may lead a request to another one.
	MaxSeen = 4
	// MaxAttempts bounds the attempts of a request, of which the last ones are kept.
	MaxAttempts = 16
	// maxText bounds the reason of a failure, in bytes.
	maxText = 300
	// idLength is the length of an ID: 16 random bytes in hexadecimal digits.
	idLength = 32
)

// Seen is what a load balancer has seen of a request. Its JSON form goes from a node to the command: fields are only ever added. Times
// are in seconds from the request's begin.
type Seen struct {
	// Front is the Service that has the address, as NAMESPACE/NAME; Listener is that address and port.
	Front    string         `json:"front"`
	Listener netip.AddrPort `json:"listener"`
	Client   netip.AddrPort `json:"client"`
	Protocol string         `json:"protocol"` // of the client: HTTP/1 or HTTP/2
	TLS      bool           `json:"tls,omitempty"`
	// Route has taken the request, nil if none has, or the front has none.
	Route *Route `json:"route,omitempty"`
	// Backend is the Service that has the Pods, as NAMESPACE/NAME, empty if the request was not led to any.
	Backend string `json:"backend,omitempty"`
	// Pod has answered with PodStatus; it is not valid if none has.
	Pod       netip.AddrPort `json:"pod,omitzero"`
	PodStatus int            `json:"podStatus,omitempty"`
	Status    int            `json:"status"` // to the client
	// Why is the reason for an answer of the load balancer's own, and what decided it.
	Why string `json:"why,omitempty"`
	// Attempts are all connections and requests to Pods, in their order; More is how many were left out.
	Attempts []Attempt `json:"attempts,omitempty"`
	More     int       `json:"moreAttempts,omitempty"`

	Began time.Time `json:"began"`
	// Sent is when the Pod was asked, and Answered when its answer began; 0 if that has not been. Took is when all was over.
	Sent     float64 `json:"sent,omitempty"`
	Answered float64 `json:"answered,omitempty"`
	Took     float64 `json:"took"`
}

// Route is a rule of a route object.
type Route struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Rule is the index of the rule within the object, from 0.
	Rule int `json:"rule"`
}

// Attempt is a Pod that was asked.
type Attempt struct {
	Pod   netip.AddrPort `json:"pod"`
	After float64        `json:"after"`
	// Status is what it has answered, 0 for none. Error is why that was not the end; empty for the attempt that succeeded, and for one
	// whose result nobody has waited for.
	Status int    `json:"status,omitempty"`
	Error  string `json:"error,omitempty"`
}

// Errors of Arm.
var (
	ErrID   = errors.New("an ID has 32 hexadecimal digits, not all of them 0")
	ErrFull = errors.New("other requests are traced on this node; try again in 15 seconds")
)

// Watch has the IDs that are armed. It is safe for concurrent use; a nil Watch has none.
type Watch struct {
	armed atomic.Int32 // len(ids), of which some may be over

	mu  sync.Mutex
	ids map[string]*watched
}

// watched is an ID.
type watched struct {
	until time.Time
	seen  []Seen
}

// Arm keeps what becomes of requests with an ID that begin within ArmedFor.
func (w *Watch) Arm(id string) error {
	if !valid(id) {
		return ErrID
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.expire()
	if w.ids[id] == nil && len(w.ids) >= maxArmed {
		return ErrFull
	}
	if w.ids == nil {
		w.ids = map[string]*watched{}
	}
	w.ids[id] = &watched{until: time.Now().Add(ArmedFor)}
	w.armed.Store(int32(len(w.ids))) //nolint:gosec // at most maxArmed
	return nil
}

// Seen returns the requests with an ID that have ended. It reports false if the ID is not armed.
func (w *Watch) Seen(id string) (list []Seen, armed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.expire()
	at := w.ids[id]
	if at == nil {
		return nil, false
	}
	return slices.Clone(at.seen), true
}

// Armed reports whether any ID may be armed.
func (w *Watch) Armed() bool { return w != nil && w.armed.Load() > 0 }

// Begin returns the Record of a request that begins now, nil unless its ID is armed.
func (w *Watch) Begin(id string) *Record {
	if !w.Armed() || len(id) != idLength {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.expire()
	if at := w.ids[id]; at == nil || len(at.seen) >= MaxSeen {
		return nil
	}
	return &Record{watch: w, id: strings.Clone(id), seen: Seen{Began: time.Now()}}
}

// expire forgets the IDs whose time is over. The caller holds mu.
func (w *Watch) expire() {
	now := time.Now()
	for id, at := range w.ids {
		if !now.Before(at.until) {
			delete(w.ids, id)
		}
	}
	w.armed.Store(int32(len(w.ids))) //nolint:gosec // at most maxArmed
}

// put keeps a request that has ended.
func (w *Watch) put(id string, s Seen) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.expire()
	if at := w.ids[id]; at != nil && len(at.seen) < MaxSeen {
		at.seen = append(at.seen, s)
	}
}

func valid(id string) bool {
	return len(id) == idLength && strings.Trim(id, "0123456789abcdef") == "" && strings.Trim(id, "0") != ""
}

// Record is a request that is traced. One goroutine uses it at a time. The methods do nothing for nil.
type Record struct {
	watch *Watch
	id    string
	seen  Seen
}

func (r *Record) since(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return t.Sub(r.seen.Began).Seconds()
}

// Routed notes the rule that has taken the request.
func (r *Record) Routed(to Route) {
	if r != nil {
		r.seen.Route = &to
	}
}

// Led notes the Service whose Pods are to answer, as NAMESPACE/NAME.
func (r *Record) Led(backend string) {
	if r != nil {
		r.seen.Backend = backend
	}
}

// Decided notes why the load balancer answers itself. The first reason stays.
func (r *Record) Decided(why string) {
	if r != nil && r.seen.Why == "" {
		r.seen.Why = clip(why)
	}
}

// Try notes that a Pod is asked now.
func (r *Record) Try(pod netip.AddrPort) {
	if r == nil {
		return
	}
	if len(r.seen.Attempts) == MaxAttempts {
		r.seen.Attempts = slices.Delete(r.seen.Attempts, 0, 1)
		r.seen.More++
	}
	r.seen.Attempts = append(r.seen.Attempts, Attempt{Pod: pod, After: r.since(time.Now())})
}

// Got notes what the last attempt at a Pod has led to: a status, 0 for none, and an error, nil if the answer was passed on.
func (r *Record) Got(pod netip.AddrPort, status int, err error) {
	if r == nil {
		return
	}
	if status != 0 {
		r.seen.Pod, r.seen.PodStatus = pod, status
	}
	for i := len(r.seen.Attempts) - 1; i >= 0; i-- {
		if a := &r.seen.Attempts[i]; a.Pod == pod && a.Error == "" {
			if a.Status = status; err != nil {
				a.Error = clip(err.Error())
			}
			return
		}
	}
}

// StatusLeft is the status of a request whose client has left before an answer, as in access logs.
const StatusLeft = 499

// End has the result of a request.
type End struct {
	Front            string
	Listener, Client netip.AddrPort
	Second, TLS      bool // the client speaks HTTP/2, and by TLS
	Status           int
	Asked, Answered  time.Time // zero if that has not been
}

// End is the last call.
func (r *Record) End(e *End) {
	if r == nil {
		return
	}
	s := &r.seen
	s.Front, _, _ = strings.Cut(e.Front, ":") // the front of a mesh has a suffix after the name of its Service
	s.Listener, s.Client, s.TLS, s.Status = e.Listener, e.Client, e.TLS, e.Status
	if s.Protocol = "HTTP/1"; e.Second {
		s.Protocol = "HTTP/2"
	}
	s.Sent = r.since(e.Asked)
	if s.Why != "" {
		s.Pod, s.PodStatus = netip.AddrPort{}, 0
	} else if s.Pod.IsValid() {
		s.Answered = r.since(e.Answered)
	}
	s.Took = r.since(time.Now())
	r.watch.put(r.id, *s)
}

// clip returns the beginning of a text, and does not keep the rest in memory.
func clip(s string) string {
	if len(s) <= maxText {
		return s
	}
	return strings.ToValidUTF8(s[:maxText], "") + "..."
}
