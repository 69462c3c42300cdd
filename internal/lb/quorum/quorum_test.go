package quorum

import (
	"flag"
	"testing"
	"time"
)

var seeds = flag.Int("seeds", 240, "schedules of faults to simulate")

// No address has two holders at any true moment, whatever happens; and soon after
// the last fault each has the one that it should have.
func TestNeverTwoHolders(t *testing.T) {
	for shard := range 4 {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			for seed := shard; seed < *seeds; seed += 4 {
				s := newSimulation(t, uint64(seed), 1+seed%6, 6)
				if seed%12 == 1 { // two speakers, of which one is not upgraded yet
					s.machines[0].older = true
					s.machines[0].witness.term = LongestTerm
				}
				if broken := s.storm(8 * time.Second); broken != "" {
					t.Fatalf("seed %d: %s", seed, broken)
				}
				// What was sent before the healing may be 3 s late, and the lists change one voter at a time.
				s.run(s.now + 3*time.Second)
				if s.run(s.now + 3*time.Second); s.broken != "" {
					t.Fatalf("seed %d: %s", seed, s.broken)
				}
				if bad := s.unheld(); len(bad) > 0 {
					t.Fatalf("seed %d with %d speakers, lists %+v: %s", seed, len(s.machines), s.lists, bad)
				}
				s.rebalance()
				s.run(s.now + 2*time.Second)
				if bad := s.unsettled(); len(bad) > 0 || s.broken != "" {
					t.Fatalf("seed %d with %d speakers, lists %+v: %s %s", seed, len(s.machines), s.lists, bad, s.broken)
				}
			}
		})
	}
}

// The simulation finds mistakes of the kinds that the argument in doc.go excludes.
func TestSimulationFindsMistakes(t *testing.T) {
	for name, mistake := range map[string]func(s *simulation){
		"the witness counts after it was given back": func(s *simulation) { s.lateRelease = true },
		"a witness that was made again is free":      func(s *simulation) { s.remade = "" },
		"an older build has the same term": func(s *simulation) {
			s.sameTerms, s.machines[0].older, s.machines[0].witness.term = true, true, LongestTerm
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range 2000 {
				s := newSimulation(t, uint64(seed), 2+seed%2, 6)
				if mistake(s); s.storm(8*time.Second) != "" {
					return
				}
			}
			t.Error("2,000 schedules of faults did not find it")
		})
	}
	for name, bug := range map[string]func(m *machine, s *simulation, from string, msg *Message){
		"a promise counts from when its reply was received": func(m *machine, s *simulation, from string, msg *Message) {
			if p := m.node.peer(from); p != nil && msg.Kind == Reply && msg.Promised {
				p.until = s.local(m) + Counted
			}
		},
		"a voter promises as soon as it is started": func(m *machine, _ *simulation, _ string, _ *Message) {
			m.node.voter.silent = 0
		},
		"old requests are accepted": func(m *machine, _ *simulation, from string, _ *Message) {
			if x := m.node.voter.sessions[from]; x != nil {
				x.nonce = 0
			}
		},
		"a voter keeps its promises for too short a time": func(m *machine, s *simulation, _ string, _ *Message) {
			for _, x := range m.node.voter.sessions {
				x.expires = min(x.expires, s.local(m)+Promise/2)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range 600 {
				s := newSimulation(t, uint64(seed), 3+seed%3, 6)
				s.bug = func(m *machine, from string, msg *Message) { bug(m, s, from, msg) }
				if s.storm(8*time.Second) != "" {
					return
				}
			}
			t.Error("600 schedules of faults did not find it")
		})
	}
}
