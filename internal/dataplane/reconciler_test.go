package dataplane_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// store is what a mode writes to, as small as can be: a line for each frontend, and
// one for the Settings.
type store struct {
	fronts   map[dataplane.FrontKey]string
	settings string
}

var errBroken = errors.New("the store is broken")

// storeTarget is the smallest Target that keeps to the contract.
type storeTarget struct {
	store *store
	// rejects are the addresses that the store rejects, broken makes the next calls
	// fail.
	rejects map[netip.Addr]bool
	broken  func() bool

	known  map[dataplane.FrontKey]string // what the store has, as remembered
	reads  int
	writes []dataplane.FrontKey // tried
}

func (t *storeTarget) Read(_ context.Context, c *dataplane.Change) error {
	t.reads++
	if t.broken() {
		return errBroken
	}
	if c.Trusted {
		for k, was := range t.known {
			if t.store.fronts[k] != was {
				c.Drift("%s was changed", k)
			}
		}
		for k := range t.store.fronts {
			if t.known[k] == "" {
				c.Drift("%s was foreign", k)
			}
		}
	}
	t.known = maps.Clone(t.store.fronts)
	return nil
}

func (t *storeTarget) Write(_ context.Context, c *dataplane.Change) error {
	if c.Full {
		for k := range t.known {
			if _, dirty := c.Dirty[k]; !dirty {
				c.Dirty[k] = table.Key{}
			}
		}
		t.store.settings = fmt.Sprint(c.Settings)
	}
	for k := range c.Dirty {
		t.writes = append(t.writes, k)
		if t.broken() {
			return errBroken
		}
		want := ""
		if p, f := c.Wanted(k); f != nil {
			want = p.ID.String() + fmt.Sprint(f.Endpoints)
		}
		if t.known[k] == want {
			continue
		}
		if t.store.fronts[k] != t.known[k] {
			return fmt.Errorf("%s: %w", k, dataplane.ErrStale)
		}
		if t.rejects[k.Addr] {
			c.Reject(k, fmt.Errorf("the store rejects %s", k))
			continue
		}
		put(t.store.fronts, k, want)
		put(t.known, k, want)
	}
	return nil
}

func put(m map[dataplane.FrontKey]string, k dataplane.FrontKey, text string) {
	if m[k] = text; text == "" {
		delete(m, k)
	}
}

// world is a Reconciler over a store, and what a caller that keeps to the contract
// of Applier knows.
type world struct {
	r      *dataplane.Reconciler
	target *storeTarget
	now    map[table.Key]*table.ServicePort
	nodes  []netip.Addr
	known  bool               // the last Apply returned nil or a *Rejected
	behind map[table.Key]bool // changed since, or rejected by it
}

func newWorld(watch bool) *world {
	w := &world{now: map[table.Key]*table.ServicePort{}, behind: map[table.Key]bool{}}
	st := &store{fronts: map[dataplane.FrontKey]string{}}
	w.target = &storeTarget{store: st, rejects: map[netip.Addr]bool{}, broken: func() bool { return false }}
	var hooks dataplane.Hooks
	if watch {
		hooks.Unchanged = func() bool { return maps.Equal(w.target.known, st.fronts) }
	}
	w.r = dataplane.NewReconciler("store", hooks)
	w.r.Add(svc.IPv4, w.target)
	return w
}

func (w *world) table() *table.Table {
	t := table.New(slices.Collect(maps.Values(w.now))...)
	t.NodePortAddrs = w.nodes
	return t
}

// apply brings the store to the Table, by changes if full is not set and they are
// known, and returns the ports rejected.
func (w *world) apply(ctx context.Context, full bool) (map[table.Key]error, error) {
	var changed []table.Key
	if w.known && !full {
		changed = append([]table.Key{}, slices.Collect(maps.Keys(w.behind))...)
	}
	err := w.r.Apply(ctx, w.table(), changed)
	var rejected *dataplane.Rejected
	if err != nil && !errors.As(err, &rejected) {
		w.known = false
		return nil, err
	}
	w.known = true
	clear(w.behind)
	if rejected == nil {
		return nil, nil
	}
	for k := range rejected.Ports {
		w.behind[k] = true
	}
	return rejected.Ports, nil
}

// has is what the store should have of the ports that keys does not name.
func (w *world) has(but map[table.Key]error) map[dataplane.FrontKey]string {
	out := map[dataplane.FrontKey]string{}
	for k, p := range w.now {
		for i := range p.Frontends {
			if f := &p.Frontends[i]; but[k] == nil {
				out[dataplane.KeyOf(p.Protocol, f)] = p.ID.String() + fmt.Sprint(f.Endpoints)
			}
		}
	}
	return out
}

// Whatever Tables, faults and foreign changes come in whichever order: a port that
// is not named as rejected is as the Table has it, one that is is named whenever it
// was tried, and when the faults end all is as the Table has it.
func TestReconcilerConverges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(rapid.Bool().Draw(t, "watch"))
		addr := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 96, 0, byte(n)}) }
		faults := true
		w.target.broken = func() bool { return faults && rapid.IntRange(0, 19).Draw(t, "fault") == 0 }
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			n := rapid.IntRange(1, 6).Draw(t, "which")
			switch rapid.IntRange(0, 6).Draw(t, "what") {
			case 0, 1, 2: // A Service comes, or changes.
				f := table.Frontend{Addr: netip.AddrPortFrom(addr(n), 80)}
				for range rapid.IntRange(0, 3).Draw(t, "endpoints") {
					f.Endpoints = append(f.Endpoints, table.Endpoint{Addr: netip.AddrPortFrom(addr(100+len(f.Endpoints)), 80)})
				}
				p := flows.Port(fmt.Sprintf("s%d", n), "", svc.IPv4, svc.TCP, f)
				if rapid.IntRange(0, 5).Draw(t, "invalid") == 0 {
					p.Protocol = 99
				}
				w.now[p.Key()], w.behind[p.Key()] = p, true
			case 3:
				k := flows.Port(fmt.Sprintf("s%d", n), "", svc.IPv4, svc.TCP).Key()
				delete(w.now, k)
				w.behind[k] = true
			case 4:
				k := dataplane.FrontKey{Addr: addr(n), Port: 80, Proto: svc.TCP}
				put(w.target.store.fronts, k, rapid.SampledFrom([]string{"", "foreign"}).Draw(t, "foreign"))
			case 5:
				w.target.rejects[addr(n)] = !w.target.rejects[addr(n)]
			case 6:
				w.nodes = []netip.Addr{addr(n)}
			}
			full := rapid.IntRange(0, 3).Draw(t, "full") == 0
			rejected, err := w.apply(t.Context(), full)
			if err != nil {
				continue
			}
			for k, p := range w.now {
				if p.Protocol == 99 && rejected[k] == nil && full {
					t.Fatalf("%v cannot be written and is not named", k)
				}
			}
			if !full {
				continue
			}
			for k, want := range w.has(rejected) {
				if got := w.target.store.fronts[k]; got != want {
					t.Fatalf("%s is %q, want %q; rejected %v", k, got, want, rejected)
				}
			}
		}
		faults = false
		clear(w.target.rejects)
		for k, p := range w.now {
			if p.Protocol == 99 {
				delete(w.now, k)
				w.behind[k] = true
			}
		}
		if rejected, err := w.apply(t.Context(), true); err != nil || rejected != nil {
			t.Fatalf("rejected %v, %v, though nothing is wrong any more", rejected, err)
		}
		if want := w.has(nil); !maps.Equal(w.target.store.fronts, want) {
			t.Fatalf("the store has %v, want %v", w.target.store.fronts, want)
		}
		if want := fmt.Sprint(dataplane.SettingsOf(w.table(), svc.IPv4)); w.target.store.settings != want {
			t.Fatalf("settings %s, want %s", w.target.store.settings, want)
		}
		// By now it is known: a change costs itself.
		w.target.reads, w.target.writes = 0, nil
		one := flows.Port("s1", "", svc.IPv4, svc.TCP, table.Frontend{Addr: netip.AddrPortFrom(addr(1), 80)})
		w.now[one.Key()], w.behind[one.Key()] = one, true
		if _, err := w.apply(t.Context(), false); err != nil || w.target.reads != 0 || len(w.target.writes) != 1 {
			t.Fatalf("%v: %d reads, %v written for one Service", err, w.target.reads, w.target.writes)
		}
		if _, err := w.apply(t.Context(), true); err != nil || len(w.r.Repaired()) != 0 {
			t.Fatalf("%v, repaired %q, though no other program changed anything", err, w.r.Repaired())
		}
	})
}

func at(w *world, name string, n byte) *table.ServicePort {
	p := flows.Port(name, "", svc.IPv4, svc.TCP, table.Frontend{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 0, n}), 80)})
	w.now[p.Key()], w.behind[p.Key()] = p, true
	return p
}

// What is not as it was left is reported once; what is in doubt is not.
func TestReconcilerReportsDrift(t *testing.T) {
	w := newWorld(false)
	w.target.store.fronts[dataplane.FrontKey{Addr: netip.MustParseAddr("10.96.0.9"), Port: 80, Proto: svc.TCP}] = "an earlier process"
	p := at(w, "web", 1)
	apply := func(want string) {
		t.Helper()
		if _, err := w.apply(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(w.r.Repaired(), "\n"); got != want {
			t.Errorf("repaired %q, want %q", got, want)
		}
	}
	apply("")
	delete(w.target.store.fronts, dataplane.KeyOf(svc.TCP, &p.Frontends[0]))
	apply("TCP 10.96.0.1:80 was changed")
	apply("")
	// What an error interrupts is no foreign change.
	at(w, "other", 2)
	broken := true
	w.target.broken = func() bool { return broken }
	if _, err := w.apply(t.Context(), false); !errors.Is(err, errBroken) {
		t.Fatal(err)
	}
	broken = false
	apply("")
}

// A foreign change that a delta meets leads to a full comparison by itself.
func TestReconcilerReadsWhatIsStale(t *testing.T) {
	w := newWorld(false)
	p := at(w, "web", 1)
	if _, err := w.apply(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	w.target.store.fronts[dataplane.KeyOf(svc.TCP, &p.Frontends[0])] = "foreign"
	clear(w.now)
	w.behind[p.Key()] = true
	reads := w.target.reads
	if _, err := w.apply(t.Context(), false); err != nil || len(w.target.store.fronts) != 0 || w.target.reads != reads+1 {
		t.Errorf("%v: %d reads, the store has %v", err, w.target.reads-reads, w.target.store.fronts)
	}
}

// A full comparison that need not read, since no other program changed anything, still
// tries what was rejected, and says so.
func TestReconcilerTriesTheRejectedAgain(t *testing.T) {
	w := newWorld(true)
	if _, err := w.apply(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	p := at(w, "web", 1)
	w.target.rejects[p.Frontends[0].Addr.Addr()] = true
	for _, full := range []bool{false, true} {
		reads := w.target.reads
		if rejected, err := w.apply(t.Context(), full); err != nil || rejected[p.Key()] == nil || w.target.reads != reads {
			t.Errorf("full %v: rejected %v, %v after %d reads, want the port named after none", full, rejected, err, w.target.reads-reads)
		}
	}
	clear(w.target.rejects)
	if rejected, err := w.apply(t.Context(), true); err != nil || rejected != nil || len(w.target.store.fronts) != 1 {
		t.Errorf("rejected %v, %v; the store has %v", rejected, err, w.target.store.fronts)
	}
}

// A port that cannot be written stays as it was, and does not keep an address from
// the Service that has it now.
func TestSuccessorOfARejectedPort(t *testing.T) {
	w := newWorld(false)
	at(w, "a", 1)
	if _, err := w.apply(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	bad := at(w, "a", 2)
	bad.Protocol = 99
	b := at(w, "b", 1)
	for _, full := range []bool{false, true} {
		rejected, err := w.apply(t.Context(), full)
		if err != nil || rejected[bad.Key()] == nil || len(rejected) != 1 {
			t.Errorf("rejected %v, %v, want %v alone", rejected, err, bad.Key())
		}
		if got := w.target.store.fronts[dataplane.KeyOf(svc.TCP, &b.Frontends[0])]; !strings.HasPrefix(got, "default/b") {
			t.Errorf("full %v: the address is %q, want Service b's", full, got)
		}
	}
}
