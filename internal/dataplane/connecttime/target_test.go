package connecttime

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// randomPort is one of few ports, in one of many forms.
func randomPort(r *rand.Rand, n int) *table.ServicePort {
	f := table.Frontend{Addr: flows.AP(fmt.Sprintf("10.96.0.%d:80", n+1)), Masquerade: r.IntN(2) == 0}
	list := func() (out []table.Endpoint) {
		for i := range r.IntN(5) {
			out = append(out, table.Endpoint{Addr: flows.AP(fmt.Sprintf("10.244.%d.%d:80", r.IntN(2), i+1)), Local: r.IntN(2) == 0})
		}
		return out
	}
	f.Endpoints = list()
	if r.IntN(2) == 0 {
		f.LocalClients = append([]table.Endpoint{}, list()...)
	}
	p := flows.Port(fmt.Sprintf("web%d", n), "", svc.IPv4, []svc.Protocol{svc.TCP, svc.UDP}[r.IntN(2)], f)
	p.Serving = list()
	if r.IntN(4) == 0 {
		p.Affinity = time.Hour
	}
	return p
}

// Whatever fails in between, the maps end as if they had only ever had the last Table, and nothing is left over.
func TestRandomChangesWithFaults(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 35))
		m := newMaps()
		faults := r.IntN(2) == 0
		m.fail = func() error {
			if faults && r.IntN(10) == 0 {
				return errors.New("a fault")
			}
			return nil
		}
		rec := m.reconciler()
		ports := make([]*table.ServicePort, 6)
		var tab *table.Table
		failed := true
		for range 60 {
			n := r.IntN(len(ports))
			key := randomPort(r, n).Key()
			ports[n] = nil
			if r.IntN(5) > 0 {
				ports[n] = randomPort(r, n)
			}
			var some []*table.ServicePort
			for _, p := range ports {
				if p != nil {
					some = append(some, p)
				}
			}
			tab = table.New(some...)
			changed := []table.Key{key}
			if failed || r.IntN(8) == 0 {
				changed = nil
			}
			if r.IntN(12) == 0 { // the process starts again
				rec, changed = m.reconciler(), nil
			}
			failed = rec.Apply(t.Context(), tab, changed) != nil
		}
		m.fail = nil
		if err := rec.Apply(t.Context(), tab, nil); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if m.broken != nil {
			t.Fatalf("seed %d: %v", seed, m.broken)
		}
		writes := m.writes
		rec.Forget()
		if err := rec.Apply(t.Context(), tab, nil); err != nil || m.writes != writes {
			t.Fatalf("seed %d: %d writes to maps that are as wanted, %v", seed, m.writes-writes, err)
		}
		other := newMaps()
		if err := other.reconciler().Apply(t.Context(), tab, nil); err != nil {
			t.Fatal(err)
		}
		if has, want := m.text(t), other.text(t); has != want {
			t.Fatalf("seed %d: the maps have\n%swant\n%s", seed, has, want)
		}
		for what, n := range map[string][2]int{
			"slots": {len(m.slots), len(other.slots)}, "own endpoints": {len(m.own), len(other.own)},
			"members": {len(m.member), len(other.member)},
		} {
			if n[0] != n[1] {
				t.Fatalf("seed %d: %d %s, want %d", seed, n[0], what, n[1])
			}
		}
	}
}

// A change costs what it changes, whatever else there is.
func TestCostFollowsChange(t *testing.T) {
	m := newMaps()
	rec := m.reconciler()
	var ports []*table.ServicePort
	at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80")}, {Addr: flows.AP("10.244.0.2:80")}}
	for i := range 500 {
		addr := flows.AP(fmt.Sprintf("10.96.%d.%d:80", i/250, i%250+1))
		ports = append(ports, flows.Port(fmt.Sprintf("web%d", i), "", svc.IPv4, svc.TCP, table.Frontend{Addr: addr, Endpoints: at}))
	}
	if err := rec.Apply(t.Context(), table.New(ports...), nil); err != nil {
		t.Fatal(err)
	}
	before := m.writes
	ports[7] = flows.Port("web7", "", svc.IPv4, svc.TCP, table.Frontend{Addr: ports[7].Frontends[0].Addr, Endpoints: at[:1]})
	if err := rec.Apply(t.Context(), table.New(ports...), []table.Key{ports[7].Key()}); err != nil {
		t.Fatal(err)
	}
	if n := m.writes - before; n != 4 { // one list, one frontend, two old slots
		t.Errorf("one endpoint less took %d writes, want 4", n)
	}
}

// Connected sockets of UDP end when their endpoint serves no more, and are looked at only then.
func TestSocketsEnd(t *testing.T) {
	m := newMaps()
	rec := m.reconciler()
	a, b := flows.AP("10.244.0.1:80"), flows.AP("10.244.0.2:80")
	node := flows.AP("192.0.2.1:30080")
	port := func(p svc.Protocol, addr netip.AddrPort, endpoints, serving []netip.AddrPort) *table.ServicePort {
		f := table.Frontend{Addr: addr}
		list := func(all []netip.AddrPort) (out []table.Endpoint) {
			for _, at := range all {
				out = append(out, table.Endpoint{Addr: at})
			}
			return out
		}
		f.Endpoints = list(endpoints)
		out := flows.Port("web"+p.String(), "", svc.IPv4, p, f)
		if !addr.Addr().IsValid() {
			out.Frontends[0].Kind = table.NodePort
		}
		out.Serving = list(serving)
		return out
	}
	var none *table.ServicePort
	sticky := port(svc.UDP, web4, []netip.AddrPort{b, a}, nil)
	stickyB := port(svc.UDP, web4, []netip.AddrPort{b}, nil)
	sticky.Affinity, stickyB.Affinity = time.Hour, time.Hour
	for _, c := range []struct {
		what    string
		port    *table.ServicePort
		swept   bool
		ends    bool
		between []*table.ServicePort
	}{
		{"TCP", port(svc.TCP, web4, []netip.AddrPort{b}, nil), false, false, nil},
		{"more", port(svc.UDP, web4, []netip.AddrPort{a, b}, nil), false, false, nil},
		{"others", port(svc.UDP, web4, []netip.AddrPort{a}, nil), true, false, nil},
		{"serves", port(svc.UDP, web4, []netip.AddrPort{b}, []netip.AddrPort{a, b}), false, false, nil},
		{"left to nft, and serves", sticky, false, false, nil},
		{"left to nft, and gone", stickyB, true, true, nil},
		{"left to nft before, and gone", stickyB, true, true, []*table.ServicePort{sticky}},
		{"gone", port(svc.UDP, web4, []netip.AddrPort{b}, []netip.AddrPort{b}), true, true, nil},
		{"no endpoint", port(svc.UDP, web4, nil, nil), true, true, nil},
		{"no Service", none, true, true, nil},
	} {
		before := port(svc.UDP, web4, []netip.AddrPort{a, b}, nil)
		if c.what == "TCP" {
			before = port(svc.TCP, web4, []netip.AddrPort{a}, nil)
		}
		apply := func(p *table.ServicePort, key []table.Key) {
			t.Helper()
			tab := table.New()
			if p != nil {
				tab = table.New(p)
			}
			if err := rec.Apply(t.Context(), tab, key); err != nil {
				t.Fatal(err)
			}
			select {
			case <-m.sweeper.wake:
				for range 2 {
					if _, err := m.sweeper.sweep(); err != nil {
						t.Fatal(err)
					}
				}
			default:
			}
		}
		apply(before, nil)
		for _, p := range c.between {
			apply(p, []table.Key{before.Key()})
		}
		m.connected = map[netip.AddrPort]netip.AddrPort{web4: a, node: a}
		if c.what == "TCP" {
			m.connected = nil
		}
		m.swept = 0
		apply(c.port, []table.Key{before.Key()})
		if _, is := m.connected[web4]; (m.swept > 0) != c.swept || c.swept && is == c.ends {
			t.Errorf("%s: looked at %d times, the socket is there: %v", c.what, m.swept, is)
		}
	}
}

// A socket that remembers a list of an earlier process must not take a new list for it.
func TestNumbersOfListsDoNotComeBack(t *testing.T) {
	m := newMaps()
	used := map[uint32]bool{}
	for i := range 8 { // each time the process has started again, and what there was is gone
		addr := flows.AP(fmt.Sprintf("10.244.0.%d:80", i+1))
		web := flows.Port("web", "", svc.IPv4, svc.UDP, table.Frontend{Addr: web4, Endpoints: []table.Endpoint{{Addr: addr}}})
		rec := m.reconciler()
		for _, tab := range []*table.Table{table.New(web), table.New()} {
			if err := rec.Apply(t.Context(), tab, nil); err != nil {
				t.Fatal(err)
			}
			for _, r := range m.fronts {
				if used[r.List[0]] || r.List[0] == 0 {
					t.Errorf("number %d comes back: %v were used", r.List[0], used)
				}
				used[r.List[0]] = true
			}
		}
	}
	last := newShared(nil, nil, nil, nil, nil, nil)
	last.next = math.MaxUint32
	if n := last.number(); n != 1 {
		t.Errorf("after the last number comes %d, want 1: the programs take 0 for no list", n)
	}
}

// A look at a socket takes no memory, and one of a family that is not known yet stays.
func TestServes(t *testing.T) {
	s, front, at := manyEndpoints()
	if !s.serves(front, at) || s.serves(front, flows.AP("192.0.2.1:80")) || s.serves(flows.AP("10.96.0.2:80"), at) {
		t.Error("want only the endpoints of the frontend itself")
	}
	node := keyOf(dataplane.FrontKey{Port: 30080, Proto: svc.UDP, Node: true}, svc.IPv4)
	s.members[node] = []netip.AddrPort{at}
	if !s.serves(flows.AP("192.0.2.1:30080"), at) || s.serves(flows.AP("192.0.2.1:30081"), at) || s.serves(flows.AP("192.0.2.1:30080"), web4) {
		t.Error("want the endpoints of the node port at each address of the node")
	}
	if !s.serves(web6, at) {
		t.Error("a socket ends of which nothing is known yet")
	}
	if n := testing.AllocsPerRun(100, func() { s.serves(front, at) }); n != 0 {
		t.Errorf("another socket of the frontend takes %v allocations, want none", n)
	}
}

// BenchmarkServes is the look at one of many sockets.
func BenchmarkServes(b *testing.B) {
	s, front, at := manyEndpoints()
	for b.Loop() {
		s.serves(front, at)
	}
}

// manyEndpoints is a frontend with 1,000 endpoints, the last of which is at.
func manyEndpoints() (s *sweeper, front, at netip.AddrPort) {
	f := table.Frontend{Addr: web4}
	for i := range 1000 {
		at = flows.AP(fmt.Sprintf("10.244.%d.%d:80", i/250, i%250+1))
		f.Endpoints = append(f.Endpoints, table.Endpoint{Addr: at})
	}
	web := flows.Port("web", "", svc.IPv4, svc.UDP, f)
	p := dataplane.NewPlan("nft", svc.IPv4)
	p.Set(web.Key(), web, dataplane.Dirty{})
	k := dataplane.FrontKey{Addr: web4.Addr(), Port: web4.Port(), Proto: svc.UDP}
	s = newSweeper(nil, nil, nil)
	s.serve(svc.IPv4, &dataplane.Change{Plan: p, Full: true, Dirty: dataplane.Dirty{k: web.Key()}})
	return s, web4, at
}

// An attempt to connect by TCP is led on when its endpoint serves no more, and again when the next one leaves, also while the first one
// serves again. It ends when no endpoint serves. One that may go on, and one of a client that is not known yet, stay.
func TestAttemptsAreLedOn(t *testing.T) {
	m := newMaps()
	rec := m.reconciler()
	e := []netip.AddrPort{flows.AP("10.244.0.1:80"), flows.AP("10.244.0.2:80"), flows.AP("10.244.0.3:80")}
	list := func(at ...netip.AddrPort) (out []table.Endpoint) {
		for _, a := range at {
			out = append(out, table.Endpoint{Addr: a})
		}
		return out
	}
	apply := func(p *table.ServicePort) error {
		t.Helper()
		if err := rec.Apply(t.Context(), table.New(p), []table.Key{p.Key()}); err != nil {
			t.Fatal(err)
		}
		select {
		case <-m.sweeper.wake:
			_, err := m.sweeper.sweep()
			return err
		default:
			return nil
		}
	}
	web := func(serving []table.Endpoint, endpoints ...netip.AddrPort) *table.ServicePort {
		p := flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: web4, Endpoints: list(endpoints...)})
		p.Serving = serving
		return p
	}
	sticky := web(nil, e[1])
	sticky.Affinity = time.Hour // which the programs leave to nft
	from := flows.AP("10.244.1.7:40000")
	first := route{from, e[0]}
	if err := apply(web(nil, e[0])); err != nil {
		t.Fatal(err)
	}
	all := []connect.Attempt{
		{Front: web4, To: e[0], From: from},
		{Front: web4, To: e[0], From: flows.AP("192.0.2.9:40000")},
		{Front: flows.AP("10.96.0.11:80"), To: e[0], From: flows.AP("10.244.1.7:40001")}, // of another Service
	}
	m.attempts = slices.Clone(all)
	for _, c := range []struct {
		what  string
		port  *table.ServicePort
		led   netip.AddrPort // where the first attempt is led to
		again int            // how often it begins again
		left  int            // attempts that are not ended
	}{
		{"another is preferred", web(list(e[0]), e[1]), netip.AddrPort{}, 0, 3},
		{"it has left, and nft serves", sticky, netip.AddrPort{}, 0, 3},
		{"it has left", web(nil, e[1]), e[1], 1, 3},
		{"more", web(nil, e[1:]...), e[1], 0, 3},
		{"it is back", web(nil, e...), e[1], 0, 3},
		{"the next one has left", web(nil, e[2], e[0]), e[2], 1, 3},
		{"so has it, too", web(nil, e[2]), e[2], 0, 3},
		{"nft serves again", sticky, e[2], 0, 3},
		{"none", web(nil), netip.AddrPort{}, 0, 1},
	} {
		if m.again = 0; apply(c.port) != nil {
			t.Fatal(c.what)
		}
		if c.left < 3 { // what has ended has no detour
			if _, err := m.sweeper.sweep(); err != nil {
				t.Fatal(err)
			}
		}
		if m.led.all[first] != c.led || m.again != c.again || len(m.attempts) != c.left {
			t.Errorf("%s: led to %s, begun again %d times, %d attempts are left; want %s, %d, %d",
				c.what, m.led.all[first], m.again, len(m.attempts), c.led, c.again, c.left)
		}
	}

	// What could not be written is written by the next look, and a detour goes when its attempt has an answer.
	if err := apply(web(nil, e[0], e[1])); err != nil {
		t.Fatal(err)
	}
	m.attempts, m.lost, m.again = slices.Clone(all[:1]), errors.New("no"), 0
	if err := apply(web(nil, e[1])); err == nil || m.again != 0 {
		t.Errorf("a failure is lost: %v", err)
	}
	m.lost = nil
	if next, err := m.sweeper.sweep(); err != nil || m.again != 1 || next != lookForAnswers {
		t.Errorf("after a failure: begun again %d times, next look after %s, %v", m.again, next, err)
	}
	m.part = errors.New("no")
	if _, err := m.sweeper.sweep(); err == nil || m.led.size() != 1 {
		t.Errorf("attempts that were not listed lose their detours: %d are left, %v", m.led.size(), err)
	}
	m.attempts, m.part = nil, nil
	if next, err := m.sweeper.sweep(); err != nil || m.led.size() != 0 || next != 0 {
		t.Errorf("with an answer: %d detours, next look after %s, %v", m.led.size(), next, err)
	}
}

// The log counts the attempts that were ended, not the ones that were to be.
func TestEndedAttemptsAreCounted(t *testing.T) {
	var log strings.Builder
	m := newMaps()
	rec := m.reconcilerThatLogs(slog.NewTextHandler(&log, nil))
	at := flows.AP("10.244.0.1:80")
	web := flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: web4, Endpoints: []table.Endpoint{{Addr: at}}})
	for _, tab := range []*table.Table{table.New(web), table.New()} {
		if err := rec.Apply(t.Context(), tab, nil); err != nil {
			t.Fatal(err)
		}
	}
	m.attempts, m.endless = []connect.Attempt{{Front: web4, To: at, From: flows.AP("10.244.1.7:40000")}}, errors.New("no")
	if _, err := m.sweeper.sweep(); err == nil || log.Len() > 0 {
		t.Errorf("none was ended: %v, the log is %q", err, &log)
	}
	m.endless = nil
	if _, err := m.sweeper.sweep(); err != nil || !strings.Contains(log.String(), "led-on=0 ended=1") {
		t.Errorf("one was ended: %v, the log is %q", err, &log)
	}
}

// The first change has sockets looked at immediately, and many changes do so twice in a second.
func TestLooksAtManyChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMaps()
		m.reconciler()
		stop := m.sweeper.start()
		defer stop()
		change := func() {
			m.sweeper.mu.Lock()
			defer m.sweeper.mu.Unlock()
			m.sweeper.look()
		}
		change()
		synctest.Wait()
		if m.swept != 1 {
			t.Errorf("%d looks at one change, want 1 at once", m.swept)
		}
		for range 200 { // 2 s
			change()
			time.Sleep(10 * time.Millisecond)
		}
		if m.swept < 4 || m.swept > 6 {
			t.Errorf("%d looks in 2 s, want 4 to 6", m.swept)
		}
	})
}

// Endpoints that serve nevertheless are forgotten, also where nothing else has sockets looked at: others would have no room.
func TestManyThatServeAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMaps()
		m.reconciler()
		stop := m.sweeper.start()
		defer stop()
		had, want := &front{}, &front{}
		var all []netip.AddrPort
		for i := range maxLeft {
			all = append(all, netip.AddrPortFrom(flows.AP("10.244.0.1:0").Addr(), uint16(i+1)))
		}
		had.lists[0].endpoints = pack(all)
		k := keyOf(dataplane.FrontKey{Addr: web4.Addr(), Port: web4.Port(), Proto: svc.TCP}, svc.IPv4)
		m.sweeper.leave(k, had, want, func() []netip.AddrPort { return all })
		if !m.sweeper.full() {
			t.Fatalf("only %d endpoints are noted", m.sweeper.leftSize)
		}
		time.Sleep(2 * detourTime)
		if m.sweeper.haveLeft() {
			t.Errorf("%d endpoints are still noted", m.sweeper.leftSize)
		}
	})
}

// slowSockets are sockets that take a while to look at.
type slowSockets struct {
	sockets
	takes time.Duration
	err   error
	begin time.Time
	at    []time.Duration // of each look, from begin
}

func (k *slowSockets) EndSockets(func(_, _ netip.AddrPort) bool) (int, error) {
	k.at = append(k.at, time.Since(k.begin))
	time.Sleep(k.takes)
	return 0, k.err
}

// Sockets are looked at beside the changes: with rests between, once more a moment later, and again after a failure.
func TestSweeper(t *testing.T) {
	const second = time.Second
	for name, c := range map[string]struct {
		takes time.Duration
		err   error
		wakes int // with a second between them
		want  []time.Duration
	}{
		"one loss":       {0, nil, 1, []time.Duration{0, lookAgain}},
		"many":           {2 * second, nil, 4, []time.Duration{0, 4 * second, 8 * second}},
		"a failure":      {0, errors.New("no"), 1, []time.Duration{0, retry}},
		"nothing leaves": {0, nil, 0, nil},
	} {
		synctest.Test(t, func(t *testing.T) {
			k := &slowSockets{takes: c.takes, err: c.err, begin: time.Now()}
			s := newSweeper(k, newMaps().led, slog.New(slog.DiscardHandler))
			stop := s.start()
			for range c.wakes {
				begin := time.Now()
				s.mu.Lock()
				s.look()
				s.mu.Unlock()
				if time.Since(begin) != 0 {
					t.Errorf("%s: a change waited for %s", name, time.Since(begin))
				}
				time.Sleep(second)
			}
			time.Sleep(9*second - time.Since(k.begin))
			stop()
			if !slices.Equal(k.at, c.want) {
				t.Errorf("%s: looks at %v, want %v", name, k.at, c.want)
			}
		})
	}
}

// What one family has read counts for the other one, unless something was written meanwhile.
func TestReadOnceForBothFamilies(t *testing.T) {
	m := newMaps()
	rec := m.reconciler()
	at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80")}}
	web := flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: web4, Endpoints: at})
	for _, want := range []int{2, 1, 1} { // the first Apply writes
		m.reads = 0
		if err := rec.Apply(t.Context(), table.New(web), nil); err != nil || m.reads != want {
			t.Errorf("the frontends were read %d times, want %d; %v", m.reads, want, err)
		}
	}
	delete(m.fronts, keyOf(dataplane.FrontKey{Addr: web4.Addr(), Port: web4.Port(), Proto: svc.TCP}, svc.IPv4))
	if err := rec.Apply(t.Context(), table.New(web), nil); err != nil || len(m.fronts) != 1 || len(rec.Repaired()) != 1 {
		t.Errorf("repaired %q, %v", rec.Repaired(), err)
	}
}

func TestPlanned(t *testing.T) {
	hops := []table.Hop{{}}
	at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80")}}
	for name, c := range map[string]struct {
		protocol svc.Protocol
		affinity time.Duration
		front    table.Frontend
		want     bool
	}{
		"plain":         {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: at}, true},
		"inside only":   {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Drop: true, LocalClients: at}, true},
		"UDP":           {svc.UDP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: at}, true},
		"SCTP":          {svc.SCTP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: at}, false},
		"affinity":      {svc.TCP, time.Second, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: at}, false},
		"source ranges": {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: at, SourceRanges: []netip.Prefix{}}, false},
		"DNS":           {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:53"), Endpoints: at}, false},
		"direct return": {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: at, Hops: hops}, false},
		"direct return, inside": {
			svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Endpoints: at, LocalClients: at, Hops: hops}, true,
		},
		"no endpoints":       {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80")}, false},
		"no endpoints, drop": {svc.TCP, 0, table.Frontend{Addr: flows.AP("10.96.0.1:80"), Drop: true, LocalClients: []table.Endpoint{}}, false},
	} {
		p := flows.Port("web", "", svc.IPv4, c.protocol, c.front)
		p.Affinity = c.affinity
		got := planned(&dataplane.Settings{}, p, &p.Frontends[0])
		if (got != nil) != c.want {
			t.Errorf("%s: translated %v, want %v", name, got != nil, c.want)
		}
		if got != nil && c.front.Hops != nil && (got.lists[0].endpoints != "" || got.lists[1].endpoints == "") {
			t.Errorf("%s: %+v, want that clients elsewhere are nft's", name, got)
		}
	}
}

func TestClassify(t *testing.T) {
	sets := [2]dataplane.Settings{
		{Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, LocalPods: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}},
		{PodInterfaces: []table.Interface{{Name: "cali", Prefix: true}}},
	}
	for _, c := range []struct {
		addr, from string
		want       connect.Class
	}{
		{"10.244.1.7", "pods", connect.Class{InPods: [2]bool{true}, Local: [2]bool{true}}},
		{"10.244.2.7", "pods", connect.Class{InPods: [2]bool{true}}},
		{"172.17.0.2", "docker0", connect.Class{}},
		{"fd00::1", "cali0", connect.Class{InPods: [2]bool{false, true}, Local: [2]bool{false, true}}},
	} {
		if got := classify(&sets, &connect.Namespace{Addrs: []netip.Addr{netip.MustParseAddr(c.addr)}, From: c.from}); got != c.want {
			t.Errorf("%s from %s: %+v, want %+v", c.addr, c.from, got, c.want)
		}
	}
}

// A list that an earlier process left behind keeps its number until it is removed.
func TestStrayListsKeepTheirNumbers(t *testing.T) {
	m := newMaps()
	for list := range uint32(4) {
		for n := range uint32(3) {
			m.slots[slot{list + 1, n}] = flows.AP("10.244.0.9:80")
		}
		m.own[own{list + 1, flows.AP("10.244.0.9:80").Addr()}] = true
	}
	rec := m.reconciler()
	at := []table.Endpoint{{Addr: flows.AP("10.244.0.1:80")}, {Addr: flows.AP("10.244.0.2:80")}}
	web := flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: web4, Endpoints: at})
	if err := rec.Apply(t.Context(), table.New(web), nil); err != nil {
		t.Fatal(err)
	}
	if len(m.fronts) != 1 || len(m.slots) != 2 || len(m.own) != 0 {
		t.Errorf("%d frontends, %d slots, %d own endpoints; want 1, 2 and none", len(m.fronts), len(m.slots), len(m.own))
	}
}

// What the Table changed is no repair, what another program changed is one.
func TestRepairs(t *testing.T) {
	m := newMaps()
	rec := m.reconciler()
	port := func(n int, endpoints ...string) *table.ServicePort {
		f := table.Frontend{Addr: flows.AP(fmt.Sprintf("10.96.0.%d:80", n))}
		for _, at := range endpoints {
			f.Endpoints = append(f.Endpoints, table.Endpoint{Addr: flows.AP(at)})
		}
		return flows.Port(fmt.Sprintf("web%d", n), "", svc.IPv4, svc.TCP, f)
	}
	apply := func(want string, tab *table.Table) {
		t.Helper()
		tab.NodePortAddrs = []netip.Addr{flows.AP("192.0.2.1:0").Addr()}
		if err := rec.Apply(t.Context(), tab, nil); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(rec.Repaired(), "; "); got != want {
			t.Errorf("repaired: %q, want %q", got, want)
		}
	}
	apply("", table.New(port(1, "10.244.0.1:80"), port(2, "10.244.0.1:80")))
	apply("", table.New(port(1, "10.244.0.2:80"), port(3, "10.244.0.1:80")))

	at := func(n int) connect.Front {
		return connect.Front{Addr: flows.AP(fmt.Sprintf("10.96.0.%d:80", n)), Protocol: uint8(svc.TCP)}
	}
	delete(m.fronts, at(1))
	m.slots[slot{m.fronts[at(3)].List[0], 0}] = flows.AP("10.244.0.66:80")
	m.fronts[at(66)] = connect.Route{}
	clear(m.nodes)
	m.nodes[flows.AP("192.0.2.66:0").Addr()] = true
	apply("connect-time: TCP 10.96.0.1:80 was missing; connect-time: TCP 10.96.0.3:80 was altered; "+
		"connect-time: a foreign TCP 10.96.0.66:80 was there; connect-time: a foreign address 192.0.2.66 of the node was there; "+
		"connect-time: the node's address 192.0.2.1 was missing", table.New(port(1, "10.244.0.5:80"), port(3, "10.244.0.5:80")))
	apply("", table.New(port(1, "10.244.0.5:80"), port(3, "10.244.0.5:80")))
}

// A Pod is classified only when the ranges of both families are known.
func TestClassifiedByBothFamilies(t *testing.T) {
	m := newMaps()
	rec := m.reconciler()
	tab := table.New()
	tab.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00::/64")}
	if err := rec.Apply(t.Context(), tab, nil); err != nil {
		t.Fatal(err)
	}
	if len(m.found) == 0 {
		t.Error("no Pod was classified")
	}
	for _, c := range m.found {
		if c.InPods != [2]bool{true, true} {
			t.Errorf("a Pod of both families was classified as %+v", c)
		}
	}
	tab.ClusterCIDRs = tab.ClusterCIDRs[1:]
	if err := rec.Apply(t.Context(), tab, nil); err != nil {
		t.Fatal(err)
	}
	if c := m.found[len(m.found)-1]; c.InPods != [2]bool{false, true} {
		t.Errorf("after a change of IPv4's ranges: %+v", c)
	}
}

// Endpoints that have left are forgotten when nothing tries to connect with them.
func TestLeaversAreForgotten(t *testing.T) {
	s := newSweeper(nil, nil, nil)
	at := []netip.AddrPort{flows.AP("10.244.0.1:80"), flows.AP("10.244.0.2:80"), flows.AP("10.244.0.3:80"), flows.AP("10.244.0.4:80")}
	had, want := &front{lists: [2]list{{endpoints: pack(at)}, {endpoints: pack(at[:1])}}}, &front{lists: [2]list{{endpoints: pack(at[3:])}}}
	s.leave(keyOf(dataplane.FrontKey{Addr: web4.Addr(), Port: web4.Port(), Proto: svc.TCP}, svc.IPv4), had, want,
		func() []netip.AddrPort { return at[2:] })
	for _, c := range []struct {
		after time.Duration
		tried []netip.AddrPort
		left  int
	}{
		{0, nil, 3},
		{lookAgain + time.Second, at[:1], 2}, // also one that others are preferred to
		{lookAgain + time.Second, nil, 1},
		{detourTime + time.Second, nil, 0},
	} {
		tried := map[netip.AddrPort]bool{}
		for _, a := range c.tried {
			tried[a] = true
		}
		if s.forget(time.Now().Add(c.after), tried); s.leftSize != c.left || s.haveLeft() != (c.left > 0) {
			t.Errorf("after %s: %d have left, want %d", c.after, s.leftSize, c.left)
		}
	}
	if len(s.left) != 0 {
		t.Errorf("frontends are left: %v", s.left)
	}
}
