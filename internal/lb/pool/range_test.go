package pool

import (
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestParse(t *testing.T) {
	for _, c := range []struct{ text, want, fails string }{
		{"192.0.2.0/24", "192.0.2.0-192.0.2.255", ""},
		{" 192.0.2.7/32 ", "192.0.2.7", ""},
		{"192.0.2.10 - 192.0.2.20", "192.0.2.10-192.0.2.20", ""},
		{"192.0.2.10-192.0.2.10", "192.0.2.10", ""},
		{"2001:db8::/64", "2001:db8::-2001:db8::ffff:ffff:ffff:ffff", ""},
		{"10.0.0.0/8", "10.0.0.0-10.255.255.255", ""},
		{"", "", "want a CIDR"},
		{"192.0.2.1", "", "want a CIDR"},
		{"office", "", "want a CIDR"},
		{"192.0.2.1-192.0.2.2-192.0.2.3", "", "want a CIDR"},
		{"fe80::1%eth0-fe80::2%eth0", "", "want a CIDR"},
		{"192.0.02.0/24", "", "want a CIDR"},
		{"192.0.2.0/33", "", "want a CIDR"},
		{strings.Repeat("x", 1000), "", `x..."`},
		{"192.0.2.20-192.0.2.10", "", "before the first"},
		{"192.0.2.1-2001:db8::1", "", "different families"},
		{"192.0.2.7/24", "", "want 192.0.2.0/24"},
		{"0.0.0.0/0", "", "every address"},
		{"::/0", "", "every address"},
		{"0.0.0.0-0.0.0.9", "", "no destinations"},
		{"126.0.0.0-128.0.0.0", "", "loopback"},
		{"::1/128", "", "loopback"},
		{"169.254.0.0/24", "", "link-local"},
		{"fe80::/64", "", "link-local"},
		{"224.0.0.0/24", "", "multicast"},
		{"ff02::/64", "", "multicast"},
		{"255.255.255.255/32", "", "broadcast"},
		{"::ffff:192.0.2.0/120", "", "IPv4-mapped"},
		{"::ffff:192.0.2.1-::ffff:192.0.2.9", "", "IPv4-mapped"},
	} {
		r, err := Parse(c.text)
		switch {
		case c.fails == "" && (err != nil || r.String() != c.want):
			t.Errorf("%q: %s, %v, want %s", c.text, r, err, c.want)
		case c.fails != "" && (err == nil || !strings.Contains(err.Error(), c.fails) || len(err.Error()) > 300):
			t.Errorf("%.50q: %v, want %q", c.text, err, c.fails)
		}
	}
	if list, err := ParseList("192.0.2.0/30, 2001:db8::1-2001:db8::9"); err != nil || len(list) != 2 {
		t.Errorf("%v, %v", list, err)
	}
	if _, err := ParseList("192.0.2.0/30,"); err == nil {
		t.Error("an empty item is accepted")
	}
}

// Sizes and differences of ranges, against counting.
func TestRangesAgainstCounting(t *testing.T) {
	at := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, byte(2 + i/256), byte(i)}) }
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) Range {
			a := rapid.IntRange(0, 1000).Draw(t, name)
			return Range{at(a), at(rapid.IntRange(a, 1023).Draw(t, name))}
		}
		r := draw("range")
		others := []Range{draw("other"), draw("another")}
		var size, buggy uint64
		var left []netip.Addr
		for a := r.First; r.Contains(a); a = a.Next() {
			size++
			if b := a.As4(); b[3] == 0 || b[3] == 255 {
				buggy++
			}
			if !others[0].Contains(a) && !others[1].Contains(a) {
				left = append(left, a)
			}
		}
		if r.size() != size || r.buggy() != buggy {
			t.Fatalf("%s: %d addresses and %d ending with 0 or 255, counted %d and %d", r, r.size(), r.buggy(), size, buggy)
		}
		var got []netip.Addr
		for _, p := range r.without(others) {
			for a := p.First; p.Contains(a); a = a.Next() {
				got = append(got, a)
			}
		}
		if !slices.Equal(got, left) {
			t.Fatalf("%s without %s: %s", r, others, r.without(others))
		}
	})
}

func TestSizeOfHugeRanges(t *testing.T) {
	for text, want := range map[string]uint64{
		"2001:db8::/64": math.MaxUint64, "2001:db8::/65": 1 << 63, "2001:db8::/48": math.MaxUint64, "10.0.0.0/8": 1 << 24,
		"2001:db8::ffff:ffff:ffff:ffff-2001:db8:0:1::": 2, "2001:db8::1-2001:db8::ffff:ffff:ffff:ffff": math.MaxUint64,
	} {
		if r, err := Parse(text); err != nil || r.size() != want {
			t.Errorf("%s: %d, want %d: %v", text, r.size(), want, err)
		}
	}
}
