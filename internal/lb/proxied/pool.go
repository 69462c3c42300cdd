package proxied

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/svc"
)

// pool are the Pods behind a port of a Service.
type pool struct {
	ctx context.Context // of the Server
	wg  *sync.WaitGroup
	log *slog.Logger

	service svc.Name
	panics  *panics

	mu      sync.Mutex
	o       poolOptions
	members []*member // in the order of their addresses
	tags    map[string]*member
	// ready are the members among which pick chooses first, nil if that has to be found out. even is true if each
	// has the same share, which is not so before warm.
	ready []*member
	even  bool
	warm  time.Time
	next  int // for RoundRobin
}

// poolOptions are the settings of a pool.
type poolOptions struct {
	balance   dialect.Balance
	slowStart time.Duration
	checks    checks
	// weights are the shares of Pods that have another one than 1.
	weights map[netip.AddrPort]int
	// key, if there is one, makes cookies that name Pods.
	key string
}

// member is a Pod.
type member struct {
	addr netip.AddrPort
	stop context.CancelFunc // of its health checks

	// What follows is guarded by the pool's mu.

	bad    bool
	conns  map[*link]struct{}
	gone   bool // no longer a member: its connections are drained
	weight float64
	since  time.Time // when it came or came back, zero if it was there from the beginning
	credit float64   // how far it lags behind its share, for RoundRobin
	tag    string    // by which cookies name it
}

// link is a connection of a client to a Pod, or a request. close ends it.
type link struct{ close func() }

// set replaces the backends and options. Members that leave are drained for that long, without an end if drain is
// negative.
func (p *pool) set(o poolOptions, backends []netip.AddrPort, drain time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	restart := p.o.checks != o.checks
	known := p.o.checks // by what they have found; with another certificate a Pod is as healthy as it was
	known.tls = o.checks.tls
	stays := known == o.checks
	p.o, p.ready = o, nil
	wanted := slices.Clone(backends)
	slices.SortFunc(wanted, netip.AddrPort.Compare)
	wanted = slices.Compact(wanted)
	have := make(map[netip.AddrPort]*member, len(p.members))
	for _, m := range p.members {
		have[m.addr] = m
	}
	came := time.Time{}
	if len(have) > 0 { // a whole Service that begins has no other Pods
		came = time.Now()
	}
	p.members = make([]*member, 0, len(wanted))
	for _, a := range wanted {
		m := have[a]
		if m == nil {
			m = &member{addr: a, conns: map[*link]struct{}{}, since: came}
		}
		m.weight = 1
		if w, has := o.weights[a]; has {
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
func (p *pool) leave(m *member, drain time.Duration) {
	m.gone = true
	m.stop()
	end := func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if !m.gone {
			return
		}
		for l := range m.conns {
			l.close()
		}
	}
	switch {
	case len(m.conns) == 0 || drain < 0:
	case drain == 0:
		for l := range m.conns {
			l.close()
		}
	default:
		time.AfterFunc(drain, end)
	}
}

// errNoBackends means that there is no Pod.
var errNoBackends = errors.New("no ready endpoint")

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

// add records a connection of a member. It reports false if the member has left.
func (p *pool) add(m *member, l *link) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m.gone {
		return false
	}
	m.conns[l] = struct{}{}
	return true
}

func (p *pool) remove(m *member, l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(m.conns, l)
}

// close ends health checks and drains all members.
func (p *pool) close(drain time.Duration) { p.set(p.o, nil, drain) }
