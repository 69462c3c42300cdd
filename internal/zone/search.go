package zone

import (
	"bytes"
	"net/netip"
	"slices"
)

// A pod's resolv.conf says "search NS.svc.DOMAIN svc.DOMAIN DOMAIN" and
// "ndots:5", so a look-up of www.example.com asks for
// www.example.com.NS.svc.DOMAIN first, for two more such names next, each for A
// and AAAA, and only then for the name that was meant. When Question.Search is
// set, the first of these questions is answered with what the last one would
// bring: a CNAME to the name that the client meant, and its records.
//
// That a question comes from a search path is known from the question itself:
// the namespace exists, and nothing in it has the name. A single label before
// the namespace is left alone: it is a Service that does not exist (yet), and
// no upstream is to know of it.

const minSearched = 2

// search follows the search path of a pod from a name that does not exist. It
// returns false, and writes nothing, when the name is not one that a search path
// makes.
func (z answering) search(d int) bool {
	w, q := z.w, z.q
	if !q.Search || q.Type != typeA && q.Type != typeAAAA {
		return false
	}
	dom := &z.domains[d]
	n := &q.Name
	ns := n.labels - dom.labels - 2 // the label that is the namespace
	if ns < minSearched || string(n.label(ns+1)) != "svc" {
		return false
	}
	if z.names.find(n.wire[n.start[ns]:n.size-len(dom.wire)]) == nil {
		return false
	}
	meant := n.wire[:n.start[ns]]
	var buf [maxName]byte
	for _, ending := range []string{"\x03svc", ""} {
		rel := append(append(buf[:0], meant...), ending...)
		if r := z.names.find(rel); r == nil || r.a == nil && r.aaaa == nil && (r.more == nil || r.more.cname == nil) {
			continue
		}
		w.reply.BySearch = true
		z.chain(append(rel, dom.wire...))
		return true
	}
	target := append(append(buf[:0], meant...), 0)
	if w.cname(z.ttl, target) < 0 {
		return false
	}
	q.target.ParseWire(target, 0)
	if d := z.domainOf(&q.target); d >= 0 || allDigits(q.target.label(q.target.labels-1)) {
		// The whole name was in the cluster, and does not exist there.
		w.msg = w.msg[:len(w.msg)-12-len(target)]
		w.reply = Reply{}
		return false
	}
	w.reply.Kind, w.reply.Target, w.reply.BySearch = Searched, &q.target, true
	return true
}

// chain writes a CNAME to a name of the zone and answers for that name. A chain
// that comes back to one of its names ends there.
func (z answering) chain(target []byte) {
	w, q := z.w, z.q
	var owners [maxChain][]byte // of the CNAMEs written
	owner := q.Name.Wire()
	for i := range maxChain {
		at := w.cname(z.ttl, target)
		if at < 0 {
			return
		}
		owners[i] = owner
		if slices.ContainsFunc(owners[:i+1], func(o []byte) bool { return bytes.Equal(o, target) }) {
			return
		}
		owner = target
		q.target.ParseWire(target, 0)
		d := z.domainOf(&q.target)
		if d < 0 {
			z.leave(&q.target)
			return
		}
		w.owner = uint16(0xC000 | at)
		if target = z.answerName(&q.target, d); target == nil {
			return
		}
	}
}

// ReverseAddr returns the address that a reverse name stands for; ok is false for
// other names and for names of less than a whole address.
func ReverseAddr(n *Name) (addr netip.Addr, ok bool) {
	r, ok := parseReverse(n)
	return r.addr, ok && r.whole
}
