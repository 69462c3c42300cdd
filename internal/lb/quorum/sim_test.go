package quorum

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"testing"
	"time"
)

// The simulation runs speakers, a network and the author of the lists by events in true time.
// Each speaker has a clock of its own, which is wrong by value and by rate.

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
	name    string
	offset  time.Duration
	rate    float64
	node    *Node // nil while it is down
	life    int
	paused  bool
	waiting []func() // what arrived meanwhile
	wakes   time.Duration
	apiless bool
	ready   bool
	witness *Witness
	gone    bool
}

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
	lists    Lists
	lease    struct {
		holder  string
		version int
	}
	owners   map[netip.Addr]string
	moves    int
	messages int
	// bug is a mistake to make on purpose, to see that the simulation finds it.
	bug    func(m *machine, from string, msg *Message)
	broken string // the first violation
}

func newSimulation(t *testing.T, seed uint64, machines, keys int) *simulation {
	s := &simulation{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), byName: map[string]*machine{}, cut: map[[2]string]bool{},
		owners: map[netip.Addr]string{},
	}
	for i := range keys {
		s.keys = append(s.keys, netip.AddrFrom4([4]byte{10, 0, byte(i / 256), byte(i)}))
	}
	for i := range machines {
		m := &machine{
			name: "n" + strconv.Itoa(i), offset: time.Duration(s.rng.Int64N(int64(time.Hour))), rate: 0.98 + 0.04*s.rng.Float64(), ready: true,
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
	return m.offset + time.Duration(float64(s.now)*m.rate)
}

func (s *simulation) start(m *machine) {
	m.life++
	m.paused, m.waiting = false, nil
	m.node = NewNode(m.name, s.local(m), s.rng.Uint64)
	m.witness = NewWitness(fmt.Sprint(m.name, m.life))
	m.wakes = 0
	s.do(m, func() {
		if !m.apiless {
			m.node.SetList(s.local(m), s.lists.Current)
		}
		s.attrs(m)
	})
	s.every(m, 100*time.Millisecond, func() { s.lookAtAPI(m) })
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
	m.witness.Observe(s.local(m), s.lease.holder, strconv.Itoa(s.lease.version))
	action, version := m.witness.Next(s.local(m), m.node.NeedsWitness(s.local(m)))
	m.node.SetWitness(m.witness.Until())
	if action == WitnessNothing {
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
		s.lease.version++
		s.lease.holder = holder
		now := strconv.Itoa(s.lease.version)
		s.after(s.delay(), func() {
			if m.life == life && m.node != nil && holder != "" {
				s.do(m, func() {
					m.witness.Wrote(s.local(m), sent, now)
					m.node.SetWitness(m.witness.Until())
				})
			}
		})
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
	for _, e := range m.node.Take() {
		s.send(m, e)
	}
	s.check(m)
	s.wake(m)
}

// decide is what internal/lb does: it wants what the members say is its own.
func (s *simulation) decide(m *machine) {
	members, ok := m.node.Members(s.local(m))
	if !ok {
		return
	}
	var add, remove []netip.Addr
	for _, k := range s.keys {
		mine := Owner(k, members, nil) == m.name && m.ready
		if mine == m.node.Wants(k) {
			continue
		}
		if mine {
			add = append(add, k)
		} else {
			remove = append(remove, k)
		}
	}
	if len(add)+len(remove) > 0 {
		m.node.Want(s.local(m), add, remove)
	}
}

func (s *simulation) wake(m *machine) {
	at := time.Duration(float64(m.node.Next()-m.offset)/m.rate) + time.Microsecond
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
	for _, k := range s.keys {
		if !m.node.Holds(s.local(m), k) {
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
		c := Candidate{Voter: Voter{Name: m.name}, Gone: m.gone}
		if m.node != nil && !m.paused && !m.apiless {
			c.Confirmed = m.node.Confirmed(s.local(m))
		}
		cs = append(cs, c)
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

func (s *simulation) fault() {
	m := s.machines[s.rng.IntN(len(s.machines))]
	o := s.machines[s.rng.IntN(len(s.machines))]
	switch s.rng.IntN(12) {
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
	}
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
		m.apiless, m.ready, m.gone = false, true, false
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

// unsettled returns which addresses do not have the owner that they should have.
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
