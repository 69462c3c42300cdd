package tracing

import (
	"strconv"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The kinds of objects that a node programs.
const (
	Service       = "Service"
	EndpointSlice = "EndpointSlice"
)

// Bounds of Pending.
const (
	// maxPending is how many changes a node may have seen and not programmed; of more there are no spans.
	maxPending = 1000
	// maxAge is how long a change may wait; its span ends then with an error.
	maxAge = 10 * time.Minute
)

// Pending are the changes that a node has seen and not programmed. It is safe for concurrent use; nil is for a node that sends no
// spans.
type Pending struct {
	tracer *Tracer
	node   string
	mode   string

	mu      sync.Mutex
	waiting []waiting // in the order in which they were seen
}

// waiting is a change that is not programmed.
type waiting struct {
	change  Change
	id      identity
	service string // namespace/name
	version uint64
	seen    time.Time
	gone    bool
	tries   int
	last    string // the error of the last try
}

// Pending returns the empty Pending of a node, whose proxy has a mode.
func (t *Tracer) Pending(node, mode string) *Pending {
	if t == nil {
		return nil
	}
	return &Pending{tracer: t, node: node, mode: mode}
}

// Seen takes an object that has just arrived as it was written; gone is set if it was deleted.
func (p *Pending) Seen(kind string, o metav1.Object, gone bool) {
	if p == nil {
		return
	}
	w := waiting{change: ChangeOf(kind, o), seen: time.Now(), gone: gone}
	w.id = w.change.identity()
	var err error
	if w.version, err = strconv.ParseUint(w.change.ResourceVersion, 10, 64); err != nil || !p.tracer.sampled(w.id) {
		return
	}
	w.service = w.change.Namespace + "/" + w.change.Name
	if kind == EndpointSlice {
		w.service = w.change.Namespace + "/" + o.GetLabels()[discoveryv1.LabelServiceName]
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expire(w.seen)
	if len(p.waiting) < maxPending {
		p.waiting = append(p.waiting, w)
	}
}

// expire ends the spans of changes that have waited too long. It is called with mu held.
func (p *Pending) expire(now time.Time) {
	n := 0
	for n < len(p.waiting) && now.Sub(p.waiting[n].seen) >= maxAge {
		w := &p.waiting[n]
		p.end(w, time.Time{}, now, "not programmed after "+maxAge.String())
		n++
	}
	p.keep(p.waiting[n:])
}

// keep replaces waiting by a part of it. It is called with mu held.
func (p *Pending) keep(rest []waiting) {
	n := copy(p.waiting, rest)
	clear(p.waiting[n:])
	p.waiting = p.waiting[:n]
	if n == 0 {
		p.waiting = nil // many may have been there
	}
}

// Failed records that the kernel has not accepted what has arrived; it will be tried again.
func (p *Pending) Failed(reason error) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expire(time.Now())
	for i := range p.waiting {
		p.waiting[i].tries++
		p.waiting[i].last = reason.Error()
	}
}

// Reached is what the kernel of a node has accepted.
type Reached struct {
	// Services and Slices are the versions up to which everything of these kinds is programmed.
	Services, Slices uint64
	// Rejected has, for Services by namespace/name, why a port of theirs is left out.
	Rejected map[string]string
	// Begun is when the last transaction began, zero if there was nothing to write, and Accepted when it was accepted.
	Begun, Accepted time.Time
}

// Reached sends the spans of what is programmed.
func (p *Pending) Reached(r Reached) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	rest := p.waiting[:0:0]
	for i := range p.waiting {
		w := &p.waiting[i]
		version := r.Services
		if w.change.Kind == EndpointSlice {
			version = r.Slices
		}
		if w.version > version {
			rest = append(rest, *w)
			continue
		}
		why := r.Rejected[w.service]
		if why != "" {
			why = "rejected: " + why
		}
		p.end(w, r.Begun, r.Accepted, why)
	}
	p.keep(rest)
	p.expire(r.Accepted)
}

// end sends the span of one change; wrong is what is wrong with it.
func (p *Pending) end(w *waiting, begun, at time.Time, wrong string) {
	attributes := append(w.change.attributes(), attribute.String("k8s.node.name", p.node), attribute.String("fairlead.mode", p.mode),
		attribute.Bool("fairlead.deleted", w.gone), attribute.Int("fairlead.failed_attempts", w.tries))
	_, span := p.tracer.tracer.Start(w.id.underRoot(), "program", trace.WithTimestamp(w.seen),
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(attributes...))
	if w.last != "" {
		span.SetAttributes(attribute.String("fairlead.last_error", w.last))
	}
	if !begun.IsZero() {
		span.AddEvent("transaction begins", trace.WithTimestamp(begun))
	}
	if wrong != "" {
		span.SetStatus(codes.Error, wrong)
	}
	span.End(trace.WithTimestamp(at))
}
