package zone

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
)

// Types and classes this package writes or looks at (RFC 1035, 2782, 3596,
// 8482).
const (
	typeA     = 1
	typeNS    = 2
	typeCNAME = 5
	typeSOA   = 6
	typePTR   = 12
	typeHINFO = 13
	typeTXT   = 16
	typeAAAA  = 28
	typeSRV   = 33
	typeANY   = 255

	classIN = 1
)

const (
	// questionAt is where the question's name stands in every message.
	questionAt = 12
	// pointerToQuestion is the compression pointer to that place.
	pointerToQuestion = 0xC000 | questionAt
	// maxPointer is the last offset a compression pointer can name.
	maxPointer = 0x3FFF

	sizeA    = 16 // pointer, type, class, TTL, length, address
	sizeAAAA = 28

	// maxMessage is the size of the largest message, over TCP.
	maxMessage = 65535
)

// records is what a name has. A name without any (an empty non-terminal) has
// a records with nothing in it. Immutable once it is in the index.
type records struct {
	// a and aaaa are whole resource records one after the other, each owned by
	// a pointer to the question.
	a, aaaa []byte
	more    *moreRecords
}

// moreRecords holds what few names have.
type moreRecords struct {
	cname []byte   // target, wire form
	txt   []byte   // rdata
	ttl   uint32   // of txt
	srv   []srvSet // one for each cluster domain
	ptr   []pointer
}

// srvSet is the SRV records of a name and the addresses of their targets. The
// targets are written in full (RFC 2782 forbids compressing them) and the
// address records point at them, so that all but these pointers is the same
// wherever the set is put into a message.
type srvSet struct {
	answers, extras uint16
	// extraAt is where the address records begin in body.
	extraAt int
	// body has owners of SRV records pointing to the question and owners of
	// address records pointing to offsets in body.
	body []byte
	// cut: more records belong to the set than any message can hold.
	cut bool
}

func (r *records) equal(o *records) bool {
	if !bytes.Equal(r.a, o.a) || !bytes.Equal(r.aaaa, o.aaaa) || (r.more == nil) != (o.more == nil) {
		return false
	}
	if r.more == nil || r.more == o.more {
		return true
	}
	x, y := r.more, o.more
	return bytes.Equal(x.cname, y.cname) && bytes.Equal(x.txt, y.txt) && x.ttl == y.ttl && slices.Equal(x.ptr, y.ptr) &&
		slices.EqualFunc(x.srv, y.srv, func(a, b srvSet) bool {
			return a.answers == b.answers && a.extras == b.extras && bytes.Equal(a.body, b.body)
		})
}

// newRecords makes the address records of a name; the addresses are sorted
// and distinct.
func newRecords(addrs []netip.Addr, ttl uint32) *records {
	if len(addrs) == 1 && addrs[0].Is4() { // most names by far
		one := &struct {
			records
			rr [sizeA]byte
		}{}
		one.a = appendAddr(one.rr[:0], pointerToQuestion, addrs[0], ttl)
		return &one.records
	}
	n4 := 0
	for _, a := range addrs {
		if a.Is4() {
			n4++
		}
	}
	r := &records{}
	if n4 > 0 {
		r.a = make([]byte, 0, n4*sizeA)
	}
	if n6 := len(addrs) - n4; n6 > 0 {
		r.aaaa = make([]byte, 0, n6*sizeAAAA)
	}
	for _, a := range addrs {
		if a.Is4() {
			r.a = appendAddr(r.a, pointerToQuestion, a, ttl)
		} else {
			r.aaaa = appendAddr(r.aaaa, pointerToQuestion, a, ttl)
		}
	}
	return r
}

// appendHead appends a record up to its rdata.
func appendHead(b []byte, owner, typ uint16, ttl uint32, rdlen int) []byte {
	b = binary.BigEndian.AppendUint16(b, owner)
	b = binary.BigEndian.AppendUint16(b, typ)
	b = binary.BigEndian.AppendUint16(b, classIN)
	b = binary.BigEndian.AppendUint32(b, ttl)
	return binary.BigEndian.AppendUint16(b, uint16(rdlen))
}

func appendAddr(b []byte, owner uint16, a netip.Addr, ttl uint32) []byte {
	if a.Is4() {
		v := a.As4()
		return append(appendHead(b, owner, typeA, ttl, 4), v[:]...)
	}
	v := a.As16()
	return append(appendHead(b, owner, typeAAAA, ttl, 16), v[:]...)
}

// srvTarget is one host and port of an SRV set.
type srvTarget struct {
	host  string // wire form below the cluster domain
	port  uint16
	addrs []netip.Addr
}

// newSRV packs the SRV records of the targets, which are distinct, for one
// cluster domain. weight is the same for all.
func newSRV(targets []srvTarget, weight uint16, domain []byte, ttl uint32) srvSet {
	var s srvSet
	size := 0
	for _, t := range targets {
		size += 12 + 6 + len(t.host) + len(domain) + 16*len(t.addrs)
	}
	s.body = make([]byte, 0, min(size, maxMessage))
	hosts := make(map[string]int, len(targets)) // where a host's name is
	for _, t := range targets {
		rdlen := 6 + len(t.host) + len(domain)
		if len(s.body)+12+rdlen > maxMessage-512 {
			s.cut = true
			break
		}
		s.body = appendHead(s.body, pointerToQuestion, typeSRV, ttl, rdlen)
		s.body = binary.BigEndian.AppendUint16(s.body, 0)
		s.body = binary.BigEndian.AppendUint16(s.body, weight)
		s.body = binary.BigEndian.AppendUint16(s.body, t.port)
		if _, ok := hosts[t.host]; !ok {
			hosts[t.host] = len(s.body)
		}
		s.body = append(append(s.body, t.host...), domain...)
		s.answers++
	}
	s.extraAt = len(s.body)
	// A set that will follow a long question and a few CNAMEs must still be
	// able to point at its names.
	const highest = maxPointer - 4096
	for _, t := range targets {
		at, ok := hosts[t.host]
		if !ok || at > highest {
			continue
		}
		delete(hosts, t.host)
		for _, a := range t.addrs {
			if len(s.body)+sizeAAAA > maxMessage-512 {
				return s
			}
			s.body = appendAddr(s.body, uint16(at), a, ttl)
			s.extras++
		}
	}
	return s
}
