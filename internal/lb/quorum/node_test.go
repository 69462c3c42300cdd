package quorum

import (
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"
)

// A dead speaker's addresses have new holders within two seconds, and no others move.
func TestTakeOver(t *testing.T) {
	for _, machines := range []int{2, 3, 5, 9} {
		t.Run(strconv.Itoa(machines), func(t *testing.T) {
			t.Parallel()
			s := newSimulation(t, 1, machines, 40)
			s.run(4 * time.Second)
			if bad := s.unsettled(); len(bad) > 0 {
				t.Fatal(bad)
			}
			dead := s.machines[1]
			before, owned := s.moves, 0
			for _, k := range s.keys {
				if s.owners[k] == dead.name {
					owned++
				}
			}
			dead.node = nil
			dead.life++
			s.run(s.now + 2*time.Second)
			for _, k := range s.keys {
				if !slices.ContainsFunc(s.machines, func(m *machine) bool { return m.node != nil && m.node.Holds(s.local(m), k) }) {
					t.Errorf("%s has no holder", k)
				}
			}
			if moved := s.moves - before; moved != owned || owned == 0 {
				t.Errorf("%d addresses moved, %d were the dead speaker's", moved, owned)
			}
		})
	}
}

// longest returns the longest time at a stretch, of the next d, for which an address has no holder.
func (s *simulation) longest(d time.Duration) (gap time.Duration) {
	since := map[netip.Addr]time.Duration{}
	for end := s.now + d; s.now < end; s.run(s.now + time.Millisecond) {
		for _, k := range s.keys {
			begin, without := since[k]
			switch {
			case slices.ContainsFunc(s.machines, func(m *machine) bool { return m.node != nil && m.node.Holds(s.local(m), k) }):
				delete(since, k)
			case without:
				gap = max(gap, s.now-begin)
			default:
				since[k] = s.now
			}
		}
	}
	return gap
}

func (s *simulation) kill(m *machine) {
	m.node = nil
	m.life++
}

// A holder whose term has expired is removed by a speaker that does not need the witness, so that one that was just
// started, and has not seen the term pass, can take it at once.
func TestExpiredHolderIsRemoved(t *testing.T) {
	for _, term := range []time.Duration{WitnessTerm, LongestTerm} {
		const begin = time.Hour
		idle := NewWitness("idle")
		idle.Observe(begin, "dead", term, "1")
		if action, _ := idle.Next(begin+term-1, false); action != WitnessNothing {
			t.Errorf("term %s: action %d before it has expired", term, action)
		}
		if action, version := idle.Next(begin+term, false); action != WitnessRelease || version != "1" {
			t.Errorf("term %s: action %d of version %q, want the release of version 1", term, action, version)
		}
		idle.Observe(begin+term, "", term, "2")
		if action, _ := idle.Next(begin+2*term, false); action != WitnessNothing {
			t.Errorf("term %s: action %d without a holder", term, action)
		}
		started := NewWitness("started")
		started.Observe(begin+term, "", term, "2")
		if action, version := started.Next(begin+term, true); action != WitnessTake || version != "2" {
			t.Errorf("term %s: action %d of version %q, want to take version 2", term, action, version)
		}
	}
}

// Of two speakers the holder of the witness dies, which it needed since the other one had just died
// itself: that one takes over within two seconds.
func TestHolderOfWitnessDies(t *testing.T) {
	for seed := range uint64(40) {
		s := newSimulation(t, seed, 2, 10)
		s.run(4 * time.Second)
		a, b := s.machines[0], s.machines[1]
		s.kill(a)
		s.run(s.now + 2*time.Second)
		s.start(a)
		// a votes a second later, and b gives the witness back after another one.
		s.run(s.now + 1200*time.Millisecond + time.Duration(s.rng.Int64N(int64(500*time.Millisecond))))
		if s.lease.holder != b.witness.self || len(a.node.Reached(s.local(a))) != 2 {
			t.Fatalf("seed %d: %q has the witness, want %q; %s heard", seed, s.lease.holder, b.witness.self, a.node.Reached(s.local(a)))
		}
		s.kill(b)
		if gap := s.longest(8 * time.Second); gap > 2*time.Second || s.broken != "" {
			t.Errorf("seed %d: addresses without a holder for %s; %s", seed, gap, s.broken)
		}
	}
}

// A speaker that ends in order leaves no address without a holder for longer than some messages and
// writes take, even if the others have been restarted just before. One that returns has its addresses again, and
// none has moved: it waits for a voter that was restarted, and of two for its own vote.
func TestEndAfterRestart(t *testing.T) {
	for _, machines := range []int{2, 3, 5} {
		for seed := range uint64(20) {
			s := newSimulation(t, seed, machines, 10)
			s.run(6 * time.Second)
			var next func(i int)
			next = func(i int) {
				if i == machines {
					return
				}
				m := s.machines[i]
				s.end(m, seed%2 == 0, func() {
					s.start(m)
					s.after(100*time.Millisecond, func() { next(i + 1) })
				})
			}
			next(0)
			moves := s.moves
			gap := s.longest(time.Duration(machines) * 3 * time.Second)
			most := 200 * time.Millisecond
			if seed%2 == 0 {
				most = map[int]time.Duration{2: 1500 * time.Millisecond, 3: 1200 * time.Millisecond, 5: 500 * time.Millisecond}[machines]
			}
			if gap > most || s.broken != "" {
				t.Errorf("seed %d, %d speakers: addresses without a holder for %s; %s", seed, machines, gap, s.broken)
			}
			if seed%2 == 0 {
				if s.moves != moves {
					t.Errorf("seed %d, %d speakers that return: %d moves", seed, machines, s.moves-moves)
				}
			} else {
				s.rebalance()
				s.run(s.now + 2*time.Second)
			}
			if bad := s.unsettled(); len(bad) > 0 {
				t.Errorf("seed %d, %d speakers: %s", seed, machines, bad)
			}
		}
	}
}

// One address of three or five speakers stays where it is while all are restarted, each as soon as the one before is up: one
// without an address also waits until the others can do without its vote.
func TestRestartsOneRightAfterTheOther(t *testing.T) {
	for _, machines := range []int{3, 5} {
		for seed := range uint64(30) {
			s := newSimulation(t, seed, machines, 1)
			s.run(6 * time.Second)
			ended := 0
			var next func(i int)
			next = func(i int) {
				if i == 2*machines {
					return
				}
				m := s.machines[i%machines]
				s.end(m, true, func() {
					ended++
					s.start(m)
					s.after(time.Duration(s.rng.Int64N(int64(200*time.Millisecond))), func() { next(i + 1) })
				})
			}
			next(0)
			moves := s.moves
			s.run(s.now + time.Duration(machines)*5*time.Second)
			if s.moves != moves || s.broken != "" || ended != 2*machines {
				t.Errorf("seed %d, %d speakers: %d moves in %d restarts; %s", seed, machines, s.moves-moves, ended, s.broken)
			}
		}
	}
}

// A speaker that waits for addresses which others keep asks for each a few times in a minute, and still takes over at once.
func TestWaitingIsQuiet(t *testing.T) {
	for seed := range uint64(5) {
		s := newSimulation(t, seed, 3, 20)
		s.run(6 * time.Second)
		m := s.machines[0]
		s.kill(m)
		s.run(s.now + 3*time.Second)
		s.start(m)
		s.run(s.now + time.Minute)
		waits := 0
		for _, k := range s.keys {
			if m.node.Wants(k) && !m.node.Holds(s.local(m), k) {
				waits++
			}
		}
		const minutes, most = 2, 40 // changes of what it asks for, five for each time that it asks
		before := m.node.asker.version
		s.run(s.now + minutes*time.Minute)
		if n := m.node.asker.version - before; waits == 0 || n > uint64(waits*minutes*most) {
			t.Errorf("seed %d: %d changes in %d minutes for %d addresses, want at most %d for each and minute", seed, n, minutes, waits, most)
		}
		s.kill(s.machines[1])
		if gap := s.longest(4 * time.Second); gap > 2*time.Second || s.broken != "" {
			t.Errorf("seed %d: addresses without a holder for %s; %s", seed, gap, s.broken)
		}
	}
}

// A process that ends in order leaves its name to the next at once, and an end that is late ends nothing else.
func TestEndOfSession(t *testing.T) {
	random := uint64(100)
	v := newVoter(-Promise, func() uint64 { random += 2; return random })
	open := func(nonce uint64) uint64 {
		r, _ := v.request(0, "a", &Message{Kind: Request, Nonce: nonce})
		if r.Offer == 0 {
			t.Fatal("no session is offered")
		}
		k := []netip.Addr{netip.MustParseAddr("192.0.2.1")}
		r, _ = v.request(0, "a", &Message{Kind: Request, Session: r.Offer, Nonce: nonce + 1, Adds: k, UpTo: 1})
		if !r.Promised || r.Refused != nil {
			t.Fatalf("%+v", r)
		}
		return r.Session
	}
	first := open(1)
	v.request(0, "a", &Message{Kind: Request, Session: first, Nonce: 2, End: true})
	if v.sessions["a"] == nil {
		t.Error("an end with an old nonce ends the session")
	}
	end := &Message{Kind: Request, Session: first, Nonce: 3, End: true}
	if v.request(0, "a", end); v.sessions["a"] != nil || len(v.grants) > 0 {
		t.Error("the session has not ended")
	}
	second := open(1)
	v.request(0, "a", end)
	if s := v.sessions["a"]; s == nil || s.number != second || len(v.grants) != 1 {
		t.Error("a late end ends another session")
	}
}

// What a speaker that returns was promised is kept for it, also from a request that is late, for as long as it said, and
// not longer than MaxAway; then the speakers that wait are told.
func TestKeptForOneThatReturns(t *testing.T) {
	random := uint64(100)
	v := newVoter(-Promise, func() uint64 { random += 2; return random })
	k := []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	nonce := uint64(0)
	ask := func(now time.Duration, who string) (refused bool) {
		nonce += 2
		r, _ := v.request(now, who, &Message{Kind: Request, Nonce: nonce})
		r, _ = v.request(now, who, &Message{Kind: Request, Session: r.Offer, Nonce: nonce + 1, Adds: k, UpTo: 1})
		return len(r.Refused) > 0
	}
	leave := func(now time.Duration, who string, away time.Duration) {
		nonce += 2
		m := &Message{Kind: Request, Session: v.sessions[who].number, Nonce: nonce, End: true, UpTo: uint64(away.Milliseconds())}
		v.request(now, who, m)
		v.request(now, who, m) // it is sent several times
		if v.sessions[who] != nil {
			t.Fatal("the session has not ended")
		}
	}
	for _, c := range []struct{ away, at time.Duration }{{3 * time.Second, 3 * time.Second}, {time.Hour, MaxAway}} {
		begin := time.Duration(random) * time.Hour
		if ask(begin, "a") {
			t.Fatal("a free address is refused")
		}
		leave(begin, "a", c.away)
		if !ask(begin+c.at-1, "b") {
			t.Errorf("away for %s: another one gets the address after %s", c.away, c.at-1)
		}
		if notify := v.expire(begin + c.at); !slices.Contains(notify, "b") {
			t.Errorf("%s are told after %s, want b", notify, c.at)
		}
		if ask(begin+2*c.at+Promise, "b") {
			t.Errorf("away for %s: it is still kept", c.away)
		}
		v.expire(begin + 3*c.at + 2*Promise)
	}
	begin := time.Duration(1000) * time.Hour
	ask(begin, "a")
	leave(begin, "a", 3*time.Second)
	if ask(begin+time.Second, "a") {
		t.Error("what is kept for it is refused to it")
	}
	if v.expire(begin + 3*time.Second); v.sessions["a"] != nil && v.grants[k[0]] == nil {
		t.Error("what it has again ends when it would have been kept until")
	}
}

// Messages in quiet times do not grow with the addresses, and ten thousand are
// asked for and taken over quickly.
func TestManyAddresses(t *testing.T) {
	traffic := func(keys int) int {
		s := newSimulation(t, 1, 3, keys)
		s.run(4 * time.Second)
		if bad := s.unsettled(); len(bad) > 0 {
			t.Fatalf("%d of %d addresses: %s", len(bad), keys, bad[0])
		}
		s.messages = 0
		s.run(s.now + time.Second)
		return s.messages
	}
	// Three speakers, two other voters each, five times a second, with replies.
	if few, many := traffic(1), traffic(10_000); many > few+few/10 || few > 70 { // a heartbeat more or less
		t.Errorf("%d messages in a second with one address, %d with 10,000; want the same, at most 70", few, many)
	}
}

func BenchmarkHolds(b *testing.B) {
	n := NewNode("a", 0, func() uint64 { return 4 })
	n.SetList(2*Promise, List{Version: 1, Voters: []Voter{{Name: "a"}}})
	a := netip.MustParseAddr("192.0.2.1")
	n.Want(2*Promise, []netip.Addr{a}, nil)
	if !n.Holds(2*Promise, a) {
		b.Fatal("one speaker does not hold")
	}
	for b.Loop() {
		n.Holds(2*Promise, a)
	}
}

func TestNextList(t *testing.T) {
	candidates := func(confirmed uint64, names ...string) (out []Candidate) {
		for _, n := range names {
			out = append(out, Candidate{Voter: Voter{Name: n, Address: n + ":1"}, Confirmed: confirmed})
		}
		return out
	}
	names := func(l List) (out string) {
		for _, v := range l.Voters {
			out += v.Name
		}
		if l.Witness {
			out += "+"
		}
		return out
	}
	// Each step is the list that follows when everybody has confirmed the one before. Speakers in capitals are gone, those
	// after a "-" are down.
	for _, steps := range [][]string{
		{"a: a", "ab: ab", "ab: ab+", "abc: abc+", "abc: abc", "abcd: abc", "abcde: abcd", "abcde: abcde"},
		{"ab: ab+", "aB: a+", "aB: a", "aBc: ac", "aBc: ac+"},
		{"abcde: abcde", "abcdE: abcd", "abcdE: abc"},
		{"abcdefghi: abcdefg"},
		{"a: a", "A: a", "Ab: ab", "Ab: b", "Ab: b"},
		{"ab: ab+", "ABc: b+", "ABc: bc+", "ABc: c+", "ABc: c"},
		// One of three is down: two and the witness are left, until it returns. A second one changes nothing.
		{"abc: abc", "ac-b: ac", "ac-b: ac+", "a-bc: ac+", "ab-c: abc+", "ab-c: ab+", "abc: abc+", "abc: abc"},
		{"abc: abc", "a-bc: abc", "-abc: abc"},
		{"abcde: abcde", "abc-de: abce", "abc-de: abc", "abcd-e: abc"},
		{"abcde: abcde", "ab-cde: abcde"},
		{"ab: ab+", "a-b: ab+"},
	} {
		var l Lists
		for _, step := range steps {
			who, want, _ := cutStep(step)
			var cs []Candidate
			down := false
			for _, r := range who {
				if r == '-' {
					down = true
					continue
				}
				c := candidates(l.Current.Version, string(r|0x20))[0]
				c.Gone, c.Down = r < 'a', down
				cs = append(cs, c)
			}
			before := l
			l, _ = Next(l, cs)
			if names(l.Current) != want {
				t.Errorf("%s: after %q, %s leads to %q, want %q", steps, names(before.Current), who, names(l.Current), want)
			}
		}
	}
	l, _ := Next(Lists{}, candidates(0, "a", "b", "c", "d", "e"))
	l, _ = Next(l, append(candidates(1, "a", "b", "c", "d"), Candidate{Voter: Voter{Name: "e", Address: "e:1"}, Gone: true}))
	if names(l.Current) != "abcd" {
		t.Fatalf("%+v", l)
	}
	slow := append(candidates(2, "a", "b"), candidates(1, "c", "d")...)
	if after, changed := Next(l, slow); changed {
		t.Errorf("two of five use the list, and it is followed by %+v", after)
	}
	if _, changed := Next(Lists{}, candidates(7, "a", "b")); changed {
		t.Error("a list that speakers still use is written again from nothing")
	}
	gone := Candidate{Voter: Voter{Name: "x"}, Confirmed: 9, Gone: true}
	if l, _ := Next(Lists{}, append(candidates(0, "a"), gone)); l.Current.Version != 1 || names(l.Current) != "a" {
		t.Errorf("what was confirmed by a speaker that is gone leads to %+v", l)
	}
	lost := append(candidates(7, "a", "b", "c"), gone)
	lost[1].List = List{Version: 7, Voters: []Voter{{Name: "a"}, {Name: "b"}, {Name: "c"}}}
	lost[2].Confirmed = 6
	lost[2].List = List{Version: 6, Voters: []Voter{{Name: "a"}, {Name: "b"}}}
	l, changed := Next(Lists{}, lost)
	if !changed || l.Current.Version != 11 || names(l.Current) != "abc" || l.Previous.Version != 7 {
		t.Fatalf("a lost list is restored as %+v", l)
	}
	if after, changed := Next(l, append(candidates(11, "a"), candidates(7, "b", "c", "d", "e")...)); changed {
		t.Errorf("one of three uses the restored list, and it is followed by %+v", after)
	}
}

func cutStep(s string) (before, after string, ok bool) {
	for i := range s {
		if s[i] == ':' {
			return s[:i], s[i+2:], true
		}
	}
	return s, "", false
}
