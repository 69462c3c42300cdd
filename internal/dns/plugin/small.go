package plugin

import (
	"context"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
)

// Any answers questions of type ANY with HINFO (RFC 8482).
func Any(next Handler) Handler {
	return Func(func(ctx context.Context, q *Query) Reply {
		if q.Type() != mdns.TypeANY {
			return next.Answer(ctx, q)
		}
		m := new(mdns.Msg).SetReply(q.Msg)
		m.Answer = []mdns.RR{&mdns.HINFO{Hdr: header(q.Question().Name, mdns.TypeHINFO, 8482), Cpu: "ANY obsoleted", Os: "See RFC 8482"}}
		return Reply{Msg: m, Plugin: "any"}
	})
}

func header(name string, typ uint16, ttl uint32) mdns.RR_Header {
	return mdns.RR_Header{Name: name, Rrtype: typ, Class: mdns.ClassINET, Ttl: ttl}
}

// Bufsize bounds the size that a client asks for.
func Bufsize(c *corefile.Bufsize, next Handler) Handler {
	return Func(func(ctx context.Context, q *Query) Reply {
		if o := q.Msg.IsEdns0(); o != nil && o.UDPSize() > c.Size {
			o.SetUDPSize(c.Size)
		}
		return next.Answer(ctx, q)
	})
}

// Chaos answers questions of class CH.
func Chaos(c *corefile.Chaos, version string, next Handler) Handler {
	if c.Version != "" {
		version = c.Version
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	texts := map[string][]string{
		"version.bind.": {version}, "version.server.": {version}, "hostname.bind.": {host}, "id.server.": {host}, "authors.bind.": c.Authors,
	}
	return Func(func(ctx context.Context, q *Query) Reply {
		found, ok := texts[q.Name()]
		if !ok || q.Question().Qclass != mdns.ClassCHAOS || q.Type() != mdns.TypeTXT {
			return next.Answer(ctx, q)
		}
		m := new(mdns.Msg).SetReply(q.Msg)
		for _, text := range found {
			h := mdns.RR_Header{Name: q.Question().Name, Rrtype: mdns.TypeTXT, Class: mdns.ClassCHAOS}
			m.Answer = append(m.Answer, &mdns.TXT{Hdr: h, Txt: []string{text[:min(len(text), 255)]}})
		}
		return Reply{Msg: m, Plugin: "chaos"}
	})
}

// LoadBalance shuffles addresses and MX records, which stand behind all others.
func LoadBalance(c *corefile.LoadBalance, next Handler) Handler {
	return Func(func(ctx context.Context, q *Query) Reply {
		r := next.Answer(ctx, q)
		if r.Msg != nil && r.Msg.Rcode == mdns.RcodeSuccess {
			r.Msg.Answer, r.Msg.Ns, r.Msg.Extra = shuffle(r.Msg.Answer), shuffle(r.Msg.Ns), shuffle(r.Msg.Extra)
			if len(c.Prefer) > 0 {
				slices.SortStableFunc(r.Msg.Answer, func(a, b mdns.RR) int { return rank(c.Prefer, a) - rank(c.Prefer, b) })
			}
		}
		return r
	})
}

// shuffle returns the records in the order CNAME, others, addresses, MX, the last two shuffled.
func shuffle(rrs []mdns.RR) []mdns.RR {
	if len(rrs) < 2 {
		return rrs
	}
	group := func(rr mdns.RR) int {
		switch rr.Header().Rrtype {
		case mdns.TypeCNAME:
			return 0
		case mdns.TypeA, mdns.TypeAAAA:
			return 2
		case mdns.TypeMX:
			return 3
		}
		return 1
	}
	slices.SortStableFunc(rrs, func(a, b mdns.RR) int { return group(a) - group(b) })
	for _, g := range []int{2, 3} {
		first := slices.IndexFunc(rrs, func(rr mdns.RR) bool { return group(rr) == g })
		if first < 0 {
			continue
		}
		last := first
		for last < len(rrs) && group(rrs[last]) == g {
			last++
		}
		part := rrs[first:last]
		rand.Shuffle(len(part), func(i, j int) { part[i], part[j] = part[j], part[i] })
	}
	return rrs
}

// rank is 0 for records that stand first: all but addresses, 1 for preferred addresses, else 2.
func rank(prefer []netip.Prefix, rr mdns.RR) int {
	a, ok := addressOf(rr)
	switch {
	case !ok:
		return 0
	case slices.ContainsFunc(prefer, func(p netip.Prefix) bool { return p.Contains(a) }):
		return 1
	}
	return 2
}

// addressOf returns the address of a record.
func addressOf(rr mdns.RR) (netip.Addr, bool) {
	var ip net.IP
	switch rr := rr.(type) {
	case *mdns.A:
		ip = rr.A
	case *mdns.AAAA:
		ip = rr.AAAA
	}
	a, ok := netip.AddrFromSlice(ip)
	return a.Unmap(), ok
}

// localZones are what Local answers, as in CoreDNS.
var localZones = []string{"localhost.", "0.in-addr.arpa.", "127.in-addr.arpa.", "255.in-addr.arpa."}

// Local answers localhost, the names below it, names that begin with it, and reverse names of
// the machine's own addresses (RFC 6761, 6.3; RFC 6303, 4.2).
func Local(c *corefile.Local, next Handler) Handler {
	return Func(func(ctx context.Context, q *Query) Reply {
		name := q.Name()
		zone := corefile.LongestZone(name, localZones)
		prefix := !c.NoPrefix && strings.HasPrefix(name, "localhost.")
		if zone == "" && !prefix {
			return next.Answer(ctx, q)
		}
		return Reply{Msg: local(q, name, zone), Plugin: "local"}
	})
}

// local answers a name in one of localZones, or with the zone "" a name that begins with localhost.
func local(q *Query, name, zone string) *mdns.Msg {
	const ttl = 604800 // a week
	m := new(mdns.Msg).SetReply(q.Msg)
	asked := q.Question().Name
	h := header(asked, q.Type(), ttl)
	soa := func(name string) []mdns.RR {
		return []mdns.RR{&mdns.SOA{
			Hdr: header(name, mdns.TypeSOA, ttl), Ns: "localhost.", Mbox: "root.localhost.", Serial: 1, Minttl: ttl,
		}}
	}
	host := zone == "" || zone == "localhost."
	switch typ := q.Type(); {
	case host && typ == mdns.TypeA:
		m.Answer = []mdns.RR{&mdns.A{Hdr: h, A: net.IPv4(127, 0, 0, 1)}}
	case host && typ == mdns.TypeAAAA:
		m.Answer = []mdns.RR{&mdns.AAAA{Hdr: h, AAAA: net.IPv6loopback}}
	case name == zone && typ == mdns.TypeSOA:
		m.Answer = soa(asked)
	case name == zone && typ == mdns.TypeNS:
		m.Answer = []mdns.RR{&mdns.NS{Hdr: h, Ns: "localhost."}}
	case host || name == zone:
		m.Ns = soa(asked)
	case name == "1.0.0.127.in-addr.arpa." && typ == mdns.TypePTR:
		m.Answer = []mdns.RR{&mdns.PTR{Hdr: h, Ptr: "localhost."}}
	case name == "1.0.0.127.in-addr.arpa.":
		m.Ns = soa(asked[len(asked)-len(zone):])
	default:
		m.Ns, m.Rcode = soa(asked[len(asked)-len(zone):]), mdns.RcodeNameError
	}
	return m
}

// Minimal leaves authority and additional records out of positive answers.
func Minimal(next Handler) Handler {
	return Func(func(ctx context.Context, q *Query) Reply {
		r := next.Answer(ctx, q)
		if r.Msg != nil && KindOf(r.Msg) == Positive {
			r.Msg.Ns, r.Msg.Extra = nil, nil
		}
		return r
	})
}

// NSID adds the identity of the server to answers for clients that ask for it (RFC 5001).
func NSID(c *corefile.NSID, next Handler) Handler {
	id := hex.EncodeToString([]byte(c.Data))
	return Func(func(ctx context.Context, q *Query) Reply {
		asked := false
		o := q.Msg.IsEdns0()
		if o != nil {
			asked = slices.ContainsFunc(o.Option, func(e mdns.EDNS0) bool { return e.Option() == mdns.EDNS0NSID })
		}
		r := next.Answer(ctx, q)
		if asked && r.Msg != nil {
			opt := r.Msg.IsEdns0()
			if opt == nil {
				r.Msg.SetEdns0(o.UDPSize(), o.Do())
				opt = r.Msg.IsEdns0()
			}
			opt.Option = append(opt.Option, &mdns.EDNS0_NSID{Code: mdns.EDNS0NSID, Nsid: id})
		}
		return r
	})
}

// Whoami answers with the client's address, port and protocol.
func Whoami() Handler {
	return Func(func(_ context.Context, q *Query) Reply {
		m := q.NewReply()
		name := q.Question().Name
		a := q.Client.Addr().Unmap()
		if a.Is4() {
			m.Extra = []mdns.RR{&mdns.A{Hdr: header(name, mdns.TypeA, 0), A: a.AsSlice()}}
		} else {
			m.Extra = []mdns.RR{&mdns.AAAA{Hdr: header(name, mdns.TypeAAAA, 0), AAAA: a.AsSlice()}}
		}
		service := "_" + q.Network + "." + name
		if name == "." {
			service = "_" + q.Network + "."
		}
		m.Extra = append(m.Extra, &mdns.SRV{Hdr: header(service, mdns.TypeSRV, 0), Port: q.Client.Port(), Target: "."})
		return Reply{Msg: m, Plugin: "whoami"}
	})
}

// ACL allows, blocks, filters or drops questions.
func ACL(rules []*corefile.ACL, next Handler) Handler {
	return Func(func(ctx context.Context, q *Query) Reply {
		name, client := q.Name(), q.Client.Addr().Unmap().WithZone("")
		for _, a := range rules {
			if corefile.LongestZone(name, a.Zones) == "" {
				continue
			}
			switch decide(a.Rules, client, q.Type()) {
			case "allow":
				return next.Answer(ctx, q)
			case "block":
				return refuse(q, mdns.RcodeRefused, mdns.ExtendedErrorCodeBlocked)
			case "filter":
				return refuse(q, mdns.RcodeSuccess, mdns.ExtendedErrorCodeFiltered)
			case "drop":
				return Reply{Drop: true, Plugin: "acl"}
			}
		}
		return next.Answer(ctx, q)
	})
}

// decide returns the action of the first rule that matches, or "".
func decide(rules []corefile.ACLRule, client netip.Addr, typ uint16) string {
	for _, r := range rules {
		types := len(r.Types) == 0 || slices.Contains(r.Types, typ)
		if types && slices.ContainsFunc(r.Nets, func(p netip.Prefix) bool { return p.Contains(client) }) {
			return r.Action
		}
	}
	return ""
}

// refuse answers with a code and an extended error (RFC 8914).
func refuse(q *Query, rcode int, code uint16) Reply {
	m := new(mdns.Msg).SetRcode(q.Msg, rcode)
	m.SetEdns0(4096, true)
	o := m.IsEdns0()
	o.Option = append(o.Option, &mdns.EDNS0_EDE{InfoCode: code})
	return Reply{Msg: m, Plugin: "acl"}
}

// errNoSelf is the error of a step that needs another question answered.
var errNoSelf = errors.New("the server has no answer to a question that this one needs")
