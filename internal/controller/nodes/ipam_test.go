package nodes

import (
	"fmt"
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

// No part is given out twice, what a Node has is not given to another, and
// everything can be given out.
func TestCIDRRangeGivesNothingTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		base := netip.MustParsePrefix(rapid.SampledFrom([]string{"10.244.0.0/20", "fd00:10:244::/60"}).Draw(t, "range"))
		mask := base.Bits() + 4
		r, err := newCIDRRange(base, mask)
		if err != nil {
			t.Fatal(err)
		}
		has := map[string]netip.Prefix{}
		for i := range 60 {
			node := fmt.Sprintf("n%d", i)
			if rapid.Bool().Draw(t, "give") || len(has) == 0 {
				p, ok := r.next(node)
				if ok != (len(has) < 16) {
					t.Fatalf("%d of 16 given, and next says %v", len(has), ok)
				}
				if !ok {
					continue
				}
				for other, q := range has {
					if p.Overlaps(q) {
						t.Fatalf("%s has %s, %s has %s", node, p, other, q)
					}
				}
				if !base.Contains(p.Addr()) || p.Bits() != mask {
					t.Fatalf("%s is no part of %s", p, base)
				}
				has[node] = p
			} else {
				for other, p := range has {
					r.release(p, other)
					delete(has, other)
					break
				}
			}
		}
	})
}

func TestCIDRRangeOverlap(t *testing.T) {
	r, err := newCIDRRange(netip.MustParsePrefix("10.244.0.0/16"), 24)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ node, prefix, other string }{
		{"a", "10.244.0.0/23", ""},
		{"b", "10.244.1.128/25", "a"},
		{"c", "10.244.2.0/24", ""},
		{"d", "192.168.0.0/24", ""},
		{"e", "10.0.0.0/8", "a b c"},
	} {
		other := r.occupy(netip.MustParsePrefix(c.prefix), c.node)
		if (other == "") != (c.other == "") {
			t.Errorf("%s: overlaps with %q, want one of %q", c.prefix, other, c.other)
		}
	}
	r.release(netip.MustParsePrefix("10.0.0.0/8"), "e")
	if p, ok := r.next("f"); !ok || p.String() != "10.244.3.0/24" {
		t.Errorf("next is %s", p)
	}
	for _, bad := range []struct {
		p    string
		mask int
	}{{"10.0.0.0/24", 16}, {"10.0.0.0/8", 33}, {"fd00::/32", 64}} {
		if _, err := newCIDRRange(netip.MustParsePrefix(bad.p), bad.mask); err == nil {
			t.Errorf("%s in /%d is accepted", bad.p, bad.mask)
		}
	}
}
