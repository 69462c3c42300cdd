package pods

import (
	"cmp"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
)

// Pick returns a member for a client that is none of tried. When all are bad, all count as good, as at a
// Network Load Balancer, unless the Service wants none then. A member without a weight only gets clients with its
// cookie.
func (p *Pool) Pick(client netip.Addr, tried []*Member) (*Member, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ready == nil || !p.returns.IsZero() && !time.Now().Before(p.returns) {
		p.findReady()
	}
	usable := p.ready
	if len(tried) > 0 {
		usable = without(p.ready, tried)
		if len(usable) == 0 && !p.o.Checks.FailClosed { // bad members are the last resort
			usable = without(p.weighing(), tried)
		}
	}
	if len(usable) == 0 {
		return nil, ErrNone
	}
	return p.choose(client, usable, len(tried) > 0), nil
}

func without(of, tried []*Member) []*Member {
	return slices.DeleteFunc(slices.Clone(of), func(m *Member) bool { return slices.Contains(tried, m) })
}

// weighing returns the members that have a weight. The caller holds mu.
func (p *Pool) weighing() []*Member {
	return slices.DeleteFunc(slices.Clone(p.members), func(m *Member) bool { return m.weight == 0 })
}

// findReady finds the members among which Pick chooses. The caller holds mu.
func (p *Pool) findReady() {
	all := p.weighing()
	p.ready = make([]*Member, 0, len(all))
	p.even, p.warm = true, time.Time{}
	for _, m := range all {
		if !m.bad {
			p.ready = append(p.ready, m)
		}
	}
	if len(p.ready) == 0 && !p.o.Checks.FailClosed {
		p.ready = all
	}
	p.ready = p.withoutEjected(p.ready, all)
	for _, m := range p.ready {
		p.even = p.even && m.weight == p.ready[0].weight
		if end := m.since.Add(p.o.SlowStart); p.o.SlowStart > 0 && !m.since.IsZero() && end.After(p.warm) {
			p.warm = end
		}
	}
}

// leastShare is the part of its share with which a Pod starts slowly.
const leastShare = 0.1

// share returns the desired share of connections of a member, compared with the others. The caller holds mu.
func (p *Pool) share(m *Member, now time.Time) float64 {
	if p.o.SlowStart <= 0 || m.since.IsZero() {
		return m.weight
	}
	return m.weight * min(1, max(leastShare, float64(now.Sub(m.since))/float64(p.o.SlowStart)))
}

// choose returns one of usable, which is not empty. A further try for a client takes nobody's turn: else with two Pods each
// client would begin with the one that cannot be reached. The caller holds mu.
func (p *Pool) choose(client netip.Addr, usable []*Member, again bool) *Member {
	even, now := p.even, time.Time{}
	if !p.warm.IsZero() {
		now = time.Now()
		even = even && !now.Before(p.warm)
	}
	share := func(m *Member) float64 {
		if even {
			return 1
		}
		return p.share(m, now)
	}
	// less reports whether a has fewer connections than b for its share.
	less := func(a, b *Member) bool { return float64(len(a.conns)+1)*share(b) < float64(len(b.conns)+1)*share(a) }
	switch p.o.Balance {
	case dialect.LeastConnections:
		best := usable[0]
		if !again {
			p.next++ // of equals, not always the first
		}
		for i := range usable {
			if m := usable[(p.next+i)%len(usable)]; i == 0 || less(m, best) {
				best = m
			}
		}
		return best
	case dialect.RandomOfTwo:
		a, b := pickRandom(usable, even, share), pickRandom(usable, even, share)
		if less(b, a) {
			return b
		}
		return a
	case dialect.SourceHash:
		return rendezvous(client, usable, share)
	}
	if even {
		if !again {
			p.next++
		}
		return usable[p.next%len(usable)]
	}
	return roundRobin(usable, share, again)
}

// roundRobin returns the member that lags most behind its share, so that the connections of one are as far from each
// other as they can be (smooth weighted round robin, as of nginx).
func roundRobin(usable []*Member, share func(*Member) float64, again bool) *Member {
	best, total := usable[0], 0.0
	if again {
		return slices.MaxFunc(usable, func(a, b *Member) int { return cmp.Compare(a.credit+share(a), b.credit+share(b)) })
	}
	for _, m := range usable {
		s := share(m)
		m.credit += s
		total += s
		if m.credit > best.credit {
			best = m
		}
	}
	best.credit -= total
	return best
}

// pickRandom returns one of usable, each with the probability of its share.
func pickRandom(usable []*Member, even bool, share func(*Member) float64) *Member {
	if even {
		return usable[rand.IntN(len(usable))]
	}
	total := 0.0
	for _, m := range usable {
		total += share(m)
	}
	at := rand.Float64() * total
	for _, m := range usable {
		if at -= share(m); at < 0 {
			return m
		}
	}
	return usable[len(usable)-1]
}

// rendezvous returns the member of a client by weighted rendezvous hashing: few clients move when a Pod comes or goes,
// or has another weight (https://en.wikipedia.org/wiki/Rendezvous_hashing#Weighted_rendezvous_hash).
func rendezvous(client netip.Addr, usable []*Member, share func(*Member) float64) *Member {
	best, most := usable[0], math.Inf(-1)
	for _, m := range usable {
		u := (float64(hashOf(client, m.addr)>>11) + 0.5) / (1 << 53) // within 0 and 1, without these
		if score := -share(m) / math.Log(u); score > most {
			best, most = m, score
		}
	}
	return best
}
