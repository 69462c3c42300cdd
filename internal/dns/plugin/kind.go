package plugin

import (
	"time"

	mdns "github.com/miekg/dns"
)

// Kind is what an answer says.
type Kind uint8

// The kinds of answers.
const (
	Positive   Kind = iota
	NoName          // NXDOMAIN
	NoData          // the name exists, but has no such records
	Failure         // SERVFAIL or NOTIMP
	Delegation      // to another name server
	Unkeepable      // any other
)

// KindOf returns the kind of an answer.
func KindOf(m *mdns.Msg) Kind {
	if m.Opcode != mdns.OpcodeQuery || len(m.Question) == 0 {
		return Unkeepable
	}
	if t := m.Question[0].Qtype; t == mdns.TypeAXFR || t == mdns.TypeIXFR {
		return Unkeepable
	}
	soa, ns := false, false
	for _, rr := range m.Ns {
		soa = soa || rr.Header().Rrtype == mdns.TypeSOA
		ns = ns || rr.Header().Rrtype == mdns.TypeNS
	}
	switch {
	case m.Rcode == mdns.RcodeSuccess && len(m.Answer) > 0:
		return Positive
	case m.Rcode == mdns.RcodeNameError && len(m.Answer) > 0:
		return Unkeepable
	case m.Rcode == mdns.RcodeSuccess && soa:
		return NoData
	case m.Rcode == mdns.RcodeNameError:
		return NoName
	case m.Rcode == mdns.RcodeServerFailure, m.Rcode == mdns.RcodeNotImplemented:
		return Failure
	case m.Rcode == mdns.RcodeSuccess && ns:
		return Delegation
	case m.Rcode == mdns.RcodeSuccess:
		return Positive
	}
	return Unkeepable
}

// HasSOA reports whether the authority section has a SOA record.
func HasSOA(m *mdns.Msg) bool {
	for _, rr := range m.Ns {
		if rr.Header().Rrtype == mdns.TypeSOA {
			return true
		}
	}
	return false
}

// minTTL is the TTL of an answer without records.
const minTTL = 5 * time.Second

// TTL returns the shortest TTL of an answer's records, at most most.
func TTL(m *mdns.Msg, most time.Duration) time.Duration {
	out, found := most, false
	for _, rrs := range [][]mdns.RR{m.Answer, m.Ns, m.Extra} {
		for _, rr := range rrs {
			if rr.Header().Rrtype == mdns.TypeOPT {
				continue
			}
			found = true
			out = min(out, time.Duration(rr.Header().Ttl)*time.Second)
		}
	}
	if !found {
		return minTTL
	}
	return out
}

// EachRR calls f for every record of an answer but OPT.
func EachRR(m *mdns.Msg, f func(mdns.RR)) {
	for _, rrs := range [][]mdns.RR{m.Answer, m.Ns, m.Extra} {
		for _, rr := range rrs {
			if rr.Header().Rrtype != mdns.TypeOPT {
				f(rr)
			}
		}
	}
}
