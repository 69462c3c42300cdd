package zone

import (
	"encoding/binary"
	"net/netip"
	"strings"
)

// Question is one parsed question. It may be reused.
type Question struct {
	// Name as asked; its letters' case is only in the message.
	Name Name
	// Type of the records asked for.
	Type uint16
	// Rotate turns the order of addresses: with another value another address
	// comes first. Any value will do.
	Rotate uint32
	// Search asks to follow a pod's search path inside the answer.
	Search bool

	target Name // of the CNAME that is being followed
}

// Kind is what Answer did with a question.
type Kind uint8

const (
	// Answered means that the message is complete.
	Answered Kind = iota
	// NotOurs means that the name is outside of this zone; nothing was appended.
	NotOurs
	// Elsewhere means that the answer ends in a CNAME to Reply.Target, which is
	// outside of this zone; the caller appends the records of that name.
	Elsewhere
	// Searched is as Elsewhere, for the end of a search path. If there is no
	// such name, the answer is that to the same Question without Search.
	Searched
)

// Rcodes that Answer gives (RFC 1035, 4.1.1).
const (
	RcodeSuccess  = 0
	RcodeNXDomain = 3
)

// Reply is what belongs into the header of the answer.
type Reply struct {
	Kind                           Kind
	Rcode                          uint8
	Answers, Authority, Additional uint16
	// Truncated: records that belong to the answer had no room.
	Truncated bool
	// BySearch: the answer is that for a name further on in the search path.
	BySearch bool
	// Target is set when Kind is Elsewhere or Searched. It is valid until the Question is
	// used again.
	Target *Name
}

// maxChain is how many ExternalNames in a row are followed inside the zone.
const maxChain = 8

// Answer appends the records that answer q to msg, which must be a header and
// the question and nothing else, and keeps it at most limit bytes long.
func (z *Zone) Answer(msg []byte, q *Question, limit int) ([]byte, Reply) {
	w := writer{msg: msg, limit: limit, owner: pointerToQuestion}
	answering{z, &w, q}.answer()
	return w.msg, w.reply
}

// answering is one question on its way through the zone.
type answering struct {
	*Zone
	w *writer
	q *Question
}

func (z answering) answer() {
	d := z.domainOf(&z.q.Name)
	if d < 0 {
		z.answerReverse()
		return
	}
	if cname := z.answerName(&z.q.Name, d); cname != nil {
		z.chain(cname)
	}
}

// leave ends an answer at a name outside of the zone. A name whose last label is
// a number is an address that was taken for a name (behaviour 152): no such
// top-level domain exists (RFC 3696, section 2), so no upstream is asked.
func (z answering) leave(name *Name) {
	if allDigits(name.label(name.labels - 1)) {
		z.w.reply.Rcode = RcodeNXDomain
		return
	}
	z.w.reply.Kind, z.w.reply.Target = Elsewhere, name
}

func allDigits(b []byte) bool {
	for _, c := range b {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}

// domainOf is the most specific cluster domain n is in, or -1: one may lie below another.
func (z answering) domainOf(n *Name) int {
	found := -1
	for i := range z.domains {
		d := &z.domains[i]
		if n.HasSuffix(d.wire, d.labels) && (found < 0 || d.labels > z.domains[found].labels) {
			found = i
		}
	}
	return found
}

// answerName appends what is at the name, or returns the target of its CNAME,
// which the caller follows.
func (z answering) answerName(name *Name, d int) (cname []byte) {
	w, q := z.w, z.q
	dom := &z.domains[d]
	at := name.size - len(dom.wire) // where the domain begins in the name
	apex := w.place(at)
	if at == 0 {
		w.apexOrNegative(z.Zone, q.Type, apex)
		return nil
	}
	recs := z.names.find(name.wire[:at])
	if recs == nil {
		if a, ok := z.pod(name, name.labels-dom.labels); ok {
			w.pod(z.Zone, q.Type, a, apex)
			return nil
		}
		if name == &q.Name && z.search(d) {
			return nil
		}
		w.reply.Rcode = RcodeNXDomain
		w.negative(z.Zone, apex)
		return nil
	}
	before := w.reply.Answers
	switch q.Type {
	case typeA:
		w.addrs(recs.a, sizeA, q.Rotate)
	case typeAAAA:
		w.addrs(recs.aaaa, sizeAAAA, q.Rotate)
	case typeANY:
		w.hinfo(z.ttl)
	}
	if m := recs.more; m != nil {
		switch {
		case m.cname != nil && q.Type == typeCNAME:
			w.cname(z.ttl, m.cname)
		case m.cname != nil && q.Type != typeANY:
			return m.cname
		case m.txt != nil && q.Type == typeTXT:
			w.raw(typeTXT, m.ttl, m.txt)
		case m.srv != nil && q.Type == typeSRV:
			w.srv(&m.srv[d])
		}
	}
	if w.reply.Answers == before && !w.reply.Truncated {
		w.negative(z.Zone, apex)
	}
	return nil
}

// pod returns the address that a name such as 10-244-1-7.prod.pod stands for.
// labels is the number of labels before the cluster domain.
func (z answering) pod(name *Name, labels int) (netip.Addr, bool) {
	if labels != 3 || z.pods == PodsDisabled || string(name.label(2)) != "pod" {
		return netip.Addr{}, false
	}
	a, ok := parseDashed(name.label(0))
	if !ok {
		return a, false
	}
	ns := string(name.label(1))
	if z.pods == PodsVerified {
		return a, z.podIndex.has(ns, a)
	}
	from := int(name.start[1])
	return a, z.names.find(name.wire[from:from+len(ns)+1+len("\x03pod")]) != nil
}

// parseDashed reads an address with dashes in place of its dots or colons.
func parseDashed(label []byte) (netip.Addr, bool) {
	s := string(label)
	sep := ":"
	if strings.Count(s, "-") == 3 && !strings.Contains(s, "--") {
		sep = "."
	}
	a, err := netip.ParseAddr(strings.ReplaceAll(s, "-", sep))
	if err != nil || a.Zone() != "" || a.Is4In6() {
		return netip.Addr{}, false
	}
	return a, true
}

// writer appends records to a message.
type writer struct {
	msg   []byte
	limit int
	reply Reply
	// owner is the pointer to the name whose records are written: the
	// question, or the target of the last CNAME.
	owner uint16
	// reverse is whether the question is for a name of a reverse zone.
	reverse bool
}

// place is where in the message offset at of the present owner's name is.
func (w *writer) place(at int) int { return int(w.owner&maxPointer) + at }

func (w *writer) room() int { return w.limit - len(w.msg) }

// addrs appends address records, beginning with another one each time, and as
// many as fit: resolvers without TCP live on the part they get.
func (w *writer) addrs(set []byte, size int, rotate uint32) {
	n := len(set) / size
	if n == 0 {
		return
	}
	from := len(w.msg)
	first := 0
	if n > 1 {
		first = int(rotate%uint32(n)) * size
	}
	if fit := w.room() / size; fit < n {
		n = max(0, fit)
		w.reply.Truncated = true
	}
	head := set[first:min(len(set), first+n*size)]
	w.msg = append(w.msg, head...)
	w.msg = append(w.msg, set[:n*size-len(head)]...)
	w.reply.Answers += uint16(n)
	if w.owner != pointerToQuestion {
		for i := from; i < len(w.msg); i += size {
			binary.BigEndian.PutUint16(w.msg[i:], w.owner)
		}
	}
}

// cname appends a CNAME record and returns the offset of its target in the
// message, or -1 if there was no room. A pointer reaches it: behind the question
// are fewer than maxChain records of this kind.
func (w *writer) cname(ttl uint32, target []byte) int {
	if w.room() < 12+len(target) {
		w.reply.Truncated = true
		return -1
	}
	w.raw(typeCNAME, ttl, target)
	return len(w.msg) - len(target)
}

// raw appends a record with ready rdata.
func (w *writer) raw(typ uint16, ttl uint32, rdata []byte) {
	if w.room() < 12+len(rdata) {
		w.reply.Truncated = true
		return
	}
	w.msg = append(appendHead(w.msg, w.owner, typ, ttl, len(rdata)), rdata...)
	w.reply.Answers++
}

// srv appends SRV records and, as far as they fit, their addresses.
func (w *writer) srv(s *srvSet) {
	base := len(w.msg)
	w.reply.Truncated = w.reply.Truncated || s.cut
	if w.room() < len(s.body) {
		w.srvPart(s)
		return
	}
	w.msg = append(w.msg, s.body...)
	w.reply.Answers += s.answers
	w.reply.Additional += s.extras
	if w.owner != pointerToQuestion {
		for i := base; i < base+s.extraAt; i += 12 + int(binary.BigEndian.Uint16(w.msg[i+10:])) {
			binary.BigEndian.PutUint16(w.msg[i:], w.owner)
		}
	}
	for i := base + s.extraAt; i < len(w.msg); i += 12 + int(binary.BigEndian.Uint16(w.msg[i+10:])) {
		at := binary.BigEndian.Uint16(w.msg[i:])&maxPointer + uint16(base)
		binary.BigEndian.PutUint16(w.msg[i:], 0xC000|at)
	}
}

// srvPart appends the records of a set that fit. Addresses alone are no
// reason to call the answer truncated (RFC 2181, section 9).
func (w *writer) srvPart(s *srvSet) {
	base := len(w.msg)
	for i := 0; i < len(s.body); {
		n := 12 + int(binary.BigEndian.Uint16(s.body[i+10:]))
		if w.room() < n {
			w.reply.Truncated = w.reply.Truncated || i < s.extraAt
			return
		}
		w.msg = append(w.msg, s.body[i:i+n]...)
		rr := w.msg[len(w.msg)-n:]
		if i < s.extraAt {
			binary.BigEndian.PutUint16(rr, w.owner)
			w.reply.Answers++
		} else {
			at := binary.BigEndian.Uint16(rr)&maxPointer + uint16(base)
			binary.BigEndian.PutUint16(rr, 0xC000|at)
			w.reply.Additional++
		}
		i += n
	}
}

// pod appends the address of a pod name, or that it has none of this type.
func (w *writer) pod(z *Zone, typ uint16, a netip.Addr, apex int) {
	switch {
	case typ == typeA && a.Is4() || typ == typeAAAA && a.Is6():
		w.msg = appendAddr(w.msg, w.owner, a, z.ttl)
		w.reply.Answers++
	case typ == typeANY:
		w.hinfo(z.ttl)
	default:
		w.negative(z, apex)
	}
}

// hinfo answers ANY with the least there is (RFC 8482, section 4.2).
func (w *writer) hinfo(ttl uint32) { w.raw(typeHINFO, ttl, []byte("\x07RFC8482\x00")) }

// apexOrNegative answers questions for the cluster domain itself.
func (w *writer) apexOrNegative(z *Zone, typ uint16, apex int) {
	switch typ {
	case typeSOA, typeNS:
		w.apex(z, typ)
	case typeANY:
		w.hinfo(z.ttl)
	default:
		w.negative(z, apex)
	}
}

// apex answers SOA and NS at the present owner, which is an apex.
func (w *writer) apex(z *Zone, typ uint16) {
	at := w.place(0)
	if typ == typeSOA {
		if w.soa(z, at) {
			w.reply.Answers++
		}
		return
	}
	// The name server of every zone is ns.dns of the first cluster domain.
	host := append([]byte("\x02ns\x03dns"), z.domains[0].wire...)
	w.raw(typeNS, z.ttl, host)
	if w.reply.Truncated {
		return // the addresses point into the record that did not fit
	}
	hostAt := len(w.msg) - len(host)
	recs := z.names.find([]byte("\x02ns\x03dns"))
	for _, set := range []struct {
		rr   []byte
		size int
	}{{recs.a, sizeA}, {recs.aaaa, sizeAAAA}} {
		for b := set.rr; len(b) > 0 && w.room() >= set.size; b = b[set.size:] {
			w.msg = append(w.msg, b[:set.size]...)
			binary.BigEndian.PutUint16(w.msg[len(w.msg)-set.size:], uint16(0xC000|hostAt))
			w.reply.Additional++
		}
	}
}

// negative ends an answer that has no records with the SOA of the zone whose
// name is at offset apex (RFC 2308).
func (w *writer) negative(z *Zone, apex int) {
	if w.soa(z, apex) {
		w.reply.Authority++
	}
}

// Timers of the SOA record, for secondaries, of which there are none; the values
// match CoreDNS.
const (
	soaRefresh = 7200
	soaRetry   = 1800
	soaExpire  = 86400
)

// soa appends the SOA record of the zone whose name is at offset apex, and
// reports whether there was room. Its last field, the lifetime of negative answers, is
// the TTL of all records. A reverse zone has the name server and the mailbox
// of the first cluster domain.
func (w *writer) soa(z *Zone, apex int) bool {
	const fixed = 12 + (1 + 2 + 1 + 3) + (1 + 10 + 2) + 5*4
	var full []byte
	if w.reverse {
		full = z.domains[0].wire
	}
	size := fixed + max(2, len(full))
	if w.room() < size {
		return false
	}
	b := appendHead(w.msg, uint16(0xC000|apex), typeSOA, z.ttl, size-12)
	b = append(b, "\x02ns\x03dns"...)
	ptr := uint16(0xC000 | apex)
	if full != nil {
		ptr = uint16(0xC000 | len(b))
		b = append(b, full...)
	} else {
		b = binary.BigEndian.AppendUint16(b, ptr)
	}
	b = append(b, "\x0ahostmaster"...)
	b = binary.BigEndian.AppendUint16(b, ptr)
	b = binary.BigEndian.AppendUint32(b, z.serial.Load())
	b = binary.BigEndian.AppendUint32(b, soaRefresh)
	b = binary.BigEndian.AppendUint32(b, soaRetry)
	b = binary.BigEndian.AppendUint32(b, soaExpire)
	w.msg = binary.BigEndian.AppendUint32(b, z.ttl)
	return true
}

// appendPTR appends PTR records to the targets, as many as fit.
func (z answering) appendPTR(targets []pointer) {
	w := z.w
	dom := z.domains[0].wire
	for _, t := range targets {
		n := len(t.name) + len(dom)
		if w.room() < 12+n {
			w.reply.Truncated = true
			return
		}
		w.msg = appendHead(w.msg, w.owner, typePTR, z.ttl, n)
		w.msg = append(append(w.msg, t.name...), dom...)
		w.reply.Answers++
	}
}

// eachAnswer calls f for every SRV record of the set.
func (s *srvSet) eachAnswer(f func(weight, port uint16, target string)) {
	for b := s.body[:s.extraAt]; len(b) > 0; {
		n := 12 + int(binary.BigEndian.Uint16(b[10:]))
		f(binary.BigEndian.Uint16(b[14:]), binary.BigEndian.Uint16(b[16:]), wireText(b[18:n]))
		b = b[n:]
	}
}
