// Package pool knows which addresses pools have, who holds them, and which address a
// Service gets. It is pure, and no part of it counts or lists the addresses of a range:
// a pool of a whole /64 costs as much as one of ten addresses.
package pool

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strings"
)

// Range is all addresses from First to Last, of one family.
type Range struct {
	First, Last netip.Addr
}

// String returns "first-last", or the address if there is only one.
func (r Range) String() string {
	if r.First == r.Last {
		return r.First.String()
	}
	return r.First.String() + "-" + r.Last.String()
}

// Contains reports whether a lies in the range.
func (r Range) Contains(a netip.Addr) bool {
	return a.BitLen() == r.First.BitLen() && r.First.Compare(a) <= 0 && a.Compare(r.Last) <= 0
}

// Overlaps reports whether some address lies in both ranges.
func (r Range) Overlaps(o Range) bool {
	return r.First.BitLen() == o.First.BitLen() && r.First.Compare(o.Last) <= 0 && o.First.Compare(r.Last) <= 0
}

// FromPrefix returns the range of all addresses of a prefix.
func FromPrefix(p netip.Prefix) Range {
	p = p.Masked()
	last := p.Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 1 << (7 - i%8)
	}
	end, _ := netip.AddrFromSlice(last)
	return Range{p.Addr(), end}
}

// never are addresses that no host on a network can have.
var never = []struct {
	prefix netip.Prefix
	why    string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "addresses of 0.0.0.0/8 are no destinations"},
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback addresses do not leave a machine"},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local addresses are not routed"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast addresses belong to no single host"},
	{netip.MustParsePrefix("255.255.255.255/32"), "the broadcast address belongs to no single host"},
	{netip.MustParsePrefix("::/127"), "the unspecified and the loopback address do not leave a machine"},
	{netip.MustParsePrefix("::ffff:0:0/96"), "IPv4-mapped addresses are no destinations: write them as IPv4"},
	{netip.MustParsePrefix("fe80::/10"), "link-local addresses are not routed"},
	{netip.MustParsePrefix("ff00::/8"), "multicast addresses belong to no single host"},
}

// wantedSyntax is what Parse reads, as an error shows it.
const wantedSyntax = "want a CIDR like 192.0.2.0/24 or first-last like 192.0.2.10-192.0.2.20"

// maxShown bounds how much of a wrong value an error repeats.
const maxShown = 100

// Parse reads a CIDR, or first-last with optional blanks around the dash.
func Parse(text string) (Range, error) {
	r, err := parse(strings.TrimSpace(text))
	if err != nil {
		if len(text) > maxShown {
			text = text[:maxShown] + "..."
		}
		return Range{}, fmt.Errorf("%q: %w", text, err)
	}
	return r, nil
}

func parse(text string) (Range, error) {
	var r Range
	if first, last, pair := strings.Cut(text, "-"); pair {
		var err, err2 error
		r.First, err = netip.ParseAddr(strings.TrimSpace(first))
		r.Last, err2 = netip.ParseAddr(strings.TrimSpace(last))
		switch {
		case err != nil || err2 != nil || r.First.Zone() != "" || r.Last.Zone() != "":
			return r, errors.New(wantedSyntax)
		case r.First.Is4() != r.Last.Is4():
			return r, errors.New("the first and the last address are of different families")
		case r.Last.Less(r.First):
			return r, errors.New("the last address is before the first")
		}
	} else {
		p, err := netip.ParsePrefix(text)
		switch {
		case err != nil:
			return r, errors.New(wantedSyntax)
		case p.Bits() == 0:
			return r, errors.New("that is every address there is")
		case p.Masked() != p:
			return r, fmt.Errorf("bits are set behind the prefix: want %s, or first-last for a part of it", p.Masked())
		}
		r = FromPrefix(p)
	}
	for _, n := range never {
		if r.Overlaps(FromPrefix(n.prefix)) {
			return r, errors.New(n.why)
		}
	}
	return r, nil
}

// ParseList reads ranges separated by commas.
func ParseList(text string) ([]Range, error) {
	var out []Range
	for item := range strings.SplitSeq(text, ",") {
		r, err := Parse(item)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

// number is an address as a number of 128 bits.
type number struct{ hi, lo uint64 }

func numberOf(a netip.Addr) number {
	b := a.As16()
	return number{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

// size returns how many addresses r has, math.MaxUint64 if there are more.
func (r Range) size() uint64 {
	a, b := numberOf(r.First), numberOf(r.Last)
	hi, lo := b.hi-a.hi, b.lo-a.lo
	if b.lo < a.lo {
		hi--
	}
	if hi != 0 || lo == math.MaxUint64 {
		return math.MaxUint64
	}
	return lo + 1
}

// buggy returns how many addresses of an IPv4 range end with .0 or .255.
func (r Range) buggy() uint64 {
	if !r.First.Is4() {
		return 0
	}
	below := func(n uint64) uint64 { // n exclusive
		rest := n % 256
		return n/256*2 + min(rest, 1)
	}
	a, b := numberOf(r.First).lo&math.MaxUint32, numberOf(r.Last).lo&math.MaxUint32
	return below(b+1) - below(a)
}

func isBuggy(a netip.Addr) bool {
	if !a.Is4() {
		return false
	}
	b := a.As4()
	return b[3] == 0 || b[3] == 255
}

// without returns the parts of r that are in none of the others.
func (r Range) without(others []Range) []Range {
	parts := []Range{r}
	for _, o := range others {
		var rest []Range
		for _, p := range parts {
			if !p.Overlaps(o) {
				rest = append(rest, p)
				continue
			}
			if p.First.Less(o.First) {
				rest = append(rest, Range{p.First, o.First.Prev()})
			}
			if o.Last.Less(p.Last) {
				rest = append(rest, Range{o.Last.Next(), p.Last})
			}
		}
		parts = rest
	}
	return parts
}
