package pods

import "time"

const (
	// ejectFor is how long a member is left out after a failed attempt to reach it, twice as long after each further one, and
	// mostEject is the most.
	ejectFor  = 5 * time.Second
	mostEject = time.Minute
)

// Failed notes that a member could not be reached: Pick leaves it out for some seconds, as checks may be rare or absent. At
// most half of the members are left out so: when more fail, the cause may be here, and the others would have all the load.
func (p *Pool) Failed(m *Member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if m.gone || now.Before(m.ejected) {
		return
	}
	out := 0
	for _, other := range p.members {
		if now.Before(other.ejected) {
			out++
		}
	}
	if 2*(out+1) > len(p.members) {
		return
	}
	m.ejected = now.Add(min(mostEject, ejectFor<<min(m.failures, 8)))
	m.failures++
	p.ready = nil
	p.log.Info("an endpoint cannot be reached; others get its clients", "endpoint", m.addr, "for", m.ejected.Sub(now))
}

// Reached notes that a member was reached.
func (p *Pool) Reached(m *Member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m.failures == 0 {
		return
	}
	m.failures = 0
	if !m.ejected.IsZero() {
		m.ejected, p.ready = time.Time{}, nil
	}
}

// withoutEjected leaves out members that were ejected, and notes when the next of them returns. The caller holds mu.
func (p *Pool) withoutEjected(members []*Member) []*Member {
	now := time.Now()
	p.returns = time.Time{}
	var out []*Member
	for _, m := range members {
		if !now.Before(m.ejected) {
			out = append(out, m)
		} else if p.returns.IsZero() || m.ejected.Before(p.returns) {
			p.returns = m.ejected
		}
	}
	if len(out) == 0 {
		return members
	}
	return out
}
