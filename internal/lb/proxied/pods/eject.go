package pods

import (
	"cmp"
	"fmt"
	"time"
)

const (
	// ejectFor is how long a member is left out after failures, twice as long after each further time, and mostEject is the
	// most.
	ejectFor  = 5 * time.Second
	mostEject = time.Minute
	// defaultShare is which part of the members may be left out, in percent: when more fail, the cause may be here, and the
	// others would have all the load.
	defaultShare = 50
)

// Failed notes that a member could not be reached: Pick leaves it out for some seconds, as checks may be rare or absent.
func (p *Pool) Failed(m *Member, err error) {
	m.count.Failed()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.eject(m, "cannot connect: "+err.Error())
}

// eject leaves a member out, unless too many are. It reports whether that is so. The caller holds mu.
func (p *Pool) eject(m *Member, why string) bool {
	now := time.Now()
	if m.gone || now.Before(m.ejected) || p.o.Eject.Off {
		return false
	}
	out := 0
	for _, other := range p.members {
		if now.Before(other.ejected) {
			out++
		}
	}
	one := out == 0 && len(p.members) > 1 // whatever the share is
	if !one && (out+1)*100 > cmp.Or(p.o.Eject.Share, defaultShare)*len(p.members) {
		return false
	}
	m.ejected = now.Add(min(mostEject, ejectFor<<min(m.failures, 8)))
	m.failures++
	p.ready = nil
	m.count.Ejected()
	p.absences.add(m, Absence{Service: p.service, Pod: m.addr, Ejected: true, Reason: why, Since: now, until: m.ejected})
	p.log.Info("an endpoint fails; others get its clients", "endpoint", m.addr, "why", why, "for", m.ejected.Sub(now))
	return true
}

// Reached notes that a member was reached. That does not end an ejection for its answers.
func (p *Pool) Reached(m *Member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m.failures > 0 && !m.onTrial.Load() {
		p.restore(m)
	}
}

// restore ends an ejection. The caller holds mu.
func (p *Pool) restore(m *Member) {
	m.failures = 0
	m.errors.Store(0)
	p.absences.remove(m, true)
	if !m.ejected.IsZero() {
		m.ejected, p.ready = time.Time{}, nil
	}
}

// Answered notes how a member has answered a request: with a status, or 0 and an error. Where the Service asks for it,
// statuses of 500 and more, and requests without an answer, in a row eject the member.
func (p *Pool) Answered(m *Member, status int, err error, after time.Duration) {
	m.count.Answered(status, after)
	limit := p.errors.Load()
	if limit == 0 {
		return
	}
	if status > 0 && status < 500 {
		m.hasAnsweredWell(p)
		return
	}
	n := m.errors.Add(1)
	if n < limit && !m.onTrial.Load() { // who comes back from that has one try
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.o.Eject.Errors == 0 { // by now
		return
	}
	last := fmt.Sprintf("status %d", status)
	if status == 0 {
		last = fmt.Sprint(err)
	}
	if p.eject(m, fmt.Sprintf("%d requests failed in a row, the last one with: %s", n, last)) {
		m.onTrial.Store(true)
	}
}

// AnsweredPage is Answered for a page in place of an answer. A status of 500 and more is the one of what it stands for: it tells
// nothing about the member.
func (p *Pool) AnsweredPage(m *Member, status int, after time.Duration) {
	m.count.Answered(status, after)
	if status < 500 && p.errors.Load() != 0 {
		m.hasAnsweredWell(p)
	}
}

// hasAnsweredWell notes that a member of a pool has not failed.
func (m *Member) hasAnsweredWell(p *Pool) {
	if m.errors.Load() != 0 {
		m.errors.Store(0)
	}
	if m.onTrial.Load() {
		p.pass(m)
	}
}

// pass ends the trial of a member that has answered well after its ejection. Answers to what it had before do not count.
func (p *Pool) pass(m *Member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !time.Now().Before(m.ejected) {
		m.onTrial.Store(false)
		p.restore(m)
	}
}

// withoutEjected leaves out members that were ejected, and notes when the next of them returns. all are the members with a
// weight, of which fewer than a share must not have all the load. The caller holds mu.
func (p *Pool) withoutEjected(members, all []*Member) []*Member {
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
	switch few := len(out)*100 < p.o.Eject.Panic*len(all); {
	case few && !p.o.Checks.FailClosed:
		return all
	case few, len(out) == 0:
		return members
	}
	return out
}
