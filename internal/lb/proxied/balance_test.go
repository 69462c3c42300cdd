package proxied

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// spread returns how many of n connections each Pod has, by its name.
func (r *rig) spread(n int) map[string]int {
	r.Helper()
	out := map[string]int{}
	for range n {
		c := r.Dial()
		got, err := lbtest.Say(c, "x")
		r.Must(err)
		r.Must(c.Close())
		out[strings.Fields(got)[0]]++
	}
	return out
}

// Pods have connections by their weights, none without one (behaviours 178, 179).
func TestWeights(t *testing.T) {
	for _, balance := range []string{"round-robin", "least-connections", "random-of-two"} {
		r := newRig(t, map[string]string{"fairlead.dev/lb-balance": balance})
		a, b, c := r.Pod(lbtest.Named("a")), r.Pod(lbtest.Named("b")), r.Pod(lbtest.Named("c"))
		r.service.Weights = map[netip.AddrPort]int{a: 3, c: 0}
		r.set(a, b, c)
		got := r.spread(40)
		if got["c"] > 0 || balance == "round-robin" && got["a"] != 30 || balance == "random-of-two" && got["a"] <= got["b"] {
			t.Errorf("%s: %v", balance, got)
		}
		r.service.Weights = map[netip.AddrPort]int{a: 0, c: 0}
		r.set(a, c)
		if got, err := lbtest.Say(r.Dial(), "x"); err == nil {
			t.Errorf("%s: %q of Pods without weight", balance, got)
		}
	}
	// Open ones count by their weights.
	r := newRig(t, map[string]string{"fairlead.dev/lb-balance": "least-connections"})
	a, b := r.Pod(lbtest.Named("a")), r.Pod(lbtest.Named("b"))
	r.service.Weights = map[netip.AddrPort]int{a: 3}
	r.set(a, b)
	open := map[string]int{}
	for range 12 {
		got, err := lbtest.Say(r.Dial(), "x")
		r.Must(err)
		open[got]++
	}
	if open["a x\n"] != 9 {
		t.Errorf("%v", open)
	}
}

// A Pod that comes has few connections at first.
func TestSlowStart(t *testing.T) {
	r := newRig(t, map[string]string{"fairlead.dev/lb-slow-start": "3600"})
	a, b, c := r.Pod(lbtest.Named("a")), r.Pod(lbtest.Named("b")), r.Pod(lbtest.Named("c"))
	r.set(a, b)
	if got := r.spread(20); got["a"] != 10 || got["b"] != 10 {
		t.Errorf("at the beginning: %v", got)
	}
	r.set(a, b, c)
	if got := r.spread(42); got["c"] > 3 || got["c"] == 0 {
		t.Errorf("a Pod that has come: %v", got)
	}
	r.ask(map[string]string{"fairlead.dev/lb-slow-start": "1"})
	r.set(a, b, c)
	for deadline := time.Now().Add(lbtest.Patience); ; {
		if got := r.spread(9); got["c"] == 3 {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("a Pod that has come long ago: %v", got)
		}
	}
}
