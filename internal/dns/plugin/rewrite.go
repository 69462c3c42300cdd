package plugin

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
)

// change is what a rule does to each record of the answer.
type change func(m *mdns.Msg, rr mdns.RR)

// Rewrite changes questions by the first rule that matches, and further ones behind a
// rule with Continue, and the answers to them. The answer has the client's question.
func Rewrite(rules []*corefile.Rewrite, next Handler) Handler {
	return Func(func(ctx context.Context, q *Query) Reply {
		asked := *q.Question()
		var changes []change
		stopped := false
		for _, r := range rules {
			c, matched := apply(r, q)
			if !matched {
				continue
			}
			if _, ok := mdns.IsDomainName(q.Question().Name); !ok {
				err := fmt.Errorf("rewrite: %q is not a domain name", q.Question().Name)
				*q.Question() = asked
				return Fail("rewrite", mdns.RcodeServerFailure, err)
			}
			changes = append(changes, c...)
			if stopped = !r.Continue; stopped {
				break
			}
		}
		rewritten := *q.Question()
		r := next.Answer(ctx, q)
		if !stopped && len(changes) == 0 && asked == rewritten {
			return r
		}
		if r.Msg == nil && !r.Drop {
			r.Msg = new(mdns.Msg).SetRcode(q.Msg, r.Rcode)
		}
		if r.Msg != nil {
			for _, c := range changes {
				if len(r.Msg.Answer)+len(r.Msg.Ns)+len(r.Msg.Extra) == 0 {
					c(r.Msg, nil)
				}
				EachRR(r.Msg, func(rr mdns.RR) { c(r.Msg, rr) })
			}
			r.Msg.Question = []mdns.Question{asked}
		}
		*q.Question() = asked
		return r
	})
}

// apply changes the question and returns what must be changed in the answer.
func apply(r *corefile.Rewrite, q *Query) ([]change, bool) {
	switch r.Field {
	case "name":
		return applyName(r, q)
	case "type":
		if q.Type() != r.FromCode {
			return nil, false
		}
		q.Question().Qtype = r.ToCode
	case "class":
		if q.Question().Qclass != r.FromCode {
			return nil, false
		}
		q.Question().Qclass = r.ToCode
	case "ttl":
		return []change{func(_ *mdns.Msg, rr mdns.RR) {
			if rr != nil {
				rr.Header().Ttl = min(max(rr.Header().Ttl, r.MinTTL), r.MaxTTL)
			}
		}}, matches(r, q.Name())
	case "rcode":
		return []change{func(m *mdns.Msg, _ mdns.RR) {
			if m.Rcode == int(r.FromCode) {
				m.Rcode = int(r.ToCode)
			}
		}}, matches(r, q.Name())
	}
	return nil, true
}

// matches reports whether the rule is for a name.
func matches(r *corefile.Rewrite, name string) bool {
	switch r.Kind {
	case "exact":
		return name == r.From
	case "prefix":
		return strings.HasPrefix(name, r.From)
	case "suffix":
		return strings.HasSuffix(name, r.From)
	case "substring":
		return strings.Contains(name, r.From)
	}
	return r.Pattern.MatchString(name)
}

// applyName rewrites the name of the question.
func applyName(r *corefile.Rewrite, q *Query) ([]change, bool) {
	name := q.Name()
	if !matches(r, name) {
		return nil, false
	}
	to := r.To
	switch r.Kind {
	case "prefix":
		to = r.To + strings.TrimPrefix(name, r.From)
	case "suffix":
		to = strings.TrimSuffix(name, r.From) + r.To
	case "substring":
		to = strings.ReplaceAll(name, r.From, r.To)
	case "regex":
		to = fill(r.Pattern, name, r.To)
	}
	q.Question().Name = to
	var out []change
	if r.Auto {
		back := func(s string) string { return remap(s, to, name) }
		if r.Kind == "suffix" {
			back = func(s string) string {
				if head, ok := strings.CutSuffix(s, r.To); ok {
					return head + r.From
				}
				return s
			}
		}
		out = append(out, owners(back), values(back))
	}
	for _, a := range r.Answers {
		forth := func(s string) string { return fill(a.Pattern, s, a.To) }
		if a.Value {
			out = append(out, values(forth))
		} else {
			out = append(out, owners(forth))
		}
	}
	return out, true
}

// remap replaces a name, or the end of a name below it.
func remap(s, from, to string) string {
	if s == from {
		return to
	}
	if head, ok := strings.CutSuffix(s, "."+from); ok {
		return head + "." + to
	}
	return s
}

// fill replaces {0}, {1} … in text by the groups of the pattern, if s matches it.
func fill(p *regexp.Regexp, s, text string) string {
	groups := p.FindStringSubmatch(s)
	if groups == nil {
		return s
	}
	for i, g := range groups {
		text = strings.ReplaceAll(text, "{"+strconv.Itoa(i)+"}", g)
	}
	return text
}

func owners(f func(string) string) change {
	return func(_ *mdns.Msg, rr mdns.RR) {
		if rr != nil {
			rr.Header().Name = f(rr.Header().Name)
		}
	}
}

// values changes the name in the data of a record.
func values(f func(string) string) change {
	return func(_ *mdns.Msg, rr mdns.RR) {
		var at *string
		switch rr := rr.(type) {
		case *mdns.SRV:
			at = &rr.Target
		case *mdns.MX:
			at = &rr.Mx
		case *mdns.CNAME:
			at = &rr.Target
		case *mdns.NS:
			at = &rr.Ns
		case *mdns.DNAME:
			at = &rr.Target
		case *mdns.NAPTR:
			at = &rr.Replacement
		case *mdns.SOA:
			at = &rr.Ns
		case *mdns.PTR:
			at = &rr.Ptr
		default:
			return
		}
		*at = f(*at)
	}
}
