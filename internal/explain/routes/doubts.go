package routes

import (
	"cmp"
	"slices"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/filter"
)

// mayChange adds a line for a match whose requests are not known by examples, and why. The lines are counted, and bounded.
func (h *hostPlan) mayChange(p *pair, why string) {
	text, cuts := h.doubt(p, why)
	f := p.found()
	m := *f.Match
	m.Host = h.host
	id := key(&m)
	if h.c.doubted[id] {
		return
	}
	h.c.doubted[id] = true
	if h.doubts++; h.doubts > mostDoubts {
		if cuts != "" {
			h.doubtful = cuts
		}
		return
	}
	h.c.add(h.c.where(h.k, &found{Match: &m}, h.was, h.is), text, cuts)
}

// doubtful adds a line for a match whose requests are not known by one example, and why.
func (s *scene) doubtful(f, was, is *found, why string) {
	h := &hostPlan{scene: s, host: f.Host, all: s.at(f.Host)}
	i := slices.IndexFunc(h.all, func(p *pair) bool { return p.was == was && p.is == is })
	if i < 0 {
		h.mayChange(&pair{was: was, is: is, changed: true}, why)
		return
	}
	h.mayChange(h.all[i], why)
}

// doubt returns what may become of the requests of a match, with the other rule that has or gets them, and why requests may be cut, "" if
// none is known to be.
func (h *hostPlan) doubt(p *pair, why string) (text, cuts string) {
	f := p.found()
	now := h.c.answer(h.c.is, h.is, nil, f, requestFor(f.Match, h.host), true)
	other, beside := "", now
	if f.Regex == nil && !expressed(f.Match) {
		other = h.beside(p)
	}
	if now.rule == nil || p.has(now.rule, true) { // then what has all other paths
		beside = h.c.answer(h.c.is, h.is, nil, f, anywhere(f.Match, h.host), true)
	}
	if other == "" && beside.rule != nil && !p.has(beside.rule, true) {
		other = beside.by()
	}
	if other == "" {
		other = cmp.Or(h.beside(p), "requests that no rule takes")
	}
	lost := p.is == nil || p.moved // requests to other matches
	before := answer{}
	if p.was != nil {
		before = h.rule(p.was.all[0], p.was, false)
	}
	if lost && before.refused == "" {
		cuts = h.mayLose(p, &now, &other)
	}
	if p.is != nil && cuts == "" {
		mine := h.rule(p.is.all[0], p.is, true)
		if mine.refused != "" && (p.was == nil || p.moved || before.refused == "") {
			cuts = "requests that other matches took may be answered with " + firstWord(mine.refused)
		}
	}
	return "may change: " + p.by() + " and " + other + ": " + why, cuts
}

// beside names another match with an expression that may be for the same requests, "" if there is none.
func (h *hostPlan) beside(p *pair) string {
	for _, o := range h.all {
		if x := o.found().Match; o != p && (x.Regex != nil || expressed(x)) && overlap(x, p.found().Match) {
			return o.by() + " (" + pathText(x) + ")"
		}
	}
	return ""
}

// mayLose returns why requests are cut that a match may have had: nothing else takes them, or a match that is refused, which it names.
func (h *hostPlan) mayLose(p *pair, now *answer, other *string) string {
	if now.refused != "" && (now.rule == nil || !p.has(now.rule, true)) {
		return "requests that no other match takes are answered with " + firstWord(now.refused)
	}
	for _, o := range h.all {
		if o == p || o.is == nil || !overlap(o.is.Match, p.found().Match) {
			continue
		}
		if m, _, _ := both(o.is.Match, p.found().Match, "/"); m == nil {
			continue
		}
		if a := h.rule(o.is.all[0], o.is, true); a.refused != "" {
			*other = o.by() + " (" + pathText(o.is.Match) + ")"
			return "requests may be answered with " + firstWord(a.refused)
		}
	}
	return ""
}

// requestFor returns a request of a match, or, if none was found, one that is as like that as examples go.
func requestFor(m *gateway.Match, host string) *gateway.Request {
	r, ok := requestOf(m, host)
	if !ok && m.Regex != nil {
		r.Path = "/" + other
		if begin := beginning(m); begin != "" {
			r.Path = begin + other
		}
	}
	return r
}

// anywhere returns a request for a path of no rule, with the fields that a match asks for as far as there are examples.
func anywhere(m *gateway.Match, host string) *gateway.Request {
	r, _ := requestOf(m, host)
	r.Path = "/" + other
	return r
}

// expressed reports whether a match asks for fields by expressions.
func expressed(m *gateway.Match) bool {
	is := func(f filter.Match) bool { return f.Regex != nil }
	return slices.ContainsFunc(m.Headers, is) || slices.ContainsFunc(m.Queries, is) || m.Cookie != nil && is(*m.Cookie) ||
		slices.ContainsFunc(m.Call, is)
}
