package peers

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// cluster is a cluster of machines that watch each other, in simulated time: each has a Watch whose steps come
// when they come, and its reports reach the Detector after a delay, as far as it reaches the API server.
// One that is suspected has a moment to renew its Lease; one that does not, or cannot, is condemned.
type cluster struct {
	t         *testing.T
	rand      *rand.Rand
	now       time.Duration
	machines  []*machine
	byName    map[string]*machine
	detector  Detector
	suspected map[string]time.Duration // until when they may renew
	condemned map[string]time.Duration
	mass      bool
	// lost reports whether what one sends to another is lost, cut whether one does not reach the API server.
	lost func(from, to int) bool
	cut  func(i int) bool
}

type machine struct {
	i         int
	name      string
	watch     Watch
	next      time.Duration
	dead      bool
	questions int
	reported  []string
}

// refute is how long a suspect has to renew its Lease.
const refute = 3 * Period / 2

func newSimulation(t *testing.T, n int) *cluster {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	c := &cluster{
		t: t, rand: rand.New(rand.NewPCG(seed, 0)), now: time.Hour, byName: map[string]*machine{}, suspected: map[string]time.Duration{},
		condemned: map[string]time.Duration{}, lost: func(int, int) bool { return false }, cut: func(int) bool { return false },
	}
	for i := range n {
		m := &machine{i: i, name: fmt.Sprintf("node-%d", i), next: c.now + time.Duration(c.rand.Int64N(int64(Step)))}
		c.machines = append(c.machines, m)
		c.byName[m.name] = m
	}
	c.assign()
	c.run(5 * Period)
	return c
}

// assign has all know the members that are up.
func (c *cluster) assign() {
	var up []string
	for _, m := range c.machines {
		if _, down := c.condemned[m.name]; !down {
			up = append(up, m.name)
		}
	}
	ring := NewRing(up)
	for _, m := range c.machines {
		m.watch.Set(ring.WatchedBy(m.name))
	}
	c.detector.SetMembers(up, len(c.machines))
}

func (c *cluster) run(d time.Duration) {
	const tick = 10 * time.Millisecond
	for end := c.now + d; c.now < end; c.now += tick {
		changed := false
		for _, m := range c.machines {
			if !m.dead && c.now >= m.next {
				m.next = c.now + Step + time.Duration(c.rand.Int64N(int64(Step/10)))
				changed = c.step(m) || changed
			}
		}
		if changed || len(c.suspected) > 0 {
			c.judge()
		}
	}
}

func (c *cluster) step(m *machine) (reports bool) {
	for _, q := range m.watch.Tick(c.now) {
		m.questions++
		to := c.byName[q.Name]
		if !to.dead && !c.lost(m.i, to.i) && !c.lost(to.i, m.i) {
			m.watch.Heard(c.now, q.Name)
		}
	}
	if is := m.watch.Unreachable(c.now); !c.cut(m.i) && !slices.Equal(is, m.reported) {
		m.reported = is
		c.detector.Report(m.name, is)
		return true
	}
	return false
}

func (c *cluster) judge() {
	list, mass := c.detector.Suspects(func(by string) bool { return !c.byName[by].dead })
	if c.mass = c.mass || mass; mass {
		clear(c.suspected)
		return
	}
	changed := false
	for name, until := range c.suspected {
		switch m := c.byName[name]; {
		case !slices.ContainsFunc(list, func(s Suspect) bool { return s.Name == name }):
			delete(c.suspected, name)
		case m.dead || c.cut(m.i):
			if c.now >= until {
				delete(c.suspected, name)
				c.condemned[name], changed = c.now, true
			}
		}
	}
	for _, s := range list {
		if _, known := c.suspected[s.Name]; !known && c.condemned[s.Name] == 0 {
			c.suspected[s.Name] = c.now + refute
		}
	}
	if changed {
		c.assign()
	}
}

// kill kills machines, and returns after what time the last of them was condemned.
func (c *cluster) kill(list ...*machine) (took time.Duration) {
	c.t.Helper()
	for _, m := range list {
		m.dead = true
	}
	begin := c.now
	c.run(6 * Period)
	for _, m := range list {
		at, is := c.condemned[m.name]
		if !is {
			c.t.Errorf("%s is dead and not condemned", m.name)
		}
		took = max(took, at-begin)
	}
	return took
}

// In a cluster of 1,000, as in one of 10, a machine asks three questions a second. One death, and three at once, are known
// within 5 s, and no other is condemned, also while one of ten questions is lost.
func TestSimulationOfDeaths(t *testing.T) {
	for _, n := range []int{10, 1000} {
		c := newSimulation(t, n)
		before := make([]int, n)
		for i, m := range c.machines {
			before[i] = m.questions
		}
		c.run(10 * Period)
		most := 0
		for i, m := range c.machines {
			most = max(most, m.questions-before[i])
		}
		if most > Watchers*11 {
			t.Errorf("%d machines: one asked %d questions in 10 s", n, most)
		}
		c.lost = func(int, int) bool { return c.rand.IntN(20) == 0 }
		// Not neighbours of each other: see TestDetectorWhenWatchersDie.
		place := func(i int) *machine { return c.byName[NewRing(names(n)).order[i].name] }
		one := c.kill(place(0))
		c.run(5 * Period)
		three := c.kill(place(2), place(5), place(8))
		t.Logf("%d machines: at most %d questions in 10 s; one death is known after %s, the last of three after %s", n, most, one, three)
		if len(c.condemned) != 4 || c.mass || max(one, three) > 5*Period {
			t.Errorf("condemned are %v; mass %t", c.condemned, c.mass)
		}
	}
}

// Bad links condemn no node: one between two machines, all of one machine in one direction or both, while it reaches the
// API server, or not enough of them to be most.
func TestSimulationOfBadLinks(t *testing.T) {
	for name, lost := range map[string]func(from, to int) bool{
		"one link":      func(from, to int) bool { return from+to == 1 },
		"one direction": func(from, _ int) bool { return from == 0 },
		"one machine":   func(from, to int) bool { return from == 0 || to == 0 },
		"two machines":  func(from, to int) bool { return from < 2 || to < 2 },
	} {
		c := newSimulation(t, 100)
		c.lost = lost
		c.run(20 * Period)
		if len(c.condemned) > 0 {
			t.Errorf("%s: condemned are %v", name, c.condemned)
		}
	}
}

// A cluster that comes apart in halves: those on the side of the API server condemn at most as many as they are. If most are
// on the other side, no node is condemned beyond half, and the graces of the Leases decide.
func TestSimulationOfPartitions(t *testing.T) {
	for _, here := range []int{50, 30, 70} {
		c := newSimulation(t, 100)
		c.lost = func(from, to int) bool { return (from < here) != (to < here) }
		c.cut = func(i int) bool { return i >= here }
		c.run(20 * Period)
		for name := range c.condemned {
			if c.byName[name].i < here {
				t.Errorf("%d of 100 with the API server: %s, which is one of them, is condemned", here, name)
			}
		}
		t.Logf("%d of 100 with the API server: %d of the others are condemned, stopped %t", here, len(c.condemned), c.mass)
		if len(c.condemned) > 50 {
			t.Errorf("%d of 100 with the API server: %d are condemned", here, len(c.condemned))
		}
		if here == 70 && len(c.condemned) < 20 {
			t.Errorf("%d of the 30 that are cut off are condemned", len(c.condemned))
		}
	}
}
