// Package zonefile is the step that answers from zone files (RFC 1035, section 5), as
// CoreDNS's plugins file and auto do. Signed zones are served without their signatures.
package zonefile

import (
	"context"
	"fmt"
	"os"
	"strings"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/plugin"
)

// zone is one zone. It is immutable.
type zone struct {
	origin string
	soa    *mdns.SOA
	// names has the records of each name by type. A name between others has none.
	names map[string]map[uint16][]mdns.RR
}

// Bounds of a zone, and of the CNAME records that one answer follows.
const (
	maxRecords = 1_000_000
	maxChain   = 8
)

// read reads the file of a zone.
func read(file, origin string) (*zone, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z := &zone{origin: origin, names: map[string]map[uint16][]mdns.RR{}}
	p := mdns.NewZoneParser(f, origin, file)
	p.SetIncludeAllowed(true)
	n := 0
	for rr, ok := p.Next(); ok; rr, ok = p.Next() {
		if n++; n > maxRecords {
			return nil, fmt.Errorf("%s has more than %d records", file, maxRecords)
		}
		name := strings.ToLower(rr.Header().Name)
		if !corefile.InZone(name, origin) {
			continue
		}
		z.add(name, rr)
	}
	if err := p.Err(); err != nil {
		return nil, err
	}
	if z.soa == nil {
		return nil, fmt.Errorf("%s has no SOA record of %s", file, origin)
	}
	return z, nil
}

func (z *zone) add(name string, rr mdns.RR) {
	if soa, ok := rr.(*mdns.SOA); ok && name == z.origin {
		z.soa = soa
	}
	typ := rr.Header().Rrtype
	z.node(name)[typ] = append(z.node(name)[typ], rr)
	for at, end := mdns.NextLabel(name, 0); !end && corefile.InZone(name[at:], z.origin); at, end = mdns.NextLabel(name, at) {
		z.node(name[at:])
	}
}

func (z *zone) node(name string) map[uint16][]mdns.RR {
	if z.names[name] == nil {
		z.names[name] = map[uint16][]mdns.RR{}
	}
	return z.names[name]
}

// answer answers q. It reports whether the name exists.
func (z *zone) answer(ctx context.Context, q *plugin.Query) (*mdns.Msg, bool) {
	m := q.NewReply()
	return m, z.fill(ctx, q, m, q.Question().Name, 0)
}

// fill appends what is at name, whose case of letters it keeps.
func (z *zone) fill(ctx context.Context, q *plugin.Query, m *mdns.Msg, name string, depth int) bool {
	lower := strings.ToLower(name)
	if cut := z.cut(lower, q.Type()); cut != "" {
		m.Authoritative = len(m.Answer) > 0
		m.Ns = copies(z.names[cut][mdns.TypeNS], "")
		z.glue(m, m.Ns)
		return true
	}
	records, known := z.names[lower]
	if !known {
		records, known = z.wildcard(lower)
	}
	if !known {
		m.Rcode = mdns.RcodeNameError
		m.Ns = []mdns.RR{mdns.Copy(z.soa)}
		return false
	}
	typ := q.Type()
	if c := records[mdns.TypeCNAME]; len(c) > 0 && typ != mdns.TypeCNAME {
		m.Answer = append(m.Answer, copies(c, name)...)
		z.follow(ctx, q, m, c[0].(*mdns.CNAME).Target, depth)
		return true
	}
	found := copies(records[typ], name)
	if len(found) == 0 {
		m.Ns = []mdns.RR{mdns.Copy(z.soa)}
		return true
	}
	m.Answer = append(m.Answer, found...)
	z.glue(m, found)
	if typ != mdns.TypeNS || lower != z.origin {
		m.Ns = copies(z.names[z.origin][mdns.TypeNS], "")
	}
	return true
}

// follow appends the records of a CNAME's target: of this zone, or from the server itself.
func (z *zone) follow(ctx context.Context, q *plugin.Query, m *mdns.Msg, target string, depth int) {
	switch {
	case depth >= maxChain:
	case corefile.InZone(strings.ToLower(target), z.origin):
		z.fill(ctx, q, m, target, depth+1)
	default:
		if up := q.Ask(ctx, target, q.Type()); up != nil {
			m.Answer = append(m.Answer, up.Answer...)
			m.Truncated = m.Truncated || up.Truncated
			if m.Rcode = up.Rcode; len(up.Answer) == 0 {
				m.Ns = up.Ns
			}
		}
	}
}

// cut returns the name of a delegation that name is at or below; "" for none. DS records
// at a delegation belong to this zone.
func (z *zone) cut(name string, typ uint16) (found string) {
	for at, end := 0, false; !end && len(name[at:]) > len(z.origin); at, end = mdns.NextLabel(name, at) {
		if len(z.names[name[at:]][mdns.TypeNS]) > 0 && !(at == 0 && typ == mdns.TypeDS) {
			found = name[at:]
		}
	}
	return found
}

// wildcard returns the records that stand for a name that does not exist (RFC 4592).
func (z *zone) wildcard(name string) (map[uint16][]mdns.RR, bool) {
	for at, end := mdns.NextLabel(name, 0); !end && corefile.InZone(name[at:], z.origin); at, end = mdns.NextLabel(name, at) {
		if records, ok := z.names["*."+name[at:]]; ok {
			return records, true
		}
		if _, ok := z.names[name[at:]]; ok {
			return nil, false // the closest encloser
		}
	}
	return nil, false
}

// glue appends the addresses of the servers that records name, as far as the zone has them.
func (z *zone) glue(m *mdns.Msg, rrs []mdns.RR) {
	for _, rr := range rrs {
		var target string
		switch rr := rr.(type) {
		case *mdns.NS:
			target = rr.Ns
		case *mdns.MX:
			target = rr.Mx
		case *mdns.SRV:
			target = rr.Target
		default:
			continue
		}
		at := z.names[strings.ToLower(target)]
		m.Extra = append(append(m.Extra, copies(at[mdns.TypeA], "")...), copies(at[mdns.TypeAAAA], "")...)
	}
}

// copies returns copies of records, owned by name if it is not empty.
func copies(rrs []mdns.RR, name string) (out []mdns.RR) {
	for _, rr := range rrs {
		c := mdns.Copy(rr)
		if name != "" {
			c.Header().Name = name
		}
		out = append(out, c)
	}
	return out
}
