package quorum

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

func (s *simulation) fault() {
	m := s.machines[s.rng.IntN(len(s.machines))]
	o := s.machines[s.rng.IntN(len(s.machines))]
	switch s.rng.IntN(17) {
	case 0, 1: // killed, and perhaps restarted at once
		if m.node == nil {
			break
		}
		m.node = nil
		m.life++
		s.after(time.Duration(s.rng.Int64N(int64(2*time.Second))), func() {
			if m.node == nil && !m.gone {
				s.start(m)
			}
		})
	case 2, 3: // stopped and continued
		if m.node == nil || m.paused {
			break
		}
		m.paused = true
		life := m.life
		s.after(time.Duration(s.rng.Int64N(int64(3*time.Second))), func() {
			if m.life == life {
				s.resume(m)
			}
		})
	case 4, 5, 6: // a way lost, in one direction or both
		s.cut[[2]string{m.name, o.name}] = true
		if s.rng.IntN(2) == 0 {
			s.cut[[2]string{o.name, m.name}] = true
		}
	case 7:
		clear(s.cut)
	case 8: // a network in two
		for _, a := range s.machines {
			for _, b := range s.machines {
				if s.rng.IntN(3) == 0 {
					s.cut[[2]string{a.name, b.name}], s.cut[[2]string{b.name, a.name}] = true, true
				}
			}
		}
	case 9:
		m.apiless = !m.apiless
	case 10:
		m.ready = !m.ready
		if m.node != nil {
			s.do(m, func() { s.attrs(m) })
		}
	case 11: // its Node is deleted, or comes back
		if m.gone = m.node == nil && !m.gone; !m.gone && m.node == nil {
			s.start(m)
		}
	case 12: // ended in order, and perhaps restarted at once
		s.end(m, s.rng.IntN(2) == 0, func() {
			s.after(time.Duration(s.rng.Int64N(int64(2*time.Second)*int64(s.rng.IntN(2))+1)), func() {
				if m.node == nil && !m.gone {
					s.start(m)
				}
			})
		})
	case 13:
		s.drift(m)
	case 14: // the Lease of the witness is deleted, and made again
		s.writeLease(s.remade, LongestTerm)
	case 15: // the ConfigMap is deleted while no controller runs
		s.lists = Lists{}
	case 16: // the API server hears of it no more, or again, whatever it does
		m.down = !m.down
	}
}

// end is what internal/lb does on SIGTERM: m goes on until others can take over, for two
// seconds at most, gives up everything, and ends when that is known. One that returns has
// the voters keep what it holds.
func (s *simulation) end(m *machine, returns bool, ended func()) {
	if m.node == nil || m.paused {
		return
	}
	begin, life := s.now, m.life
	var poll func()
	poll = func() {
		mayEnd := func() bool {
			if returns {
				return m.node.Keepable(s.local(m), len(s.heldBy(m)) > 0)
			}
			return m.node.Replaceable(s.local(m))
		}
		switch late := s.now - begin; {
		case m.life != life || m.node == nil:
			return
		case m.paused:
		case !m.ending && (late > 2*time.Second || mayEnd()):
			begin = s.now
			s.do(m, func() {
				m.ending = true
				m.node.SetAttrs(s.local(m), "")
				if returns {
					m.returning = s.heldBy(m)
				} else {
					m.node.Want(s.local(m), nil, s.keys)
				}
				s.lookAtAPI(m)
			})
		case m.ending && (late > 500*time.Millisecond || m.node.Released(s.local(m)) && !m.node.HasWitness()):
			s.do(m, func() {
				away := time.Duration(0)
				if returns {
					away = 5 * time.Second
				}
				m.node.End(s.local(m), away)
			})
			m.node = nil
			m.life++
			ended()
			return
		}
		s.after(5*time.Millisecond, poll)
	}
	poll()
}

// heldBy returns what m holds.
func (s *simulation) heldBy(m *machine) (held []netip.Addr) {
	for _, k := range s.keys {
		if m.node.Holds(s.local(m), k) {
			held = append(held, k)
		}
	}
	return held
}

func (s *simulation) resume(m *machine) {
	if !m.paused || m.node == nil {
		return
	}
	m.paused = false
	waiting := m.waiting
	m.waiting = nil
	for _, f := range waiting {
		s.do(m, f)
	}
	s.wake(m)
}

func (s *simulation) heal() {
	s.chaos = false
	clear(s.cut)
	for _, m := range s.machines {
		m.apiless, m.ready, m.gone, m.down = false, true, false, false
		if m.node == nil {
			s.start(m)
		}
		s.resume(m)
		s.do(m, func() { s.attrs(m) })
	}
}

// storm runs one schedule of faults and returns what broke, "" if nothing did.
func (s *simulation) storm(length time.Duration) string {
	var authors, faults func()
	authors = func() { s.author(); s.after(300*time.Millisecond, authors) }
	authors()
	s.run(2 * time.Second)
	s.chaos = true
	faults = func() {
		if s.chaos {
			s.fault()
			s.after(time.Duration(s.rng.Int64N(int64(600*time.Millisecond))), faults)
		}
	}
	faults()
	s.run(s.now + length)
	s.heal()
	return s.broken
}

// unsettled returns which addresses do not have the owner that they should have after a rebalance.
func (s *simulation) unsettled() (out []string) {
	var members []Member
	for _, m := range s.machines {
		members = append(members, Member{m.name, "ready"})
	}
	for _, k := range s.keys {
		want := Owner(k, members, nil)
		for _, m := range s.machines {
			if holds := m.node.Holds(s.local(m), k); holds != (m.name == want) {
				out = append(out, fmt.Sprintf("%s: %s holds it: %t, should: %s", k, m.name, holds, want))
			}
		}
	}
	return out
}

// unheld returns which addresses have no holder.
func (s *simulation) unheld() (out []string) {
	for _, k := range s.keys {
		if !slices.ContainsFunc(s.machines, func(m *machine) bool { return m.node != nil && m.node.Holds(s.local(m), k) }) {
			out = append(out, fmt.Sprintf("%s has no holder", k))
		}
	}
	return out
}
