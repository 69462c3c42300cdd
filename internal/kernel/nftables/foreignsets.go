package nftables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
)

// Bounds of what is read of other programs' sets: elements in all, for how many elements of a set one rule stands, and how many
// rules all rules that look up sets stand for.
const (
	maxElements = 20_000
	maxSeveral  = 1_000
	maxDecoded  = 100_000
)

// element is one of a set, or a range of values of an interval set.
type element struct {
	first, last []byte // last is nil for one value
	hasVerdict  bool
	verdict     Verdict
	target      string
	leaves      bool
}

type setName struct {
	table Table
	name  string
}

// setReader reads sets, each once.
type setReader struct {
	conn    *Conn
	known   map[setName][]element
	left    int   // of maxElements
	decoded int   // left of maxDecoded
	err     error // the first
}

// elements returns the elements of a set, nil if it is empty or has too many.
func (s *setReader) elements(t Table, name string) []element {
	key := setName{t, name}
	if out, ok := s.known[key]; ok || s.err != nil {
		return out
	}
	type bound struct {
		element
		end bool
	}
	var all []bound
	err := s.conn.dump(unix.NFT_MSG_GETSETELEM, t, func() { all = nil }, func(e *netlink.Encoder) {
		e.String(unix.NFTA_SET_ELEM_LIST_TABLE, t.Name)
		e.String(unix.NFTA_SET_ELEM_LIST_SET, name)
	}, func(body []byte) {
		netlink.Attrs(netlink.Attr(body, unix.NFTA_SET_ELEM_LIST_ELEMENTS), func(_ uint16, v []byte) {
			if len(all) > 2*maxSeveral {
				return
			}
			b := bound{element: element{first: bytes.Clone(netlink.Attr(netlink.Attr(v, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE))}}
			if f := netlink.Attr(v, unix.NFTA_SET_ELEM_FLAGS); f != nil {
				b.end = uint32At(f)&unix.NFT_SET_ELEM_INTERVAL_END != 0
			}
			if to := netlink.Attr(netlink.Attr(v, unix.NFTA_SET_ELEM_DATA), unix.NFTA_DATA_VERDICT); to != nil {
				b.hasVerdict = true
				b.verdict, b.target, b.leaves = verdictOf(to)
			}
			all = append(all, b)
		})
	})
	if err != nil {
		s.err = err
		return nil
	}
	// The end of a range comes before the beginning of the next one.
	slices.SortFunc(all, func(a, b bound) int {
		if c := bytes.Compare(a.first, b.first); c != 0 || a.end == b.end {
			return c
		}
		if a.end {
			return -1
		}
		return 1
	})
	ranges := slices.ContainsFunc(all, func(b bound) bool { return b.end })
	var out []element
	for i, b := range all {
		if b.end {
			continue
		}
		if ranges {
			b.last = bytes.Repeat([]byte{0xff}, len(b.first))
			if i+1 < len(all) {
				b.last = before(all[i+1].first)
			}
		}
		out = append(out, b.element)
	}
	if s.left -= len(out); len(out) > maxSeveral || s.left < 0 {
		out = nil
	}
	s.known[key] = out
	return out
}

// before returns the value before another one, which is not 0.
func before(value []byte) []byte {
	out := bytes.Clone(value)
	for i := len(out) - 1; i >= 0; i-- {
		out[i]--
		if out[i] != 0xff {
			break
		}
	}
	return out
}

// lookup adds the condition that a field has one of the values of a set. verdicts is set if the set also has what becomes of the
// packet.
func (d *decoder) lookup(l loaded, set string, inverted, verdicts bool) {
	all := d.sets.elements(d.rule.Chain.Table, set)
	address := l.field == "saddr" || l.field == "daddr"
	switch {
	case inverted || d.several != nil || len(all) == 0:
		d.opaqueOf(l)
		if verdicts {
			d.rule.Verdict = Other
		}
	case address || verdicts:
		d.several, d.from = all, l
	default:
		joined, ok := join(l.field, all)
		if !ok {
			d.opaqueOf(l)
			return
		}
		d.add(joined)
	}
}

// join returns the condition that a field has one of several values.
func join(field string, all []element) (Condition, bool) {
	out := Condition{Field: Field(field), Text: "several values of " + field}
	for _, e := range all {
		c, ok := e.condition(field)
		if !ok || Field(field) == Protocol {
			return Condition{}, false
		}
		out.Ports, out.Devices, out.Mask = append(out.Ports, c.Ports...), append(out.Devices, c.Devices...), out.Mask|c.Mask
		if len(all) == 1 {
			out.Text = c.Text
		}
	}
	return out, true
}

// condition returns the one that a field has the value of e, or is in its range.
func (e *element) condition(field string) (Condition, bool) {
	first := e.first
	if f := Field(field); f == InDevice || f == OutDevice {
		if e.last == nil || bytes.Equal(e.first, e.last) {
			return condition(field, first)
		}
		return condition(field, bytes.TrimRight(first, "\x00")) // all names that begin so
	}
	c, ok := condition(field, first)
	if ok && e.last != nil && len(c.Ports) == 1 {
		c.Ports[0][1] = binary.BigEndian.Uint16(e.last)
		if c.Ports[0][0] != c.Ports[0][1] {
			c.Text = fmt.Sprintf("%s-%d", c.Text, c.Ports[0][1])
		}
		return c, true
	}
	return c, ok && (e.last == nil || bytes.Equal(e.first, e.last))
}

// all returns the rule, once for each of several elements, or once with a condition that is not known if there is no room for them.
func (d *decoder) all() (out []Decoded) {
	for field := range d.low {
		d.opaqueOf(loaded{field: field})
	}
	if d.several == nil {
		return []Decoded{d.rule}
	}
	plain := d.rule
	if d.sets.decoded > 0 {
		out = d.each()
		d.sets.decoded -= len(out)
	}
	if len(out) > 0 && d.sets.decoded >= 0 {
		return out
	}
	d.rule = plain
	if d.opaqueOf(d.from); slices.ContainsFunc(d.several, func(e element) bool { return e.hasVerdict }) {
		d.rule.Verdict = Other
	}
	return []Decoded{d.rule}
}

// each returns the rule for each of several elements.
func (d *decoder) each() (out []Decoded) {
	plain := d.rule
	for i := range d.several {
		e := &d.several[i]
		d.rule = plain
		d.rule.Conditions = slices.Clip(plain.Conditions)
		if e.hasVerdict {
			d.rule.Verdict, d.rule.Target, d.rule.Goto = e.verdict, e.target, e.leaves
		}
		if d.from.field == "saddr" || d.from.field == "daddr" {
			prefixes := e.prefixes(d.from)
			for _, p := range prefixes {
				d.address(d.from, p.Addr().AsSlice(), p.Bits())
				out = append(out, d.rule)
			}
			if len(prefixes) > 0 {
				continue
			}
		}
		if c, ok := e.condition(d.from.field); ok {
			d.add(c)
		} else {
			d.opaqueOf(d.from)
		}
		out = append(out, d.rule)
	}
	return out
}

// prefixes returns the fewest that have the addresses of e, at most two for each bit of an address; nil if e has none.
func (e *element) prefixes(l loaded) (out []netip.Prefix) {
	first, ok := netip.AddrFromSlice(e.first)
	last := first
	if e.last != nil {
		last, _ = netip.AddrFromSlice(e.last)
	}
	if !ok || first.Is6() != l.six || l.bits != first.BitLen() || last.Compare(first) < 0 {
		return nil
	}
	for {
		p := netip.PrefixFrom(first, first.BitLen())
		for p.Bits() > 0 {
			wider := netip.PrefixFrom(first, p.Bits()-1)
			if wider.Masked().Addr() != first || end(wider).Compare(last) > 0 {
				break
			}
			p = wider
		}
		out = append(out, p)
		if first = end(p).Next(); !first.IsValid() || first.Compare(last) > 0 {
			return out
		}
	}
}

// end returns the last address of a prefix.
func end(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
