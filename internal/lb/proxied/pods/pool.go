// Package pods is the Pods behind a port of a Service: the choice among them, what they have, their health, and how they
// are spoken to.
package pods

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/svc"
)

// What is tried for a connection or a request.
const (
	// DialTimeout is how long a Pod has to accept a connection.
	DialTimeout = 5 * time.Second
	// MaxDials bounds how many Pods are tried.
	MaxDials = 3
)

// Shared is what all pools of a Server have.
type Shared struct {
	Context  context.Context // ends checks
	Running  *sync.WaitGroup // counts them
	Log      *slog.Logger
	Panics   *panics.Counter
	Absences *Absences
}

// Pool is the Pods behind a port of a Service.
type Pool struct {
	ctx context.Context // of the Server
	wg  *sync.WaitGroup
	log *slog.Logger

	service  svc.Name
	panics   *panics.Counter
	absences *Absences
	traffic  *traffic.Service
	errors   atomic.Int32 // o.Eject.Errors

	mu      sync.Mutex
	o       Options
	members []*Member // in the order of their addresses
	tags    map[string]*Member
	// ready are the members among which Pick chooses first, nil if that has to be found out. even is true if each
	// has the same share, which is not so before warm.
	ready []*Member
	even  bool
	warm  time.Time
	next  int // for RoundRobin
	// returns is when the next ejected member does, zero if none is.
	returns time.Time
}

// New returns a Pool without Pods, of a Service whose traffic is counted.
func New(with Shared, service svc.Name, counts *traffic.Service) *Pool {
	return &Pool{
		ctx: with.Context, wg: with.Running, log: with.Log.With("service", service), service: service, panics: with.Panics,
		absences: with.Absences, traffic: counts,
	}
}

// Options are the settings of a Pool.
type Options struct {
	Balance   dialect.Balance
	SlowStart time.Duration // 0 without
	Checks    Checks
	// Weights are the shares of Pods that have another one than 1.
	Weights map[netip.AddrPort]int
	Eject   dialect.Eject
	// Key, if there is one, makes cookies that name Pods.
	Key string
}

// Member is a Pod.
type Member struct {
	addr  netip.AddrPort
	stop  context.CancelFunc // of its health checks
	count *traffic.Endpoint

	// What follows is guarded by the pool's mu.

	bad    bool
	conns  map[*Link]struct{}
	gone   bool // no longer a member: its connections are drained
	weight float64
	since  time.Time // when it came or came back, zero if it was there from the beginning
	credit float64   // how far it lags behind its share, for RoundRobin
	tag    string    // by which cookies name it
	// ejected is until when it gets no client since it has failed, and failures how often that was in a row.
	ejected  time.Time
	failures int

	// errors is how many requests have failed in a row, and onTrial is set if it was ejected for them and has answered none well
	// since.
	errors  atomic.Int32
	onTrial atomic.Bool
}

// Addr is where it is.
func (m *Member) Addr() netip.AddrPort { return m.addr }

// Traffic counts what it has.
func (m *Member) Traffic() *traffic.Endpoint { return m.count }

// Link is a connection of a client to a Pod, or a request. Close ends it.
type Link struct{ Close func() }

// Set replaces the backends and options. Members that leave are drained for that long, without an end if drain is
// negative.
func (p *Pool) Set(o Options, backends []netip.AddrPort, drain time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	restart := p.o.Checks != o.Checks
	known := p.o.Checks // by what they have found; with another certificate a Pod is as healthy as it was
	known.TLS = o.Checks.TLS
	stays := known == o.Checks
	p.o, p.ready = o, nil
	p.errors.Store(int32(o.Eject.Errors)) //nolint:gosec // a few
	wanted := slices.Clone(backends)
	slices.SortFunc(wanted, netip.AddrPort.Compare)
	wanted = slices.Compact(wanted)
	have := make(map[netip.AddrPort]*Member, len(p.members))
	for _, m := range p.members {
		have[m.addr] = m
	}
	came := time.Time{}
	if len(have) > 0 { // a whole Service that begins has no other Pods
		came = time.Now()
	}
	p.members = make([]*Member, 0, len(wanted))
	for _, a := range wanted {
		m := have[a]
		if m == nil {
			m = &Member{addr: a, conns: map[*Link]struct{}{}, since: came, count: p.traffic.Endpoint(a)}
		}
		if o.Eject.Errors == 0 || o.Eject.Off { // nothing would end a trial
			m.onTrial.Store(false)
			m.errors.Store(0)
		}
		m.weight = 1
		if w, has := o.Weights[a]; has {
			m.weight = float64(w)
		}
		delete(have, a)
		p.members = append(p.members, m)
		if m.stop == nil || restart {
			p.check(m, stays)
		}
	}
	p.tag()
	for _, m := range have {
		p.leave(m, drain)
	}
}

// leave takes a member out. Its connections go on for drain.
func (p *Pool) leave(m *Member, drain time.Duration) {
	m.gone = true
	m.stop()
	m.count.Leave()
	p.absences.remove(m, false)
	end := func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if !m.gone {
			return
		}
		for l := range m.conns {
			l.Close()
		}
	}
	switch {
	case len(m.conns) == 0 || drain < 0:
	case drain == 0:
		for l := range m.conns {
			l.Close()
		}
	default:
		time.AfterFunc(drain, end)
	}
}

// ErrNone means that there is no Pod.
var ErrNone = errors.New("no ready endpoint")

// hashOf is the same on every node, so that a client keeps its Pod when the address moves.
func hashOf(client netip.Addr, pod netip.AddrPort) uint64 {
	const prime = 1099511628211 // FNV-1a, 64 bits
	h := uint64(14695981039346656037)
	c, a := client.As16(), pod.Addr().As16()
	for _, b := range slices.Concat(c[:], a[:], []byte{byte(pod.Port() >> 8), byte(pod.Port())}) {
		h = (h ^ uint64(b)) * prime
	}
	h ^= h >> 33 // the last bytes must reach all bits, too
	h *= 0xff51afd7ed558ccd
	return h ^ h>>33
}

// Add records a connection of a member. It reports false if the member has left.
func (p *Pool) Add(m *Member, l *Link) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m.gone {
		return false
	}
	m.conns[l] = struct{}{}
	m.count.Use(1)
	return true
}

// InUse returns how many connections and requests its Pods have.
func (p *Pool) InUse() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		n += len(m.conns)
	}
	return n
}

// Remove undoes Add.
func (p *Pool) Remove(m *Member, l *Link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, has := m.conns[l]; has {
		delete(m.conns, l)
		m.count.Use(-1)
	}
}

// Carried counts bytes that a member was sent, and what it has sent.
func (p *Pool) Carried(m *Member, received, sent int64) { m.count.Carried(received, sent) }

// Count returns how many of its Pods get new clients, fail their checks, and are ejected.
func (p *Pool) Count() (healthy, unhealthy, ejected int) {
	return p.CountEach(func(netip.AddrPort, bool) {})
}

// CountEach is Count, and tells each whether a Pod gets new clients. It has a lock held: each must not wait.
func (p *Pool) CountEach(each func(at netip.AddrPort, healthy bool)) (healthy, unhealthy, ejected int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for _, m := range p.members {
		each(m.addr, !m.bad && !now.Before(m.ejected))
		switch {
		case m.bad:
			unhealthy++
		case now.Before(m.ejected):
			ejected++
		default:
			healthy++
		}
	}
	return healthy, unhealthy, ejected
}

// Empty reports whether no client gets a Pod.
func (p *Pool) Empty() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !slices.ContainsFunc(p.members, func(m *Member) bool { return !m.bad || !p.o.Checks.FailClosed })
}

// Close ends health checks and drains all members.
func (p *Pool) Close(drain time.Duration) { p.Set(p.o, nil, drain) }
