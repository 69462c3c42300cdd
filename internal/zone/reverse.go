package zone

import (
	"net/netip"
	"slices"
	"strings"
)

// reverseZone is a range of addresses whose reverse names are answered here.
type reverseZone struct {
	prefix netip.Prefix
	// step is the number of address bits a label stands for: 8 or 4.
	step int
	// labels is how many labels, counted from the arpa end and without these
	// two, the smallest zone has that contains no foreign address: a range of
	// 12 bits is sixteen zones of two labels each.
	labels int
}

func newReverseZone(p netip.Prefix) reverseZone {
	p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()).Masked()
	step := 8
	if p.Addr().Is6() {
		step = 4
	}
	return reverseZone{prefix: p, step: step, labels: (p.Bits() + step - 1) / step}
}

// pointer is one PTR record of an address: where it leads to, in wire form below
// the first cluster domain, and whether the address is the virtual IP of that
// Service.
type pointer struct {
	name string
	vip  bool
}

// comparePointer puts pointers of virtual IPs first.
func comparePointer(a, b pointer) int {
	switch {
	case a.vip && !b.vip:
		return -1
	case b.vip && !a.vip:
		return 1
	}
	return strings.Compare(a.name, b.name)
}

// answered are the pointers of an address that are answered: a virtual IP leads
// only to its Service.
func answered(all []pointer) []pointer {
	n := 0
	for n < len(all) && all[n].vip {
		n++
	}
	if n > 0 {
		return all[:n]
	}
	return all
}

// pointerKey is the key of an address in the index. It begins with a byte no
// label can begin with.
func pointerKey(a netip.Addr) string {
	var b [17]byte
	if a.Is4() {
		v := a.As4()
		return string(append(b[:1], v[:]...))
	}
	v := a.As16()
	return string(append(b[:1], v[:]...))
}

// repoint replaces the PTR records that a Service has at an address. The caller
// holds mu.
func (z *Zone) repoint(a netip.Addr, old, wanted []ptr) {
	key := pointerKey(a)
	// Nearly always there is one.
	r := &struct {
		records
		more moreRecords
		one  [1]pointer
	}{}
	next := r.one[:0]
	if have := z.names.get(key); have != nil {
		for _, p := range have.more.ptr {
			if !slices.ContainsFunc(old, func(o ptr) bool { return o.name == p.name }) {
				next = append(next, p)
			}
		}
	}
	for _, p := range wanted {
		next = append(next, pointer{p.name, p.vip})
	}
	if len(next) == 0 {
		z.names.remove(key)
		return
	}
	slices.SortFunc(next, comparePointer)
	r.more.ptr, r.records.more = next, &r.more
	z.names.set(key, &r.records)
}

// reverseName is a parsed name below in-addr.arpa or ip6.arpa.
type reverseName struct {
	addr netip.Addr // bits beyond the known ones are zero
	bits int        // known from the right until a label that is no number
	// whole is whether all labels were understood and make a full address;
	// clean whether all labels were understood.
	whole, clean bool
}

// parseReverse reads n as a reverse name and reports whether it is one.
func parseReverse(n *Name) (r reverseName, ok bool) {
	if n.labels < 2 || string(n.label(n.labels-1)) != "arpa" {
		return r, false
	}
	switch string(n.label(n.labels - 2)) {
	case "in-addr":
		return parseReverse4(n), true
	case "ip6":
		return parseReverse6(n), true
	}
	return r, false
}

func parseReverse4(n *Name) (r reverseName) {
	var a [4]byte
	i := n.labels - 3
	for k := 0; k < 4 && i >= 0; k, i = k+1, i-1 {
		l, v := n.label(i), 0
		if len(l) > 3 || len(l) > 1 && l[0] == '0' {
			break
		}
		for _, c := range l {
			if c < '0' || c > '9' {
				v = 256
				break
			}
			v = v*10 + int(c-'0')
		}
		if v > 255 {
			break
		}
		a[k] = byte(v)
		r.bits += 8
	}
	r.addr, r.clean = netip.AddrFrom4(a), i < 0
	r.whole = r.clean && r.bits == 32
	return r
}

func parseReverse6(n *Name) (r reverseName) {
	var a [16]byte
	i := n.labels - 3
	for k := 0; k < 32 && i >= 0; k, i = k+1, i-1 {
		l := n.label(i)
		v := byte(255)
		if len(l) == 1 {
			switch c := l[0]; {
			case c >= '0' && c <= '9':
				v = c - '0'
			case c >= 'a' && c <= 'f':
				v = c - 'a' + 10
			}
		}
		if v > 15 {
			break
		}
		a[k/2] |= v << (4 * (1 - k%2))
		r.bits += 4
	}
	r.addr, r.clean = netip.AddrFrom16(a), i < 0
	r.whole = r.clean && r.bits == 128
	return r
}

// reverseText is the reverse name of an address.
func reverseText(a netip.Addr) string {
	const hex = "0123456789abcdef"
	b := a.AsSlice()
	slices.Reverse(b)
	var s strings.Builder
	if a.Is4() {
		return netip.AddrFrom4([4]byte(b)).String() + ".in-addr.arpa."
	}
	for _, c := range b {
		s.Write([]byte{hex[c&15], '.', hex[c>>4], '.'})
	}
	return s.String() + "ip6.arpa."
}

// answerReverse answers a question for a reverse name, or replies NotOurs.
func (z answering) answerReverse() {
	w, q := z.w, z.q
	r, ok := parseReverse(&q.Name)
	if !ok {
		w.reply.Kind = NotOurs
		return
	}
	w.reverse = true
	if r.whole {
		var key [17]byte
		k := append(key[:1], r.addr.AsSlice()...)
		if recs := z.names.find(k); recs != nil {
			if q.Type == typePTR || q.Type == typeANY {
				z.appendPTR(answered(recs.more.ptr))
				return
			}
			if at := z.apexOf(&q.Name, r); at >= 0 {
				w.negative(z.Zone, at)
				return
			}
			w.negative(z.Zone, questionAt)
			return
		}
	}
	at := z.apexOf(&q.Name, r)
	switch {
	case at < 0:
		w.reply.Kind = NotOurs
	case at == questionAt && (q.Type == typeSOA || q.Type == typeNS):
		w.apex(z.Zone, q.Type)
	case r.clean && !r.whole:
		// A name between the apex and the addresses. Whether there is one
		// below is not known without a search; saying yes is never wrong for
		// a resolver that takes NXDOMAIN for the whole subtree (RFC 8020).
		w.negative(z.Zone, at)
	default:
		w.reply.Rcode = RcodeNXDomain
		w.negative(z.Zone, at)
	}
}

// apexOf is where in the message the apex of the reverse zone of n begins, or
// -1 if no range has it.
func (z answering) apexOf(n *Name, r reverseName) int {
	for _, rz := range z.reverse {
		if rz.prefix.Addr().Is4() != r.addr.Is4() || r.bits < rz.labels*rz.step || !rz.prefix.Contains(r.addr) {
			continue
		}
		return questionAt + int(n.start[n.labels-2-rz.labels])
	}
	return -1
}
