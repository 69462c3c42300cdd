package plugin

import (
	"context"
	"net"
	"net/netip"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
)

// maxSynthesized is the TTL of synthesized records where no SOA record bounds it (RFC 6147, 5.1.7).
const maxSynthesized = 600

// DNS64 makes AAAA records from A records for names without AAAA records (RFC 6147).
func DNS64(c *corefile.DNS64, next Handler) Handler {
	return Func(func(ctx context.Context, q *Query) Reply {
		if q.Type() != mdns.TypeAAAA || q.Question().Qclass != mdns.ClassINET || q.Family() == 1 && !c.AllowIPv4 {
			return next.Answer(ctx, q)
		}
		name := q.Question().Name
		r := next.Answer(ctx, q)
		if r.Msg == nil || KindOf(r.Msg) == NoName {
			return r
		}
		if !c.TranslateAll {
			for _, rr := range r.Msg.Answer {
				if rr.Header().Rrtype == mdns.TypeAAAA {
					return r
				}
			}
		}
		a := q.Ask(ctx, name, mdns.TypeA)
		if a == nil {
			return Fail("dns64", mdns.RcodeServerFailure, errNoSelf)
		}
		return Reply{Msg: synthesize(c.Prefix, q.Msg, r.Msg, a), Plugin: "dns64"}
	})
}

// synthesize returns the answer for AAAA made of the one for A.
func synthesize(prefix netip.Prefix, req, aaaa, a *mdns.Msg) *mdns.Msg {
	m := new(mdns.Msg).SetReply(req)
	m.Rcode, m.Truncated, m.Ns, m.Extra = a.Rcode, a.Truncated, a.Ns, a.Extra
	ttl := uint32(maxSynthesized)
	for _, rr := range aaaa.Ns {
		if rr.Header().Rrtype == mdns.TypeSOA {
			ttl = rr.Header().Ttl
		}
	}
	for _, rr := range a.Answer {
		old, ok := rr.(*mdns.A)
		if !ok {
			m.Answer = append(m.Answer, rr)
			continue
		}
		h := header(old.Hdr.Name, mdns.TypeAAAA, min(old.Hdr.Ttl, ttl))
		m.Answer = append(m.Answer, &mdns.AAAA{Hdr: h, AAAA: embed(prefix, old.A)})
	}
	return m
}

// embed puts an IPv4 address into a prefix (RFC 6052, 2.2); the ninth octet stays zero.
func embed(prefix netip.Prefix, v4 net.IP) net.IP {
	out := prefix.Addr().As16()
	at := prefix.Bits() / 8
	for _, b := range v4.To4() {
		if at == 8 {
			at++
		}
		out[at] = b
		at++
	}
	return out[:]
}
