package bfd

import (
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// pair are two machines that hear each other over paths that a test may cut.
type pair struct {
	a, b   *machine
	now    time.Time
	next   [2]time.Time
	ab, ba bool // the path carries packets
}

func newPair(a, b Config) *pair {
	return &pair{a: newMachine(a, 1), b: newMachine(b, 2), now: time.Unix(1_000_000, 0), ab: true, ba: true}
}

// pass lets time pass in steps of a millisecond.
func (p *pair) pass(d time.Duration) {
	for end := p.now.Add(d); p.now.Before(end); p.now = p.now.Add(time.Millisecond) {
		p.a.expire(p.now)
		p.b.expire(p.now)
		p.send(0, p.a, p.b, p.ab, p.ba)
		p.send(1, p.b, p.a, p.ba, p.ab)
	}
}

func (p *pair) send(i int, from, to *machine, there, back bool) {
	if interval := from.interval(); interval == 0 || p.now.Before(p.next[i]) {
		return
	}
	p.next[i] = p.now.Add(from.interval())
	sent, err := decode(from.packet(false).encode())
	if err != nil || !there {
		return
	}
	if to.receive(sent, p.now) && back {
		final, _ := decode(to.packet(true).encode())
		from.receive(final, p.now)
	}
}

func TestSessionComesUpAndNoticesTheEnd(t *testing.T) {
	t.Parallel()
	fast, slower := Default(), Config{Transmit: 500 * time.Millisecond, Receive: 400 * time.Millisecond, Multiplier: 5}
	p := newPair(fast, slower)
	p.pass(3 * time.Second)
	if p.a.state != Up || p.b.state != Up || p.a.polling || p.b.polling {
		t.Fatalf("after 3 s: %s and %s, polling %v and %v", p.a.state, p.b.state, p.a.polling, p.b.polling)
	}
	// The longer interval of both ends counts: 400 ms towards b and 500 ms towards a.
	if got := p.a.interval(); got != 400*time.Millisecond {
		t.Errorf("a sends each %s", got)
	}
	if got := p.b.detection(); got != 3*400*time.Millisecond {
		t.Errorf("b gives up after %s", got)
	}
	p.pass(time.Minute)
	if p.a.state != Up || p.b.state != Up {
		t.Fatalf("after a minute: %s and %s", p.a.state, p.b.state)
	}
	for name, cut := range map[string]func(){"both ways": func() { p.ab, p.ba = false, false }, "one way": func() { p.ab = false }} {
		cut()
		p.pass(1300 * time.Millisecond)
		if p.b.state == Up {
			t.Errorf("%s: b is still up after 1.3 s", name)
		}
		p.pass(2 * time.Second)
		if p.a.state == Up {
			t.Errorf("%s: a is still up after 3.3 s", name)
		}
		p.ab, p.ba = true, true
		p.pass(5 * time.Second)
		if p.a.state != Up || p.b.state != Up {
			t.Errorf("%s: %s and %s after the path is back", name, p.a.state, p.b.state)
		}
	}
}

// A neighbor that is switched off is no failure, and one that restarts, with another discriminator, is.
func TestNeighborEnds(t *testing.T) {
	t.Parallel()
	p := newPair(Default(), Default())
	p.pass(3 * time.Second)
	p.b.turn(AdminDown, diagAdminDown)
	p.pass(time.Second)
	if p.a.state != Down || p.a.reason() != "the router's BFD session is administratively down" {
		t.Errorf("%s: %s", p.a.state, p.a.reason())
	}
	p = newPair(Default(), Default())
	p.pass(3 * time.Second)
	p.b = newMachine(Default(), 3)
	p.pass(time.Second)
	if p.a.state == Up && p.a.yours == 2 {
		t.Error("a does not see that b begins again")
	}
	p.pass(5 * time.Second)
	if p.a.state != Up || p.b.state != Up || p.a.yours != 3 {
		t.Errorf("%s and %s", p.a.state, p.b.state)
	}
}

// A session that was up has failed once it is not, however short that was, unless the neighbor has switched it off.
func TestFailed(t *testing.T) {
	t.Parallel()
	down := packet{state: Down, mult: 3, mine: 3, minTx: time.Second, minRx: time.Second}
	off, begun, up := down, down, down
	off.state, begun.state, up.state = AdminDown, Init, Up
	begun.yours, up.yours = 1, 1
	at := time.Unix(1, 0)
	for _, c := range []struct {
		what   string
		from   []packet
		silent bool // after the packets
		want   bool
		state  State
	}{
		{"it was never up", []packet{down, down}, true, false, Down},
		{"it is up", []packet{down, begun, up}, false, false, Up},
		{"the neighbor hears nothing", []packet{down, begun, down}, false, true, Down},
		{"the neighbor begins again", []packet{down, begun, down, down}, false, true, Init},
		{"it came back", []packet{down, begun, down, down, begun}, false, true, Up},
		{"it is silent", []packet{down, begun, up}, true, true, Down},
		{"it was switched off", []packet{down, begun, off}, false, false, Down},
		{"it was switched off and is silent", []packet{down, begun, off}, true, false, Down},
	} {
		m := newMachine(Default(), 1)
		for _, p := range c.from {
			m.receive(p, at)
		}
		if c.silent {
			m.expire(at.Add(time.Hour))
		}
		if m.failed != c.want || m.state != c.state {
			t.Errorf("%s: failed %t, %s; want %t, %s", c.what, m.failed, m.state, c.want, c.state)
		}
	}
}

// A neighbor that wants silence gets it.
func TestDemandAndZeroInterval(t *testing.T) {
	t.Parallel()
	m := newMachine(Default(), 1)
	m.receive(packet{state: Down, mult: 3, mine: 2, minTx: time.Second}, time.Unix(1, 0))
	if m.interval() != 0 {
		t.Error("packets are sent to a neighbor that wants none")
	}
	m.receive(packet{state: Init, mult: 3, mine: 2, yours: 1, minTx: time.Second, minRx: time.Second}, time.Unix(1, 0))
	up := packet{state: Up, mult: 3, mine: 2, yours: 1, final: true, demand: true, minTx: time.Second, minRx: time.Second}
	m.receive(up, time.Unix(1, 0))
	if m.state != Up || m.interval() != 0 {
		t.Errorf("%s, packets each %s in demand mode", m.state, m.interval())
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(newMachine(Default(), 7).packet(true).encode())
	f.Add([]byte{0x20, 0x40, 3, 24})
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := decode(b)
		if err != nil {
			return
		}
		again, err := decode(p.encode())
		if err != nil || again != p {
			t.Errorf("%+v, then %+v (%v)", p, again, err)
		}
		m := newMachine(Default(), 7)
		m.receive(p, time.Unix(1, 0))
		m.expire(time.Unix(1e6, 0))
	})
}

// A packet that came over more than one hop is not one of the neighbor, and one of another address is not for its session.
func TestForeignPackets(t *testing.T) {
	t.Parallel()
	network := testbed.NewNetwork(t)
	host, peer, other := network.Host("node"), network.Host("router").Addr4(), network.Host("other").Addr4()
	all := New()
	var x *Session
	var err error
	host.Do(func() { x, err = all.Open(Options{Config: Default(), Local: host.Addr4(), Peer: peer}) })
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	hello := newMachine(Default(), 9).packet(false)
	known, unknown := hello, hello
	known.yours, unknown.yours = x.m.mine, x.m.mine+1
	for _, c := range []struct {
		p    packet
		from netip.Addr
		ttl  int
		want *Session
	}{
		{hello, peer, maxTTL, x}, {known, peer, maxTTL, x}, {hello, peer, maxTTL - 1, nil}, {hello, other, maxTTL, nil},
		{known, other, maxTTL, nil}, {unknown, peer, maxTTL, nil}, {hello, peer, 0, nil},
	} {
		if got, _ := x.from.find(c.p.encode(), c.from, c.ttl); got != c.want {
			t.Errorf("%+v from %s with TTL %d: %p, want %p", c.p, c.from, c.ttl, got, c.want)
		}
	}
}
