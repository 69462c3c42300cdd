package front

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// writes is a node's network that records what is written: the addresses that are local, and each state of the filter.
type writes struct {
	vips, clusterIPs []string // one for each call
	states           []string // as "ADDRESSES first FIRST"
	fail             error    // of SetVIPs
	earlier          []netip.Addr
	old              bool // the kernel leads no packets to other sockets
}

func (w *writes) Redirects() bool { return !w.old }
func (w *writes) Firsts() bool    { return true }
func (w *writes) Close() error    { return nil }
func (w *writes) Settle()         { w.states = append(w.states, "settled") }

func (w *writes) SetBound(addrs []netip.Addr, listeners []filter.Bound) error {
	addrs = slices.Clone(addrs)
	slices.SortFunc(addrs, netip.Addr.Compare)
	var first []netip.Addr
	for _, l := range listeners {
		if l.First {
			first = append(first, l.At.Addr())
		}
	}
	state := fmt.Sprint(slices.Compact(addrs), " first ", first)
	if len(w.states) == 0 || w.states[len(w.states)-1] != state { // the filter writes nothing then
		w.states = append(w.states, state)
	}
	return nil
}

// reset forgets what was written but the state of the filter.
func (w *writes) reset() {
	w.vips, w.clusterIPs, w.states = nil, nil, w.states[len(w.states)-1:]
}

func newWrites() (*writes, *localAddresses) {
	w := &writes{}
	return w, newLocalAddresses(slog.New(slog.DiscardHandler), &Network{
		SetVIPs: func(a, _ []netip.Addr) error { w.vips = append(w.vips, fmt.Sprint(a)); return w.fail },
		SetClusterIPs: func(a, _ []netip.Addr) error {
			w.clusterIPs = append(w.clusterIPs, fmt.Sprint(a))
			return nil
		},
		ClusterIPs: func() ([]netip.Addr, error) { return w.earlier, nil },
		Filter:     w,
	})
}

// boundServer notes whether its listeners are inside.
type boundServer struct {
	*proxied.Server
	inside bool
}

func (s *boundServer) BindInside() { s.inside = true }

type emptyRules struct{}

func (emptyRules) Set([]netip.Prefix, []filter.Group) error { return nil }
func (emptyRules) Close() error                             { return nil }

// On a kernel that leads no packets to other sockets listeners are bound to addresses of Services, with a warning.
func TestListenersOfOldKernels(t *testing.T) {
	t.Parallel()
	for _, old := range []bool{false, true} {
		w, l := newWrites()
		w.old, l.network.Rules = old, emptyRules{}
		log := &lbtest.Buffer{}
		server := &boundServer{Server: proxied.New(proxied.Options{Log: slog.New(slog.DiscardHandler)})}
		f := New(Options{NodeName: "n1", Server: server, Network: l.network, Log: slog.New(slog.NewTextHandler(log, nil))})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		f.Run(ctx)
		if warned := strings.Contains(log.String(), "level=WARN") && strings.Contains(log.String(), "(nf_tables with tproxy)"); warned != old {
			t.Errorf("old kernel %t: the log has %q", old, log.String())
		}
		if server.inside == old {
			t.Errorf("old kernel %t: listeners are inside: %t", old, server.inside)
		}
	}
}

// localDoors are a load balancer at 192.0.2.1 and a Service with routes at 10.96.0.7.
func localDoors() []proxied.Door {
	inside := netip.MustParseAddrPort("127.0.0.9:1000")
	return []proxied.Door{
		{At: netip.MustParseAddrPort("192.0.2.1:80"), Inside: inside},
		{At: netip.MustParseAddrPort("10.96.0.7:80"), Inside: inside, ClusterIP: true},
	}
}

// A repair writes the local routes again, and leaves the filter: no connection to a ClusterIP passes its routes by meanwhile.
func TestRepairKeepsTheFilter(t *testing.T) {
	t.Parallel()
	w, l := newWrites()
	for range 3 {
		if err := l.set(localDoors()); err != nil {
			t.Fatal(err)
		}
		l.repair()
	}
	if got := fmt.Sprint(w.vips, w.clusterIPs); got != "[[192.0.2.1] [192.0.2.1] [192.0.2.1]] [[10.96.0.7] [10.96.0.7] [10.96.0.7]]" {
		t.Errorf("local became %s", got)
	}
	const whole = "[10.96.0.7 192.0.2.1] first [10.96.0.7]"
	if want := []string{"[10.96.0.7 192.0.2.1] first []", whole}; !slices.Equal(w.states, want) {
		t.Errorf("the filter had the states %q, want %q", w.states, want)
	}
	w.reset()
	l.repair()
	w.fail = errors.New("no memory")
	for range 2 {
		if err := l.set(localDoors()); !errors.Is(err, w.fail) {
			t.Errorf("a failure was lost: %v", err)
		}
	}
	w.fail = nil
	if err := l.set(localDoors()); err != nil || len(w.vips) != 3 || len(w.clusterIPs) != 1 {
		t.Errorf("%v, local became %v %v", err, w.vips, w.clusterIPs)
	}
	if !slices.Equal(w.states, []string{whole}) {
		t.Errorf("after a failure the filter had the states %q", w.states)
	}
	w.reset()
	if err := l.set(localDoors()); err != nil || len(w.vips)+len(w.clusterIPs) != 0 {
		t.Errorf("%v; without a change local became %v %v", err, w.vips, w.clusterIPs)
	}
}

// Packets pass the hooks between the writes that take a listener of a ClusterIP away, and after the last one.
func TestPacketsPassBeforeAListenerGoes(t *testing.T) {
	t.Parallel()
	w, l := newWrites()
	if err := l.set(localDoors()); err != nil {
		t.Fatal(err)
	}
	w.reset()
	l.close(localDoors(), nil)
	const local = "[10.96.0.7 192.0.2.1] first "
	if want := []string{local + "[10.96.0.7]", local + "[]", "settled", local + "[]", "settled"}; !slices.Equal(w.states, want) {
		t.Errorf("the filter had the states %q, want %q", w.states, want)
	}
	w.reset()
	l.close(localDoors()[:1], nil)
	if slices.Contains(w.states[1:], "settled") {
		t.Error("a load balancer waits for packets")
	}
}

// What a failed call may have made local is filtered until a call succeeds, also if no Service has it any more.
func TestFailedAddressesStayFiltered(t *testing.T) {
	t.Parallel()
	w, l := newWrites()
	w.fail = errors.New("no memory")
	_ = l.set(localDoors()[:1])
	w.fail = nil
	if err := l.set(nil); err != nil {
		t.Fatal(err)
	}
	if want := []string{"[192.0.2.1] first []", "[] first []"}; !slices.Equal(w.states, want) || len(w.vips) != 2 {
		t.Errorf("states %q, local became %v", w.states, w.vips)
	}
	w.reset()
	w.fail = errors.New("no memory")
	_ = l.set(localDoors()[:1])
	_ = l.set(nil)
	if last := w.states[len(w.states)-1]; last != "[192.0.2.1] first []" {
		t.Errorf("the filter has %s", last)
	}
}

// A ClusterIP whose routes have gone stays local for open connections, also if the change comes with a repair.
func TestRoutesLingerAfterRepair(t *testing.T) {
	t.Parallel()
	w, l := newWrites()
	for range 2 { // the second call has nothing to do
		if err := l.set(localDoors()); err != nil {
			t.Fatal(err)
		}
	}
	w.reset()
	l.repair()
	if err := l.set(localDoors()[:1]); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(w.clusterIPs); got != "[[10.96.0.7]]" {
		t.Errorf("local became %s", got)
	}
}

// After a restart the ClusterIPs that are still local come here from the first state of the filter on, and those without routes are
// kept for open connections.
func TestRoutesAfterRestart(t *testing.T) {
	t.Parallel()
	w, l := newWrites()
	w.earlier = []netip.Addr{netip.MustParseAddr("10.96.0.7"), netip.MustParseAddr("10.96.0.8")}
	for range 2 {
		if err := l.set(localDoors()); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"[10.96.0.7 10.96.0.8 192.0.2.1] first [10.96.0.7]"}; !slices.Equal(w.states, want) {
		t.Errorf("the filter had the states %q, want %q", w.states, want)
	}
	if got := fmt.Sprint(w.clusterIPs); got != "[[10.96.0.7 10.96.0.8]]" {
		t.Errorf("local became %s", got)
	}
}

// Five minutes after a ClusterIP has lost its routes it is no longer local, and not before.
func TestLingeringEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, l := newWrites()
		for _, doors := range [][]proxied.Door{localDoors(), nil} {
			if err := l.set(doors); err != nil {
				t.Fatal(err)
			}
		}
		for _, step := range []struct {
			after time.Duration
			want  string
		}{{lingerTime, "[]"}, {time.Nanosecond, "[[]]"}, {lingerTime, "[]"}} {
			w.reset()
			time.Sleep(step.after)
			if err := l.set(nil); err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprint(w.clusterIPs); got != step.want {
				t.Errorf("%v later local became %s, want %s", step.after, got, step.want)
			}
		}
	})
}
