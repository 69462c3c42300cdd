package plugin

import (
	"context"
	"slices"
	"strings"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
)

// Autopath answers a name in the first domain of a search path with the first name of the
// path that exists. search returns the path of a client for a name, nil if it is not known.
func Autopath(c *corefile.Autopath, search func(q *Query) []string, next Handler) Handler {
	return Func(func(ctx context.Context, q *Query) Reply {
		name := q.Name()
		if corefile.LongestZone(name, c.Zones) == "" {
			return next.Answer(ctx, q)
		}
		path := c.Search
		if len(path) == 0 {
			path = search(q)
		}
		if len(path) == 0 || name == path[0] || !corefile.InZone(name, path[0]) {
			return next.Answer(ctx, q)
		}
		asked := q.Question().Name
		base := strings.TrimSuffix(asked[:len(asked)-len(path[0])], ".")
		var first Reply
		for i, domain := range path {
			m := q.Msg.Copy()
			m.Question[0].Name = base + "." + strings.TrimPrefix(domain, ".")
			r := next.Answer(ctx, q.With(m))
			if i == 0 {
				first = r
			}
			if r.Err != nil {
				return r
			}
			if r.Msg == nil || r.Msg.Rcode == mdns.RcodeNameError {
				continue
			}
			alias(r.Msg, asked)
			r.Plugin = "autopath"
			return r
		}
		if first.Msg != nil {
			first.Msg.Question = slices.Clone(q.Msg.Question)
		}
		return first
	})
}

// alias makes m an answer for name, which it names as another name of its question's.
func alias(m *mdns.Msg, name string) {
	m.Question[0].Name = name
	if len(m.Answer) == 0 {
		return
	}
	first := m.Answer[0].Header()
	if strings.EqualFold(first.Name, name) {
		return
	}
	c := &mdns.CNAME{Hdr: header(name, mdns.TypeCNAME, first.Ttl), Target: first.Name}
	m.Answer = append([]mdns.RR{c}, m.Answer...)
}
