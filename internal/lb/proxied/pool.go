package proxied

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
)

// pool are the Pods behind a port of a Service.
type pool struct {
	ctx context.Context // of the Server
	wg  *sync.WaitGroup
	log *slog.Logger

	mu      sync.Mutex
	balance dialect.Balance
	checks  checks
	members []*member // in the order of their addresses
	next    int       // for RoundRobin
}

// member is a Pod.
type member struct {
	addr netip.AddrPort
	stop context.CancelFunc // of its health checks

	// What follows is guarded by the pool's mu.

	bad   bool
	conns map[*link]struct{}
	gone  bool // no longer a member: its connections are drained
}

// link is a connection of a client to a Pod, or a request. close ends it.
type link struct{ close func() }

// set makes the pool have backends and settings. What goes is drained for that long, for ever with a
// negative time.
func (p *pool) set(balance dialect.Balance, c checks, backends []netip.AddrPort, drain time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.balance = balance
	restart := p.checks != c
	p.checks = c
	wanted := slices.Clone(backends)
	slices.SortFunc(wanted, netip.AddrPort.Compare)
	wanted = slices.Compact(wanted)
	have := map[netip.AddrPort]*member{}
	for _, m := range p.members {
		have[m.addr] = m
	}
	p.members = nil
	for _, a := range wanted {
		m := have[a]
		if m == nil {
			m = &member{addr: a, conns: map[*link]struct{}{}}
		}
		delete(have, a)
		p.members = append(p.members, m)
		if m.stop == nil || restart {
			p.check(m)
		}
	}
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

// errNoBackends means that no Pod is there.
var errNoBackends = errors.New("no ready endpoint")

// pick returns a member for a client that is none of tried, and counts it as used: see
// release. When all are bad, all count as good (fail open, as a Network Load Balancer does).
func (p *pool) pick(client netip.Addr, tried []*member) (*member, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	usable := make([]*member, 0, len(p.members))
	for _, wantGood := range []bool{true, false} {
		for _, m := range p.members {
			if !slices.Contains(tried, m) && (!wantGood || !m.bad) {
				usable = append(usable, m)
			}
		}
		if len(usable) > 0 {
			return p.choose(client, usable), nil
		}
	}
	return nil, errNoBackends
}

// choose returns one of usable, which is not empty.
func (p *pool) choose(client netip.Addr, usable []*member) *member {
	fewest := func(a, b *member) *member {
		if len(b.conns) < len(a.conns) {
			return b
		}
		return a
	}
	best := usable[0]
	switch p.balance {
	case dialect.LeastConnections:
		p.next++ // of equals, not always the first
		for i := range usable {
			best = fewest(best, usable[(p.next+i)%len(usable)])
		}
	case dialect.RandomOfTwo:
		best = fewest(usable[rand.IntN(len(usable))], usable[rand.IntN(len(usable))])
	case dialect.SourceHash: // rendezvous hashing: few clients move when a Pod comes or goes
		most := uint64(0)
		for _, m := range usable {
			if h := hashOf(client, m.addr); h >= most {
				best, most = m, h
			}
		}
	default:
		p.next++
		best = usable[p.next%len(usable)]
	}
	return best
}

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

// add records a connection of a member. It reports false if the member has gone meanwhile.
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

// close ends health checks and drains what is there.
func (p *pool) close(drain time.Duration) { p.set(p.balance, p.checks, nil, drain) }
