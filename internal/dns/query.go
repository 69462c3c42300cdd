package dns

import (
	"encoding/binary"

	"github.com/fairlead/fairlead/internal/zone"
)

// Sizes of RFC 1035 and RFC 6891.
const (
	headerSize = 12
	optSize    = 11 // an OPT record without options
	minUDP     = 512
	maxMessage = 65535
	// maxRequest is the longest request that is read: a name, and options
	// several times as long as any client sends.
	maxRequest = 2048
)

// Bits of the second header word.
const (
	flagQR = 1 << 15
	flagAA = 1 << 10
	flagTC = 1 << 9
	flagRD = 1 << 8
	flagRA = 1 << 7
	flagAD = 1 << 5
	flagCD = 1 << 4

	opcodeShift = 11
	opcodeMask  = 0xF << opcodeShift
	rcodeMask   = 0xF
)

// Rcodes (RFC 1035, 6891).
const (
	rcodeSuccess  = zone.RcodeSuccess
	rcodeFormErr  = 1
	rcodeServFail = 2
	rcodeNXDomain = zone.RcodeNXDomain
	rcodeNotImp   = 4
	rcodeRefused  = 5
	rcodeBadVers  = 16
)

// Types that are handled specially.
const (
	typeA    = 1
	typeNS   = 2
	typeSOA  = 6
	typePTR  = 12
	typeTXT  = 16
	typeAAAA = 28
	typeOPT  = 41
	typeIXFR = 251
	typeAXFR = 252

	classIN = 1
)

// Key flags: what of a query, beside name and type, changes an upstream's
// answer.
const (
	keyDO = 1 << iota
	keyCD
	keyAD
)

// query is a parsed request. It is reused from packet to packet.
type query struct {
	zone.Question
	// flags is the second word of the header.
	flags uint16
	// end is the offset behind the question.
	end int
	// edns is whether there is an OPT record; do and size are from it.
	edns, do bool
	size     int
}

// fate is what the server does with a request.
type fate uint8

const (
	// drop: no answer at all.
	drop fate = iota
	// reply: the answer is complete.
	reply
	// forward: an upstream has to be asked.
	forward
	// follow: the answer so far ends in a CNAME to a name for which an upstream
	// has to be asked.
	follow
)

// parse reads a request. It returns the rcode of the error to send, or
// rcodeSuccess; ok is false when no answer may be sent.
func (q *query) parse(req []byte) (rcode int, ok bool) {
	q.edns, q.do, q.size, q.end, q.Type = false, false, minUDP, headerSize, 0
	if len(req) < headerSize {
		return 0, false
	}
	q.flags = binary.BigEndian.Uint16(req[2:])
	if q.flags&flagQR != 0 {
		// Two servers that answer answers never stop.
		return 0, false
	}
	if q.flags&opcodeMask != 0 {
		return rcodeNotImp, true
	}
	qd, an := binary.BigEndian.Uint16(req[4:]), binary.BigEndian.Uint16(req[6:])
	ns, ar := binary.BigEndian.Uint16(req[8:]), binary.BigEndian.Uint16(req[10:])
	// IXFR carries one record, DNS cookies and TSIG at most two.
	if qd != 1 || an > 1 || ns > 1 || ar > 3 {
		return rcodeFormErr, true
	}
	at, ok := q.Name.ParseWire(req, headerSize)
	if !ok || at+4 > len(req) {
		return rcodeFormErr, true
	}
	q.Type = binary.BigEndian.Uint16(req[at:])
	class := binary.BigEndian.Uint16(req[at+2:])
	q.end = at + 4
	if rcode := q.parseRecords(req, int(an)+int(ns), int(ar)); rcode != rcodeSuccess {
		return rcode, true
	}
	if class != classIN || q.Type == typeAXFR || q.Type == typeIXFR {
		return rcodeRefused, true
	}
	return rcodeSuccess, true
}

// parseRecords looks for the OPT record behind the question.
func (q *query) parseRecords(req []byte, skip, additional int) int {
	at, version := q.end, byte(0)
	for i := range skip + additional {
		r, ok := parseRecord(req, at)
		if !ok {
			return rcodeFormErr
		}
		if r.typ == typeOPT {
			// RFC 6891, 6.1.1: one, in the additional section, owned by the
			// root.
			if i < skip || q.edns || req[at] != 0 {
				return rcodeFormErr
			}
			q.edns = true
			q.size = int(r.class)
			version = byte(r.ttl >> 16)
			q.do = r.ttl&(1<<15) != 0
		}
		at = r.end
	}
	if version != 0 {
		return rcodeBadVers
	}
	return rcodeSuccess
}

// record is where the parts of a resource record are.
type record struct {
	typ, class uint16
	ttl        uint32
	ttlAt      int // offset of the TTL
	data, end  int // offsets of the rdata
}

// parseRecord reads the record at offset at.
func parseRecord(msg []byte, at int) (r record, ok bool) {
	at, ok = skipName(msg, at)
	if !ok || at+10 > len(msg) {
		return r, false
	}
	r.typ = binary.BigEndian.Uint16(msg[at:])
	r.class = binary.BigEndian.Uint16(msg[at+2:])
	r.ttlAt = at + 4
	r.ttl = binary.BigEndian.Uint32(msg[at+4:])
	r.data = at + 10
	r.end = r.data + int(binary.BigEndian.Uint16(msg[at+8:]))
	return r, r.end <= len(msg)
}

// skipName returns the offset behind the name at offset at. It does not follow
// a compression pointer, but checks that it points backwards.
func skipName(msg []byte, at int) (int, bool) {
	start := at
	for at < len(msg) {
		c := int(msg[at])
		switch {
		case c == 0:
			return at + 1, at-start < 255
		case c < 0x40:
			at += 1 + c
		case c >= 0xC0:
			if at+2 > len(msg) || int(binary.BigEndian.Uint16(msg[at:])&0x3FFF) >= start {
				return 0, false
			}
			return at + 2, at-start < 255
		default:
			return 0, false
		}
	}
	return 0, false
}

// keyFlags returns the bits of the query that are part of the cache key.
func (q *query) keyFlags() byte {
	var f byte
	if q.do {
		f |= keyDO
	}
	if q.flags&flagCD != 0 {
		f |= keyCD
	}
	if q.do || q.flags&flagAD != 0 {
		f |= keyAD
	}
	return f
}

// begin writes the header and question of the answer to out. finish fills in the
// flags and counts.
func (q *query) begin(out, req []byte) []byte {
	return append(out[:0], req[:q.end]...)
}

// finish completes the answer: header, and an OPT record if the query had one.
func (q *query) finish(out []byte, flags uint16, rcode int, an, ns, ar uint16) []byte {
	if q.edns {
		var do uint16
		if q.do {
			do = 1 << 15
		}
		out = append(out, 0, 0, typeOPT)
		out = binary.BigEndian.AppendUint16(out, udpSize)
		out = append(out, byte(rcode>>4), 0)
		out = binary.BigEndian.AppendUint16(out, do)
		out = append(out, 0, 0)
		ar++
	}
	flags |= flagQR | q.flags&(opcodeMask|flagRD|flagCD) | uint16(rcode)&rcodeMask
	binary.BigEndian.PutUint16(out[2:], flags)
	binary.BigEndian.PutUint16(out[4:], 1)
	binary.BigEndian.PutUint16(out[6:], an)
	binary.BigEndian.PutUint16(out[8:], ns)
	binary.BigEndian.PutUint16(out[10:], ar)
	return out
}

// errorReply is an answer with nothing but an rcode.
func (q *query) errorReply(out, req []byte, flags uint16, rcode int) []byte {
	out = q.begin(out, req)
	out = q.finish(out, flags, rcode, 0, 0, 0)
	if q.end == headerSize {
		binary.BigEndian.PutUint16(out[4:], 0) // the question could not be parsed
	}
	return out
}

// limit returns how long an answer may be, without the OPT record.
func (q *query) limit(udp bool) int {
	n := maxMessage
	if udp {
		n = min(max(q.size, minUDP), udpSize)
	}
	if q.edns {
		n -= optSize
	}
	return n
}
