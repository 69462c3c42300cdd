package pods

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
	"github.com/fairlead/fairlead/internal/svc"
)

func poolOf(t *testing.T, b dialect.Balance, n int) (*Pool, []netip.AddrPort) {
	var addrs []netip.AddrPort
	for i := range n {
		addrs = append(addrs, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80))
	}
	p := newPool(t, slog.New(slog.DiscardHandler))
	p.Set(Options{Balance: b}, addrs, 0)
	return p, addrs
}

// newPool returns a Pool without Pods.
func newPool(t *testing.T, log *slog.Logger) *Pool {
	name := svc.Name{Namespace: "default", Name: "web"}
	shared := Shared{Context: t.Context(), Running: &sync.WaitGroup{}, Log: log, Panics: panics.New(log), Absences: NewAbsences(func() {})}
	return New(shared, name, traffic.NewBook().Service(name))
}

var errRefused = errors.New("connection refused")

// With two Pods of which one cannot be reached, every other client begins with the other one: a further try takes no turn.
func TestRetriesTakeNoTurn(t *testing.T) {
	for _, b := range []dialect.Balance{dialect.RoundRobin, dialect.LeastConnections} {
		p, addrs := poolOf(t, b, 2)
		first := 0
		for range 100 {
			m, _ := p.Pick(netip.Addr{}, nil)
			if m.addr != addrs[0] {
				continue
			}
			first++
			if again, err := p.Pick(netip.Addr{}, []*Member{m}); err != nil || again.addr != addrs[1] {
				t.Fatalf("%v, %v", again, err)
			}
		}
		if first != 50 {
			t.Errorf("%v: %d of 100 clients begin with the Pod that cannot be reached", b, first)
		}
	}
}

// A Pod that could not be reached has no client for some seconds, longer each time; half of the Pods stay in any case.
func TestEjection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, _ := poolOf(t, dialect.RoundRobin, 4)
		share := func(m *Member) (n int) {
			for range 40 {
				if got, _ := p.Pick(netip.Addr{}, nil); got == m {
					n++
				}
			}
			return n
		}
		bad := p.members[0]
		for _, long := range []time.Duration{ejectFor, 2 * ejectFor, 4 * ejectFor} {
			p.Failed(bad, errRefused)
			p.Failed(bad, errRefused) // of clients at the same time: counts once
			if n := share(bad); n != 0 {
				t.Errorf("%d of 40 clients at an ejected Pod", n)
			}
			time.Sleep(long - time.Millisecond)
			if n := share(bad); n != 0 {
				t.Errorf("it comes back before %v: %d", long, n)
			}
			time.Sleep(time.Millisecond)
			if n := share(bad); n != 10 {
				t.Errorf("it does not come back after %v: %d", long, n)
			}
		}
		p.Reached(bad)
		p.Failed(bad, errRefused)
		time.Sleep(ejectFor)
		if n := share(bad); n != 10 {
			t.Errorf("after it was reached its failures still count: %d", n)
		}
		for _, m := range p.members {
			p.Failed(m, errRefused)
		}
		if n := share(p.members[3]); n != 20 {
			t.Errorf("all fail, and the last one has %d of 40", n)
		}
		p.Reached(p.members[0])
		if n := share(p.members[0]); n == 0 {
			t.Error("a Pod that was reached stays out")
		}
	})
}

// The share and the panic threshold bound how many Pods are left out. With off, no Pod is.
func TestHowManyAreEjected(t *testing.T) {
	for _, c := range []struct {
		eject        dialect.Eject
		pods, failed int
		usable       int
	}{
		{dialect.Eject{}, 4, 4, 2}, {dialect.Eject{}, 1, 1, 1}, {dialect.Eject{}, 2, 2, 1}, {dialect.Eject{Off: true}, 4, 2, 4},
		{dialect.Eject{Share: 10}, 4, 4, 3}, {dialect.Eject{Share: 10}, 30, 30, 27}, {dialect.Eject{Share: 75}, 4, 4, 1},
		{dialect.Eject{Share: 100}, 4, 4, 4}, {dialect.Eject{Share: 75, Panic: 50}, 4, 2, 2}, {dialect.Eject{Share: 75, Panic: 50}, 4, 3, 4},
	} {
		p, addrs := poolOf(t, dialect.RoundRobin, c.pods)
		p.Set(Options{Balance: dialect.RoundRobin, Eject: c.eject}, addrs, 0)
		for _, m := range p.members[:c.failed] {
			p.Failed(m, errRefused)
		}
		got := map[*Member]bool{}
		for range 2 * c.pods {
			m, _ := p.Pick(netip.Addr{}, nil)
			got[m] = true
		}
		if len(got) != c.usable {
			t.Errorf("%+v, %d of %d fail: %d get clients, want %d", c.eject, c.failed, c.pods, len(got), c.usable)
		}
	}
}

// Requests that fail in a row eject a Pod, if that is asked for. It comes back on trial: one more failure is enough. A
// connection does not end that, nor does an answer to what it had before.
func TestErrorsEject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, addrs := poolOf(t, dialect.RoundRobin, 4)
		out := func() bool { _, _, n := p.Count(); return n == 1 }
		bad := p.members[0]
		for range 100 {
			p.Answered(bad, 500, nil, 0)
		}
		if out() {
			t.Fatal("errors eject although nothing asks for that")
		}
		p.Set(Options{Balance: dialect.RoundRobin, Eject: dialect.Eject{Errors: 3}}, addrs, 0)
		for _, status := range []int{500, 0, 404, 503, 0, 200, 500, 502} {
			p.Answered(bad, status, errRefused, 0)
		}
		if out() {
			t.Error("ejected after two errors in a row")
		}
		p.Answered(bad, 0, errRefused, 0)
		if !out() {
			t.Fatal("not ejected after three errors in a row")
		}
		list := p.absences.List()
		const want = "3 requests failed in a row, the last one with: connection refused"
		if len(list) != 1 || list[0].Reason != want || !list[0].Ejected {
			t.Errorf("%+v, want %s", list, want)
		}
		p.Answered(bad, 200, nil, 0) // to what it had before
		p.Reached(bad)
		if !out() {
			t.Error("it is back at once")
		}
		time.Sleep(ejectFor)
		if p.Reached(bad); out() || len(p.absences.List()) != 1 {
			t.Error("it is not on trial")
		}
		p.Answered(bad, 500, nil, 0)
		if !out() {
			t.Error("it has failed on trial and is not ejected")
		}
		time.Sleep(2 * ejectFor)
		p.Answered(bad, 200, nil, 0)
		if n := len(p.absences.List()); out() || n != 0 {
			t.Errorf("it answers well: out %t, %d entries", out(), n)
		}
		p.Answered(bad, 500, nil, 0)
		if out() {
			t.Error("its trial has not ended")
		}
	})
}

// A page tells about a Pod what its answers tell, but for a status of 500 and more: that neither counts as a failure, nor ends a row of
// failures or a trial.
func TestPagesOfErrorsTellNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, addrs := poolOf(t, dialect.RoundRobin, 4)
		p.Set(Options{Balance: dialect.RoundRobin, Eject: dialect.Eject{Errors: 2}}, addrs, 0)
		out := func() bool { _, _, n := p.Count(); return n == 1 }
		m := p.members[0]
		p.Answered(m, 500, nil, 0)
		p.AnsweredPage(m, 404, 0)
		p.Answered(m, 500, nil, 0)
		p.AnsweredPage(m, 500, 0)
		if out() {
			t.Fatal("ejected without two errors in a row")
		}
		if p.Answered(m, 500, nil, 0); !out() {
			t.Fatal("a page of an error ends the row of errors")
		}
		time.Sleep(ejectFor)
		if p.AnsweredPage(m, 503, 0); !m.onTrial.Load() {
			t.Error("a page of an error ends the trial")
		}
		if p.AnsweredPage(m, 200, 0); m.onTrial.Load() || len(p.absences.List()) != 0 {
			t.Error("a good page does not end the trial")
		}
	})
}

// A trial ends with the setting: then a Pod that is reached is back.
func TestTrialEndsWithSetting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, addrs := poolOf(t, dialect.RoundRobin, 4)
		p.Set(Options{Balance: dialect.RoundRobin, Eject: dialect.Eject{Errors: 1}}, addrs, 0)
		m := p.members[0]
		p.Answered(m, 500, nil, 0)
		p.Set(Options{Balance: dialect.RoundRobin}, addrs, 0)
		time.Sleep(ejectFor)
		p.Answered(m, 200, nil, 0)
		p.Reached(m)
		if list := p.absences.List(); len(list) != 0 || m.failures != 0 {
			t.Errorf("it was reached: %+v, %d failures", list, m.failures)
		}
		p.Set(Options{Balance: dialect.RoundRobin, Eject: dialect.Eject{Errors: 2}}, addrs, 0)
		p.Answered(m, 500, nil, 0)
		if _, _, n := p.Count(); n != 0 {
			t.Error("one error of two ejects it")
		}
	})
}

// What checks find replaces what clients found. The entry of a Pod ends when no client tries the Pod for some time, or when it leaves.
func TestAbsences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, addrs := poolOf(t, dialect.RoundRobin, 4)
		changes := 0
		p.absences.changed = func() { changes++ }
		m := p.members[0]
		p.Failed(m, errRefused)
		began := time.Now()
		time.Sleep(time.Second)
		m.bad = true
		p.turned(m, errors.New(strings.Repeat("x", 1000)))
		p.Failed(m, errRefused) // of a client that has waited
		list := p.absences.List()
		if len(list) != 1 || list[0].Ejected || !list[0].Since.Equal(began) || len(list[0].Reason) > maxReason+3 || changes != 2 {
			t.Errorf("%+v, %d changes", list, changes)
		}
		m.bad = false
		if p.turned(m, nil); len(p.absences.List()) != 0 || changes != 3 {
			t.Errorf("its checks pass: %+v, %d changes", p.absences.List(), changes)
		}
		p.Failed(p.members[1], errRefused)
		time.Sleep(ejectFor + mostEject + time.Second)
		if list := p.absences.List(); len(list) != 0 {
			t.Errorf("no client has tried it for some time, and it is listed: %+v", list)
		}
		p.Failed(p.members[2], errRefused)
		if p.Set(Options{Balance: dialect.RoundRobin}, addrs[:2], 0); len(p.absences.List()) != 0 {
			t.Errorf("it has left: %+v", p.absences.List())
		}
	})
}

// A result of checks that have ended since says nothing: no other check would take it back.
func TestLateResult(t *testing.T) {
	p, _ := poolOf(t, dialect.RoundRobin, 2)
	m := p.members[0]
	ctx, cancel := context.WithCancel(t.Context())
	if !p.conclude(ctx, m, true, false, errRefused) || !m.bad || p.conclude(ctx, m, true, false, errRefused) {
		t.Error("checks that fail")
	}
	if !p.conclude(ctx, m, false, true, nil) || m.bad || p.conclude(ctx, m, false, true, nil) {
		t.Error("checks that pass")
	}
	cancel()
	if p.conclude(ctx, m, true, false, errRefused) || m.bad || len(p.absences.List()) > 0 {
		t.Errorf("checks that have ended: %+v", p.absences.List())
	}
}
