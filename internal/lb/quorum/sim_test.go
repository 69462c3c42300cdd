package quorum

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"
)

// The simulation runs speakers, a network and the author of the lists by events in true time.
// Each speaker has its own clock, which is wrong by value and by rate.

type event struct {
	at    time.Duration
	order int
	do    func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].order < e[j].order
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	old := *e
	x := old[len(old)-1]
	*e = old[:len(old)-1]
	return x
}

// machine is one speaker's process and clock.
type machine struct {
	name string
	// The clock showed base at the true time from, and goes at rate since.
	base, from time.Duration
	rate       float64

	node    *Node // nil while it is down
	life    int
	paused  bool
	waiting []func() // what arrived meanwhile
	wakes   time.Duration
	apiless bool
	ready   bool
	witness *Witness
	needed  bool // the witness is
	// decided are the members by which decide has decided, and whether m was ready.
	decided struct {
		done, ready bool
		members     []Member
	}
	gone  bool
	down  bool // the API server does not hear of it, or so it seems
	older bool // it is of a build whose witness has LongestTerm
	// ending is true once it gives up what it holds, to end in order.
	ending bool
	// returning are the addresses that it held when it ended to be restarted; the next life asks for them at once.
	returning []netip.Addr
	// started is the true time of its start, cold are addresses that it took within coldFor after it, from no other that it knew
	// of. They are cold for as long.
	started time.Duration
	cold    map[netip.Addr]bool
	// reported is the list that it has confirmed, as its Speaker object has it: that
	// outlives the process.
	reported List
}

// coldFor is the time after a speaker's start in which it gives addresses to those that should have them.
const coldFor = 3 * time.Second

type simulation struct {
	t        *testing.T
	rng      *rand.Rand
	now      time.Duration
	queue    events
	order    int
	machines []*machine
	byName   map[string]*machine
	cut      map[[2]string]bool
	chaos    bool
	keys     []netip.Addr
	checked  []netip.Addr // those of keys that check looks at
	lists    Lists
	lease    struct {
		holder  string
		term    time.Duration
		version int
	}
	owners   map[netip.Addr]string
	moves    int
	messages int
	remade   string // holder of a Lease that was deleted and made again
	// lateRelease is the mistake to count on the witness after it was given back.
	lateRelease bool
	// sameTerms is the mistake to believe that all builds have the same term.
	sameTerms bool
	// bug is a mistake to make on purpose, to see that the simulation finds it.
	bug    func(m *machine, from string, msg *Message)
	broken string // the first violation
}

func newSimulation(t *testing.T, seed uint64, machines, keys int) *simulation {
	s := &simulation{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), byName: map[string]*machine{}, cut: map[[2]string]bool{},
		owners: map[netip.Addr]string{}, remade: "just made",
	}
	for i := range keys {
		s.keys = append(s.keys, netip.AddrFrom4([4]byte{10, 0, byte(i / 256), byte(i)}))
	}
	s.checked = s.keys[:min(keys, 1000)]
	for i := range machines {
		m := &machine{
			name: "n" + strconv.Itoa(i), base: time.Duration(s.rng.Int64N(int64(time.Hour))), rate: s.rate(), ready: true,
		}
		s.machines = append(s.machines, m)
		s.byName[m.name] = m
	}
	s.author()
	for _, m := range s.machines {
		s.start(m)
	}
	return s
}

func (s *simulation) after(d time.Duration, do func()) {
	s.order++
	heap.Push(&s.queue, event{s.now + d, s.order, do})
}

// local is what m's clock shows.
func (s *simulation) local(m *machine) time.Duration {
	return m.base + time.Duration(float64(s.now-m.from)*m.rate)
}

// rate is how fast a clock goes: any two differ by less than a tenth.
func (s *simulation) rate() float64 { return 0.955 + 0.09*s.rng.Float64() }

// drift makes m's clock go at another rate from now on. It never steps: CLOCK_BOOTTIME does not.
func (s *simulation) drift(m *machine) {
	m.base, m.from = s.local(m), s.now
	m.rate = s.rate()
}

func (s *simulation) start(m *machine) {
	m.life++
	m.paused, m.waiting, m.needed, m.ending = false, nil, false, false
	m.node = NewNode(m.name, s.local(m), s.rng.Uint64)
	m.started, m.cold = s.now, map[netip.Addr]bool{}
	m.witness = NewWitness(fmt.Sprint(m.name, m.life))
	if m.older {
		m.witness.term = LongestTerm
	}
	m.wakes, m.decided.done = 0, false
	s.do(m, func() {
		if !m.apiless {
			m.node.SetList(s.local(m), s.lists.Current)
		}
		s.attrs(m)
	})
	s.every(m, 100*time.Millisecond, func() { s.lookAtAPI(m) })
	s.every(m, Heartbeat, func() { s.guests(m) })
	if back := m.returning; back != nil {
		m.returning = nil
		s.do(m, func() {
			if m.ready {
				m.node.Want(s.local(m), back, nil)
				m.node.Return(s.local(m), back)
			}
		})
	}
}

func (s *simulation) attrs(m *machine) {
	attrs := ""
	if m.ready {
		attrs = "ready"
	}
	m.node.SetAttrs(s.local(m), attrs)
}

func (s *simulation) every(m *machine, d time.Duration, f func()) {
	life := m.life
	s.after(d, func() {
		if m.life == life && m.node != nil {
			s.do(m, f)
			s.every(m, d, f)
		}
	})
}

// lookAtAPI is the list and the witness.
func (s *simulation) lookAtAPI(m *machine) {
	if m.apiless {
		return
	}
	m.node.SetList(s.local(m), s.lists.Current)
	if v := m.node.Confirmed(s.local(m)); v > m.reported.Version {
		m.reported = m.node.List()
	}
	term := s.lease.term
	if s.sameTerms {
		term = 0
	}
	m.witness.Observe(s.local(m), s.lease.holder, term, strconv.Itoa(s.lease.version))
	action, version := m.witness.Next(s.local(m), m.node.NeedsWitness(s.local(m)))
	if m.ending {
		action, version = m.witness.End()
	}
	switch {
	case action == WitnessRelease && !s.lateRelease: // before the write
		m.node.SetWitness(m.witness.Until())
	case action == WitnessNothing:
		s.copyWitness(m)
		return
	}
	sent, life, holder := s.local(m), m.life, ""
	if action == WitnessTake {
		holder = m.witness.self
	}
	s.after(s.delay(), func() {
		if strconv.Itoa(s.lease.version) != version {
			return
		}
		now := s.writeLease(holder, m.witness.term)
		s.after(s.delay(), func() {
			if m.life == life && m.node != nil && holder != "" {
				s.do(m, func() {
					m.witness.Wrote(s.local(m), sent, now)
					s.copyWitness(m)
				})
			}
		})
	})
	s.copyWitness(m)
}

// writeLease changes the witness, which those that follow it see soon, and returns its version.
func (s *simulation) writeLease(holder string, term time.Duration) string {
	s.lease.version++
	s.lease.holder, s.lease.term = holder, term
	for _, m := range s.machines {
		s.soon(m, s.delay(), func() { s.lookAtAPI(m) })
	}
	return strconv.Itoa(s.lease.version)
}

// copyWitness copies until when the witness counts, at once or at the next heartbeat.
func (s *simulation) copyWitness(m *machine) {
	if s.lateRelease && m.witness.Until() == 0 {
		return
	}
	if s.rng.IntN(2) == 0 {
		m.node.SetWitness(m.witness.Until())
		return
	}
	s.soon(m, time.Duration(s.rng.Int64N(int64(Heartbeat))), func() { m.node.SetWitness(m.witness.Until()) })
}

// soon does something in m's present life.
func (s *simulation) soon(m *machine, d time.Duration, f func()) {
	life := m.life
	s.after(d, func() {
		if m.life == life && m.node != nil {
			s.do(m, f)
		}
	})
}

// do runs something in m's process, when it is not stopped.
func (s *simulation) do(m *machine, f func()) {
	if m.paused {
		if len(m.waiting) < 100 {
			m.waiting = append(m.waiting, f)
		}
		return
	}
	f()
	s.decide(m)
	if needed := m.node.NeedsWitness(s.local(m)); needed != m.needed {
		m.needed = needed
		s.soon(m, s.delay(), func() { s.lookAtAPI(m) })
	}
	for _, e := range m.node.Take() {
		s.send(m, e)
	}
	s.check(m)
	s.wake(m)
}

// decide is what internal/lb does: it wants what the members say is its own.
func (s *simulation) decide(m *machine) {
	members, ok := m.node.Members(s.local(m))
	d := &m.decided
	if !ok || m.ending || d.done && d.ready == m.ready && slices.Equal(d.members, members) {
		return
	}
	before := d.members
	if !d.done {
		before = nil
	}
	d.done, d.ready, d.members = true, m.ready, members
	var add, remove []netip.Addr
	for _, k := range s.keys {
		mine := m.ready && (Owner(k, members, nil) == m.name || s.keeps(m, k))
		if mine == m.node.Wants(k) {
			continue
		}
		if mine {
			old := Owner(k, before, nil)
			m.cold[k] = s.now-m.started < coldFor && (old == "" || old == m.name)
			add = append(add, k)
		} else {
			remove = append(remove, k)
		}
	}
	if len(add)+len(remove) > 0 {
		m.node.Want(s.local(m), add, remove)
	}
}

// keeps reports whether m keeps an address that another one should have.
func (s *simulation) keeps(m *machine, k netip.Addr) bool {
	return !(m.cold[k] && s.now-m.started < coldFor) && m.node.Keeps(s.local(m), k)
}

// guests gives up the addresses that m neither keeps nor should have.
func (s *simulation) guests(m *machine) {
	if m.ending || !m.decided.done {
		return
	}
	var remove []netip.Addr
	for _, k := range s.keys {
		if m.node.Wants(k) && !s.keeps(m, k) && Owner(k, m.decided.members, nil) != m.name {
			remove = append(remove, k)
		}
	}
	if len(remove) > 0 {
		m.node.Want(s.local(m), nil, remove)
	}
}

// rebalance gives every address to its Owner.
func (s *simulation) rebalance() {
	for _, m := range s.machines {
		s.do(m, func() {
			var remove []netip.Addr
			for _, k := range s.keys {
				if m.node.Wants(k) && Owner(k, m.decided.members, nil) != m.name {
					remove = append(remove, k)
				}
			}
			m.node.Want(s.local(m), nil, remove)
		})
	}
}

func (s *simulation) wake(m *machine) {
	at := m.from + time.Duration(float64(m.node.Next()-m.base)/m.rate) + time.Microsecond
	at = max(at, s.now+50*time.Microsecond)
	if m.wakes > s.now && m.wakes <= at {
		return
	}
	m.wakes = at
	life := m.life
	s.after(at-s.now, func() {
		if m.life == life && m.node != nil && m.wakes == at {
			m.wakes = 0
			s.do(m, func() { m.node.Tick(s.local(m)) })
		}
	})
}

func (s *simulation) delay() time.Duration {
	if s.chaos && s.rng.IntN(20) == 0 {
		return time.Duration(s.rng.Int64N(int64(3 * time.Second)))
	}
	return 100*time.Microsecond + time.Duration(s.rng.Int64N(int64(2*time.Millisecond)))
}

func (s *simulation) send(m *machine, e Envelope) {
	s.messages++
	to, copies := s.byName[e.To], 1
	if to == nil || s.cut[[2]string{m.name, e.To}] {
		return
	}
	if s.chaos {
		switch s.rng.IntN(20) {
		case 0, 1:
			return
		case 2:
			copies = 2
		}
	}
	msg := *e.Message
	for range copies {
		s.after(s.delay(), func() {
			if to.node == nil {
				return
			}
			s.do(to, func() {
				c := msg
				to.node.Receive(s.local(to), m.name, &c)
				if s.bug != nil {
					s.bug(to, m.name, &c)
				}
			})
		})
	}
}

// check fails if an address that m holds has another holder.
func (s *simulation) check(m *machine) {
	now := s.local(m)
	for _, k := range s.checked {
		if !m.node.Holds(now, k) {
			continue
		}
		for _, o := range s.machines {
			if o != m && o.node != nil && o.node.Holds(s.local(o), k) && s.broken == "" {
				s.broken = fmt.Sprintf("at %s both %s and %s hold %s (lists %+v)", s.now, m.name, o.name, k, s.lists)
			}
		}
		if s.owners[k] != m.name {
			s.owners[k] = m.name
			s.moves++
		}
	}
}

// author is the controller that writes the lists.
func (s *simulation) author() {
	var cs []Candidate
	for _, m := range s.machines {
		cs = append(cs, Candidate{Voter: Voter{Name: m.name}, Gone: m.gone, Down: m.down, Confirmed: m.reported.Version, List: m.reported})
	}
	if l, changed := Next(s.lists, cs); changed {
		s.lists = l
	}
}

func (s *simulation) run(until time.Duration) {
	for len(s.queue) > 0 && s.queue[0].at <= until && s.broken == "" {
		e := heap.Pop(&s.queue).(event)
		s.now = e.at
		e.do()
	}
	s.now = until
}
