package routes

import (
	"fmt"
	"net/http"
	"reflect"
	"strings"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/basic"
	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/svc"
)

// answer is what becomes of a request, or of a connection.
type answer struct {
	rule *gateway.Rule // nil if no rule takes it
	// goes is where it goes to, in words, and refused what it is answered with in place of that, "" if it is served.
	goes, refused string
	// lost is what becomes of a share of the requests that no backend gets, "" if all get one, and lostShare that share, up to 1.
	lost      string
	lostShare float64
}

// place is where a request is for.
type place struct {
	tls        bool
	port       uint16
	host, path string // as they are shown
	prefix     string
	// unreached reports whether a backend gets nothing, as one whose BackendTLSPolicy cannot be met.
	unreached func(*gateway.Rule, *gateway.Weighted) bool
	// passwords reports whether there are names and passwords.
	passwords func(basic.Source) bool
}

// answerOf returns what a rule makes of a request.
func answerOf(rule *gateway.Rule, at *place) answer {
	a := answer{rule: rule}
	switch {
	case rule == nil:
		a.refused = "404"
	case rule.Closed && rule.Route.Name == (svc.Name{}):
		a.refused = "503: the expressions of the host do not look at a path of " + tooLong
	case rule.Closed:
		a.refused = "503: what its object asks for cannot be served"
	case rule.HTTPS && !at.tls:
		a.goes = "a redirect to https"
	case rule.Maintenance != nil:
		a.refused = "503: maintenance"
	case rule.Redirect != nil:
		scheme := map[bool]string{false: "http", true: "https"}[at.tls]
		a.goes = fmt.Sprintf("a redirect (%d) to %s", rule.Redirect.Status,
			rule.Redirect.Location(scheme, hostText(at.host), at.port, at.path, "", at.prefix))
	case rule.Auth != nil && !rule.Any && rule.Auth.Backend.Name == (svc.Name{}):
		a.refused = "503: there is no server to ask for authorization"
	case rule.Basic != nil && !rule.Any && !at.passwords(rule.Basic.Source):
		a.refused = "503: there are no names and passwords to compare with"
	default:
		a.backends(rule, at)
	}
	return a
}

func (a *answer) backends(rule *gateway.Rule, at *place) {
	total, good, unreached := uint64(0), uint64(0), uint64(0)
	for i := range rule.Backends {
		total += uint64(rule.Backends[i].Weight)
	}
	var goes []string
	share := func(weight uint64) string {
		if weight == total {
			return ""
		}
		return fmt.Sprintf(" (%s %%)", strings.TrimSuffix(fmt.Sprintf("%.1f", 100*float64(weight)/float64(total)), ".0"))
	}
	for i := range rule.Backends {
		w := &rule.Backends[i]
		to := &w.Backend
		if rule.Spared(w) {
			to = &rule.Spare.Backend
		} else if !w.Valid {
			continue
		}
		if w.Weight == 0 {
			continue
		}
		if w.Valid && at.unreached(rule, w) {
			unreached += uint64(w.Weight)
			continue
		}
		good += uint64(w.Weight)
		goes = append(goes, backendText(to)+share(uint64(w.Weight)))
	}
	a.goes = strings.Join(goes, " and ")
	code := rule.Refusal()
	if invalid := total - good - unreached; invalid == 0 && unreached > 0 {
		code = http.StatusServiceUnavailable
	}
	if good == 0 {
		a.refused = fmt.Sprintf("%d: it has no backend that can be used", code)
	} else if good < total {
		a.lost, a.lostShare = fmt.Sprintf("%d%s", code, share(total-good)), float64(total-good)/float64(total)
	}
}

func backendText(b *gateway.Backend) string {
	out := fmt.Sprintf("Service %s:%d", b.Name, b.Port)
	if b.Policy != (svc.Name{}) {
		out += fmt.Sprintf(" by TLS of BackendTLSPolicy %s", b.Policy)
	}
	return out
}

// by names the rule that has the request.
func (a *answer) by() string {
	if a.rule == nil || a.rule.Route.Name == (svc.Name{}) {
		return ""
	}
	out := a.rule.Route.Kind + " " + a.rule.Route.Name.String()
	if a.rule.Route.Kind == "HTTPRoute" || a.rule.Route.Kind == "GRPCRoute" {
		out += fmt.Sprintf(", rules[%d]", a.rule.Index)
	}
	return out
}

// differ returns what changes from one answer to another, "" if nothing does, and why requests are cut, "" if none is.
func differ(was, is *answer) (text, cuts string) {
	by := ""
	if b := is.by(); b != "" {
		by = " (" + b + ")"
	}
	switch {
	case was.refused != "" && is.refused == was.refused:
		return "", ""
	case was.refused != "" && is.refused != "":
		return "answered with " + is.refused + ", and not with " + was.refused, ""
	case is.refused != "":
		return "no longer served: " + is.refused + by + "; it went to " + was.goes, "requests are answered with " + firstWord(is.refused)
	case was.refused != "":
		text = "is served now: goes to " + is.goes + by
	case was.goes != is.goes:
		text = "goes to " + is.goes + " instead of " + was.goes + by
	}
	if is.lostShare > was.lostShare && was.refused == "" {
		cuts = "a share of the requests is answered with " + is.lost
		if text == "" {
			text = "a share of the requests has no backend" + by
		}
	}
	if was.refused != "" {
		was = &answer{}
	}
	details := detailsOf(was.rule, is.rule)
	switch {
	case len(details) > 0 && text != "":
		text += "; " + strings.Join(details, "; ")
	case len(details) > 0:
		text = strings.Join(details, "; ") + by
	}
	return text, cuts
}

func firstWord(text string) string {
	word, _, _ := strings.Cut(text, ":")
	return word
}

// detail is something that a rule does beside its backends. value is nil, or the zero value of its type, without it.
type detail struct {
	name  string
	value func(*gateway.Rule) any
	text  func(any) string // nil for what has no short text
}

var details = []detail{
	{"clients", func(r *gateway.Rule) any { return r.Access }, func(v any) string {
		a := v.(*filter.Access)
		out := "only from " + fmt.Sprint(a.Allow)
		if len(a.Allow) == 0 {
			out = "from everywhere"
		}
		if len(a.Deny) > 0 {
			out += fmt.Sprintf(" but not %v", a.Deny)
		}
		return out
	}},
	{"names and passwords", func(r *gateway.Rule) any { return r.Basic }, func(v any) string {
		return "of Secret " + v.(*basic.Rule).Source.Secret.String()
	}},
	{"authorization", func(r *gateway.Rule) any { return r.Auth }, func(v any) string {
		return "by " + backendText(&v.(*gateway.Auth).Backend)
	}},
	{"it is enough that one of clients, names and authorization fits", func(r *gateway.Rule) any { return r.Any }, nil},
	{"limits of each client", func(r *gateway.Rule) any { return r.Limits }, nil},
	{"timeout", func(r *gateway.Rule) any { return r.Timeout }, nil},
	{"most bytes of a body", func(r *gateway.Rule) any { return r.Body }, nil},
	{"host of the request to the backend", func(r *gateway.Rule) any { return r.Filters.Rewrite.Host }, nil},
	{"path of the request to the backend", func(r *gateway.Rule) any { return r.Filters.Rewrite.Path }, func(v any) string {
		return v.(*filter.PathChange).To
	}},
	{"fields of the request", func(r *gateway.Rule) any { return r.Filters.Request }, modifierText},
	{"fields of the answer", func(r *gateway.Rule) any { return r.Filters.Response }, modifierText},
	{"copies", func(r *gateway.Rule) any { return r.Filters.Mirrors }, func(v any) string {
		var out []string
		for _, m := range v.([]gateway.Mirror) {
			out = append(out, fmt.Sprintf("%d/%d to %s", m.Numerator, m.Denominator, backendText(&m.Backend)))
		}
		return strings.Join(out, ", ")
	}},
	{"CORS", func(r *gateway.Rule) any { return r.CORS }, func(any) string { return "set" }},
	{"retries", func(r *gateway.Rule) any { return r.Retry }, func(any) string { return "set" }},
	{"a client stays at one endpoint", func(r *gateway.Rule) any { return r.Session }, func(any) string { return "set" }},
	{"answers are compressed by", func(r *gateway.Rule) any { return r.Compress }, nil},
	{"backend while the other one has no endpoint or cannot be used", func(r *gateway.Rule) any { return r.Spare }, func(v any) string {
		return backendText(&v.(*gateway.Target).Backend)
	}},
	{"answers in place of errors of the backend are", func(r *gateway.Rule) any { return r.Pages }, func(v any) string {
		return "of " + backendText(&v.(*gateway.Target).Backend)
	}},
	{"errors that are answered in place of the backend", func(r *gateway.Rule) any { return r.Errors }, func(any) string { return "set" }},
	{"protocol of the backend", func(r *gateway.Rule) any { return protocols(r) }, nil},
	{"filters of backends", func(r *gateway.Rule) any { return backendFilters(r) }, func(any) string { return "set" }},
}

func modifierText(v any) string {
	m := v.(filter.Modifier)
	var out []string
	for _, f := range m.Set {
		out = append(out, "set "+f.Name)
	}
	for _, f := range m.Add {
		out = append(out, "add "+f.Name)
	}
	for _, n := range m.Remove {
		out = append(out, "remove "+n)
	}
	return strings.Join(out, ", ")
}

// protocols are the ones of the backends of a rule that are not plain HTTP.
func protocols(r *gateway.Rule) (out string) {
	for i := range r.Backends {
		if b := &r.Backends[i]; b.Valid && b.Backend.Protocol != gateway.HTTP1 && !strings.Contains(out, string(b.Backend.Protocol)) {
			out += " " + string(b.Backend.Protocol)
		}
	}
	return strings.TrimSpace(out)
}

func backendFilters(r *gateway.Rule) (out []gateway.Filters) {
	some := false
	for i := range r.Backends {
		f := r.Backends[i].Filters
		some = some || !reflect.ValueOf(f).IsZero()
		out = append(out, f)
	}
	if !some {
		return nil
	}
	return out
}

// detailsOf returns what a rule does otherwise than another one beside its backends. was may be nil.
func detailsOf(was, is *gateway.Rule) (out []string) {
	if is == nil || was == is {
		return nil
	}
	if was == nil {
		was = &gateway.Rule{Backends: is.Backends}
	}
	for _, d := range details {
		a, b := d.value(was), d.value(is)
		if reflect.DeepEqual(a, b) {
			continue
		}
		from, to := d.in(a), d.in(b)
		switch {
		case from == to:
			out = append(out, d.name+": changed")
		case from == "":
			out = append(out, d.name+": "+to+", new")
		case to == "":
			out = append(out, d.name+": no longer ("+from+")")
		default:
			out = append(out, d.name+": "+to+" instead of "+from)
		}
	}
	return out
}

// in returns a value in words, "" for the zero value.
func (d *detail) in(v any) string {
	if x := reflect.ValueOf(v); !x.IsValid() || x.IsZero() {
		return ""
	}
	if d.text != nil {
		return d.text(v)
	}
	if l, ok := v.(*filter.Limits); ok {
		return limitsText(l)
	}
	return fmt.Sprint(v)
}

func limitsText(l *filter.Limits) string {
	var out []string
	for _, x := range l.All {
		out = append(out, fmt.Sprintf("a request each %s, %d at once", x.Each, x.AtOnce))
	}
	if l.AtATime > 0 {
		out = append(out, fmt.Sprintf("%d at a time", l.AtATime))
	}
	return strings.Join(out, ", ")
}
