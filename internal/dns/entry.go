package dns

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"sync/atomic"

	mdns "github.com/miekg/dns"
)

// How long answers are cached at most, in seconds; the limits of CoreDNS.
const (
	maxTTL       = 3600
	maxDenialTTL = 1800
	// servfailTTL is for upstreams that answer SERVFAIL (RFC 9520, 3.2: at
	// least one second, at most five minutes).
	servfailTTL = 5
	// staleTTL is the TTL of an expired answer (RFC 8767, section 4).
	staleTTL = 30
)

// entry is an upstream's answer, in the form in which it is sent on.
// Everything but the counters is immutable.
type entry struct {
	rcode      uint8
	flags      uint16 // AD
	an, ns, ar uint16
	// body is what follows the question, without OPT. Its compression
	// pointers fit any message with a question for the same name.
	body []byte
	rrs  []rr
	// ttl is how long the answer is valid, in seconds; 0 is not at all.
	ttl uint32
	// negative is whether there is no such name, or no such record.
	negative bool

	stored int64        // when it was added, in seconds of the cache's clock
	hits   atomic.Int32 // since then
	// retry is the second before which upstreams are not asked to replace a
	// stale answer.
	retry atomic.Int64
}

// rr is where a record and its TTL are in body.
type rr struct{ start, ttlAt uint16 }

var errBadReply = errors.New("malformed answer")

// newEntry reads an upstream's answer to the question for name, which is in
// lower case.
func newEntry(msg, name []byte) (*entry, error) {
	qend := headerSize + len(name) + 4
	opt, last, err := scanReply(msg, qend)
	if err != nil {
		return nil, err
	}
	if opt.end != 0 && opt.end != last {
		// Cutting the OPT record out of the middle would break the pointers
		// behind it.
		if msg, err = repackWithoutOPT(msg); err != nil {
			return nil, err
		}
		if opt, last, err = scanReply(msg, qend); err != nil || opt.end != 0 {
			return nil, errBadReply
		}
	}
	flags := binary.BigEndian.Uint16(msg[2:])
	e := &entry{
		rcode: uint8(flags & rcodeMask),
		flags: flags & flagAD,
		an:    binary.BigEndian.Uint16(msg[6:]),
		ns:    binary.BigEndian.Uint16(msg[8:]),
		ar:    binary.BigEndian.Uint16(msg[10:]),
	}
	if opt.end != 0 {
		last = opt.start
		e.ar--
	}
	msg = slices.Clone(msg[:last])
	e.index(msg, name)
	e.body = slices.Clip(msg[qend:])
	return e, nil
}

type optAt struct{ start, end int }

// scanReply walks all records of a message and finds the OPT record and the
// end.
func scanReply(msg []byte, qend int) (opt optAt, end int, err error) {
	n := int(binary.BigEndian.Uint16(msg[6:])) + int(binary.BigEndian.Uint16(msg[8:])) + int(binary.BigEndian.Uint16(msg[10:]))
	end = qend
	for range n {
		r, ok := parseRecord(msg, end)
		if !ok {
			return opt, 0, errBadReply
		}
		if r.typ == typeOPT {
			if opt.end != 0 {
				return opt, 0, errBadReply
			}
			opt = optAt{end, r.end}
		}
		end = r.end
	}
	return opt, end, nil
}

func repackWithoutOPT(msg []byte) ([]byte, error) {
	var m mdns.Msg
	if err := m.Unpack(msg); err != nil {
		return nil, errBadReply
	}
	kept := m.Extra[:0]
	for _, r := range m.Extra {
		if r.Header().Rrtype != typeOPT {
			kept = append(kept, r)
		}
	}
	m.Extra, m.Compress = kept, true
	return m.Pack()
}

// index finds the records and how long the answer is valid.
func (e *entry) index(msg, name []byte) {
	qend := headerSize + len(name) + 4
	e.rrs = make([]rr, 0, int(e.an)+int(e.ns)+int(e.ar))
	asked := msg[headerSize : qend-4]
	least, soa := uint32(maxTTL), uint32(0)
	found := false
	for at, i := qend, 0; at < len(msg); i++ {
		r, ok := parseRecord(msg, at)
		if !ok {
			break // unreachable: scanReply has parsed it
		}
		e.rrs = append(e.rrs, rr{uint16(at - qend), uint16(r.ttlAt - qend)})
		// Undo the random case of the question.
		if bytes.HasPrefix(msg[at:], asked) {
			copy(msg[at:], name)
		}
		switch {
		case i < int(e.an):
			least = min(least, r.ttl)
		case i < int(e.an)+int(e.ns) && r.typ == typeSOA && r.end-r.data >= 20:
			soa, found = min(r.ttl, binary.BigEndian.Uint32(msg[r.end-4:])), true
		}
		at = r.end
	}
	switch {
	case e.rcode == rcodeServFail:
		e.ttl, e.negative = servfailTTL, true
	case e.rcode != rcodeSuccess && e.rcode != rcodeNXDomain:
		e.ttl = 0
	case e.rcode == rcodeNXDomain || found:
		// RFC 2308, section 5: a denial without SOA is not cached.
		e.negative = true
		if found {
			e.ttl = min(soa, maxDenialTTL)
		}
		if e.an > 0 {
			e.ttl = min(e.ttl, least) // the CNAMEs before the denial
		}
	case e.an > 0:
		e.ttl = least
	}
}

// size is roughly what the entry takes in memory.
func (e *entry) size() int { return 160 + len(e.body) + 4*len(e.rrs) }

// appendTo appends the records to out, a header and the question, with TTLs
// lowered by age seconds. It leaves out what goes beyond limit.
func (e *entry) appendTo(out []byte, age uint32, stale bool, limit int) (_ []byte, an, ns, ar uint16, truncated bool) {
	base := len(out)
	n := len(e.rrs)
	an, ns, ar = e.an, e.ns, e.ar
	if base+len(e.body) <= limit {
		out = append(out, e.body...)
	} else {
		for n > 0 && base+int(e.rrs[n-1].start) > limit {
			n--
		}
		n = max(0, n-1) // the last one that starts within does not end there
		out = append(out, e.body[:e.rrs[n].start]...)
		an = min(an, uint16(n))
		ns = min(ns, uint16(n)-an)
		ar = uint16(n) - an - ns
		truncated = an < e.an || ns < e.ns
	}
	for _, r := range e.rrs[:n] {
		at := out[base+int(r.ttlAt):]
		ttl := binary.BigEndian.Uint32(at)
		switch {
		case stale:
			ttl = staleTTL
		case ttl > age:
			ttl -= age
		default:
			ttl = 0
		}
		binary.BigEndian.PutUint32(at, ttl)
	}
	return out, an, ns, ar, truncated
}

// message returns the entry as a message of the DNS library.
func (e *entry) message(name []byte, typ uint16, age uint32) *mdns.Msg {
	out := make([]byte, headerSize, headerSize+len(name)+4+len(e.body))
	out = append(out, name...)
	out = binary.BigEndian.AppendUint16(out, typ)
	out = binary.BigEndian.AppendUint16(out, classIN)
	out, an, ns, ar, _ := e.appendTo(out, age, false, maxMessage)
	binary.BigEndian.PutUint16(out[2:], flagQR|e.flags|uint16(e.rcode))
	binary.BigEndian.PutUint16(out[4:], 1)
	binary.BigEndian.PutUint16(out[6:], an)
	binary.BigEndian.PutUint16(out[8:], ns)
	binary.BigEndian.PutUint16(out[10:], ar)
	m := new(mdns.Msg)
	if m.Unpack(out) != nil {
		return nil
	}
	return m
}
