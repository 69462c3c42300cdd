package plugin

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"text/template"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
)

// TemplateData are the fields of templates, as CoreDNS names them.
type TemplateData struct {
	Zone, Name, Class, Type, Remote string
	Match                           []string
	Group                           map[string]string
	Message                         *mdns.Msg
	Question                        *mdns.Question
}

// Meta returns "": no plugin here leaves metadata.
func (TemplateData) Meta(string) string { return "" }

// Templates answers from the first template that matches.
func Templates(all []*corefile.Template, next Handler) Handler {
	return Func(func(ctx context.Context, q *Query) Reply {
		name := q.Name()
		for _, t := range all {
			zone := corefile.LongestZone(name, t.Zones)
			if zone == "" || !concerns(t, q.Question()) {
				continue
			}
			data, ok := match(t, q, name, zone)
			switch {
			case ok:
				return fromTemplate(ctx, t, q, data)
			case !t.Fall.Through(name):
				return Fail("template", mdns.RcodeServerFailure, nil)
			}
		}
		return next.Answer(ctx, q)
	})
}

// concerns reports whether a template is for questions of this class and type.
func concerns(t *corefile.Template, q *mdns.Question) bool {
	class := t.Class == mdns.ClassANY || q.Qclass == mdns.ClassANY || t.Class == q.Qclass
	return class && (t.Type == mdns.TypeANY || q.Qtype == mdns.TypeANY || t.Type == q.Qtype)
}

// match returns the fields for a name that one of the template's expressions matches.
func match(t *corefile.Template, q *Query, name, zone string) (TemplateData, bool) {
	for _, re := range t.Match {
		groups := re.FindStringSubmatch(name)
		if groups == nil {
			continue
		}
		d := TemplateData{
			Zone: zone, Name: name, Class: mdns.Class(q.Question().Qclass).String(), Type: mdns.Type(q.Type()).String(),
			Remote: q.Client.Addr().Unmap().String(), Match: groups, Group: map[string]string{}, Message: q.Msg, Question: q.Question(),
		}
		for i, g := range groups {
			d.Group[strconv.Itoa(i)] = g
			if n := re.SubexpNames()[i]; n != "" {
				d.Group[n] = g
			}
		}
		return d, true
	}
	return TemplateData{}, false
}

// fromTemplate makes the answer of a template.
func fromTemplate(ctx context.Context, t *corefile.Template, q *Query, data TemplateData) Reply {
	if t.Rcode == mdns.RcodeServerFailure {
		return Fail("template", t.Rcode, nil)
	}
	m := q.NewReply()
	m.Rcode = t.Rcode
	for _, part := range []struct {
		from []*template.Template
		to   *[]mdns.RR
	}{{t.Answer, &m.Answer}, {t.Additional, &m.Extra}, {t.Authority, &m.Ns}} {
		for _, one := range part.from {
			rr, err := record(one, data)
			if err != nil {
				return Fail("template", mdns.RcodeServerFailure, err)
			}
			*part.to = append(*part.to, rr)
		}
	}
	if q.Type() == mdns.TypeA || q.Type() == mdns.TypeAAAA {
		follow(ctx, q, m)
	}
	if t.EDE != nil {
		m.SetEdns0(4096, true)
		o := m.IsEdns0()
		o.Option = append(o.Option, &mdns.EDNS0_EDE{InfoCode: t.EDE.Code, ExtraText: t.EDE.Text})
	}
	return Reply{Msg: m, Plugin: "template"}
}

// follow appends the addresses of the targets of CNAME records.
func follow(ctx context.Context, q *Query, m *mdns.Msg) {
	for _, rr := range m.Answer {
		c, ok := rr.(*mdns.CNAME)
		if !ok {
			continue
		}
		if up := q.Ask(ctx, c.Target, q.Type()); up != nil {
			m.Truncated = m.Truncated || up.Truncated
			m.Answer = append(m.Answer, up.Answer...)
		}
	}
}

// record makes one record.
func record(t *template.Template, data TemplateData) (mdns.RR, error) {
	var b strings.Builder
	if err := t.Execute(&b, data); err != nil {
		return nil, err
	}
	rr, err := mdns.NewRR(b.String())
	if err == nil && rr == nil {
		err = fmt.Errorf("template: %q is no record", b.String())
	}
	return rr, err
}
