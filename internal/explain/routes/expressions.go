package routes

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
)

// Bounds for a host: of the requests that are examples, and of the lines about matches that may change.
const (
	mostAsked  = 20_000
	mostDoubts = 20
)

// explore compares the hosts at which several matches can be for one request, if one of these changes. One example of each match does
// not tell all: an expression takes some paths of a prefix, or of another expression, and fields of two matches can be in one request.
// Where the examples are not complete, it adds what may change.
func (s *scene) explore() {
	c := s.c
	if s.was == nil || s.is == nil {
		return
	}
	for _, host := range slices.Sorted(maps.Keys(s.patterns)) {
		if c.work.over() {
			return
		}
		l := s.was.ListenerFor(hostOf(host))
		if l == nil || c.closing[l] && s.is.ListenerFor(hostOf(host)) == nil {
			continue
		}
		if all := s.at(host); slices.ContainsFunc(all, (*pair).unlike) {
			s.host(host, all)
		}
	}
}

// scene is what a port has before and after the change.
type scene struct {
	c        *comparison
	k        gateway.PortKey
	was, is  *gateway.Port
	patterns map[string]*pattern
}

// newScene returns what a port has. was or is is nil if it does not exist then.
func (c *comparison) newScene(k gateway.PortKey, was, is *gateway.Port) *scene {
	s := &scene{c: c, k: k, was: was, is: is, patterns: map[string]*pattern{}}
	for _, side := range []*side{c.was, c.is} {
		for id, f := range side.matches[k] {
			if f.mode == gateway.Requests {
				s.put(id, f, side == c.is)
			}
		}
	}
	return s
}

// pattern is what a pattern of hosts has.
type pattern struct {
	ids           map[string]bool
	before, after bool // which side has one of these
	// several is set if several of its matches can be for one request otherwise than by the length of their paths.
	several bool
	// pairs are made when they are needed.
	pairs []*pair
}

// pair is a match before and after the change. One of these may be nil.
type pair struct {
	was, is *found
	// changed is set if it comes, goes or leads elsewhere, and moved if the order of it and another match is not the same any more.
	changed, moved bool
}

func (p *pair) unlike() bool { return p.changed || p.moved }

// found returns the match as it will be, or as it was if it goes.
func (p *pair) found() *found {
	if p.is != nil {
		return p.is
	}
	return p.was
}

// has reports whether a rule of a side is one of the match there.
func (p *pair) has(r *gateway.Rule, after bool) bool {
	f := p.was
	if after {
		f = p.is
	}
	return f != nil && slices.ContainsFunc(f.all, func(o *gateway.Rule) bool { return same(o, r) })
}

// by names the first rule of the match. The rules of a route have other numbers after the change.
func (p *pair) by() string {
	text := (&answer{rule: p.found().all[0]}).by()
	if p.is == nil {
		text = strings.Replace(text, ", rules[", ", former rules[", 1)
	}
	return text
}

func (s *scene) put(id string, f *found, after bool) {
	p := s.patterns[f.Host]
	if p == nil {
		p = &pattern{ids: map[string]bool{}}
		s.patterns[f.Host] = p
	}
	p.ids[id], p.after, p.before = true, p.after || after, p.before || !after
	p.several = p.several || f.Regex != nil && f.Call == nil || f.fielded()
}

// fielded reports whether a match asks for more than the path.
func (f *found) fielded() bool {
	return f.Method != "" || len(f.Headers)+len(f.Queries) > 0 || f.Cookie != nil
}

// of returns the matches of a pattern.
func (s *scene) of(host string) []*pair {
	p := s.patterns[host]
	if p.pairs != nil {
		return p.pairs
	}
	for _, id := range slices.Sorted(maps.Keys(p.ids)) {
		p.pairs = append(p.pairs, s.pairOf(s.c.was.matches[s.k][id], s.c.is.matches[s.k][id]))
	}
	move(p.pairs)
	return p.pairs
}

func (s *scene) pairOf(was, is *found) *pair {
	return &pair{was: was, is: is, changed: was == nil || is == nil || !s.sameRules(was, is)}
}

// at returns the matches that can be for requests of a host, nil if one example of each match is enough.
func (s *scene) at(host string) (out []*pair) {
	if s.c.ingress {
		was, is := s.answering(host, false), s.answering(host, true)
		switch {
		case (was == nil || !was.several) && (is == nil || !is.several):
			return nil
		case was == is:
			return s.of(host)
		}
		return s.moving(was, is)
	}
	several := false
	for wide := range wider(host) {
		if p := s.patterns[wide]; p != nil {
			several = several || p.several
		}
	}
	if !several {
		return nil
	}
	for wide := range wider(host) {
		if s.patterns[wide] != nil {
			out = append(out, s.of(wide)...)
		}
	}
	return out
}

// wider yields the patterns that have all hosts of a pattern, itself first.
func wider(host string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		if !yield(host) {
			return
		}
		for rest := strings.TrimPrefix(host, "*."); rest != ""; {
			_, after, more := strings.Cut(rest, ".")
			if rest != host && "*."+rest != host && !yield("*."+rest) {
				return
			}
			if rest = after; !more {
				break
			}
		}
		if host != "" {
			yield("")
		}
	}
}

// answering returns the pattern of Ingresses whose matches are for the requests of a host at a side, nil if there is none.
func (s *scene) answering(host string, after bool) *pattern {
	for _, of := range []string{host, hostpath.Wide(host), ""} {
		if p := s.patterns[of]; p != nil && (p.after && after || p.before && !after) {
			return p
		}
	}
	return nil
}

// moving returns the matches of Ingresses for a host that comes or goes beside a wider pattern. was or is may be nil.
func (s *scene) moving(was, is *pattern) (out []*pair) {
	of := func(p *pattern, matches map[string]*found) map[string]*found {
		all := map[string]*found{}
		if p != nil {
			for id := range p.ids {
				if f := matches[id]; f != nil {
					all[matchText(f.Match)] = f
				}
			}
		}
		return all
	}
	before, after := of(was, s.c.was.matches[s.k]), of(is, s.c.is.matches[s.k])
	all := maps.Clone(before)
	maps.Copy(all, after)
	for _, text := range slices.Sorted(maps.Keys(all)) {
		out = append(out, s.pairOf(before[text], after[text]))
	}
	move(out)
	return out
}

// move marks the matches that come before another one, and came after it, where that decides.
func move(all []*pair) {
	classes := map[string][]*pair{}
	for _, p := range all {
		if p.was != nil && p.is != nil {
			class := p.is.class()
			classes[class] = append(classes[class], p)
		}
	}
	for _, list := range classes {
		slices.SortStableFunc(list, func(a, b *pair) int { return a.is.compare(b.is) })
		before := slices.SortedStableFunc(slices.Values(list), func(a, b *pair) int { return a.was.compare(b.was) })
		place := map[*pair]int{}
		for i, p := range before {
			place[p] = i
		}
		for last, i := -1, 0; i < len(list); i++ {
			p := list[i]
			p.moved = place[p] < last
			last = max(last, place[p])
		}
		for first, i := len(list), len(list)-1; i >= 0; i-- {
			p := list[i]
			p.moved = p.moved || place[p] > first
			first = min(first, place[p])
		}
	}
}

// class is what decides before age, name and place do: of two matches with the same, compare tells which one has a request.
func (f *found) class() string {
	path := "path " + pathText(f.Match)
	switch {
	case f.Call != nil:
		path = fmt.Sprint("call ", len(f.Call[0].Value), len(f.Call[1].Value))
	case f.Regex != nil, f.Begins:
		path = fmt.Sprint("expression ", len(f.Path))
	}
	return fmt.Sprint(path, "|", f.Method != "", len(f.Headers), len(f.Queries), f.Cookie != nil)
}

func (f *found) compare(o *found) int {
	a, b := f.all[0], o.all[0]
	return cmp.Or(a.Route.Compare(b.Route), cmp.Compare(a.Index, b.Index), cmp.Compare(f.place, o.place))
}

// sameRules reports whether the rules of a match do the same on both sides.
func (s *scene) sameRules(a, b *found) bool {
	return slices.EqualFunc(a.all, b.all, func(x, y *gateway.Rule) bool {
		p, q := s.rule(x, a, false), s.rule(y, a, true)
		text, _ := differ(&p, &q)
		return text == "" && x.Route.Compare(y.Route) == 0
	})
}

// rule returns what a rule of a side makes of the requests of a match.
func (s *scene) rule(r *gateway.Rule, f *found, after bool) answer {
	port, of := s.was, s.c.was
	if after {
		port, of = s.is, s.c.is
	}
	if port == nil {
		return answerOf(nil, nil)
	}
	return answerOf(r, &place{tls: port.TLS, port: port.Number, host: f.Host, path: f.Path, unreached: of.unreached, passwords: of.passwords})
}

// host compares the requests of a host.
func (s *scene) host(host string, all []*pair) {
	h := &hostPlan{scene: s, host: host, all: all, seen: map[string]bool{}, unknown: map[*pair]bool{}, left: mostOfHost}
	paths, complete := h.examples()
	for _, path := range paths {
		if !h.path(path) {
			break
		}
	}
	for _, p := range all {
		f := p.found()
		switch {
		case !p.unlike():
		case h.stopped:
			h.mayChange(p, "there are too many requests to ask for")
		case h.unknown[p]:
			h.mayChange(p, "no example was found of what it takes")
		case p.moved && expressed(f.Match):
			h.mayChange(p, "an example does not tell of all values that it takes")
		case !complete && !f.Exact && (f.Regex != nil || slices.ContainsFunc(all, func(o *pair) bool {
			return o.found().Regex != nil && overlap(o.found().Match, f.Match)
		})):
			h.mayChange(p, "which paths they share is not known")
		}
	}
	if h.doubts > mostDoubts {
		s.c.add(addressText(s.scheme(), s.k.Number, host, ""), fmt.Sprintf("may change: as above for %d more matches", h.doubts-mostDoubts),
			h.doubtful)
	}
}

// scheme is the one of requests at the port, "" for a Gateway that is not known.
func (s *scene) scheme() string {
	switch {
	case s.c.assumed:
		return ""
	case s.is.TLS:
		return "https"
	}
	return "http"
}

// hostPlan compares the requests of a host.
type hostPlan struct {
	*scene
	host string
	all  []*pair
	// seen are the requests that were asked for, and stopped is set if there are too many.
	seen    map[string]bool
	stopped bool
	// left is the work that is left to ask.
	left int
	// unknown are the matches of which some requests have no example.
	unknown map[*pair]bool
	// users is how many instructions the expressions of paths have.
	users int
	// doubts counts the lines of what may change, and doubtful is why some of these cut, "" if none does.
	doubts   int
	doubtful string
}

// walked is what an explorer has found.
type walked struct {
	paths    []string
	complete bool
	users    int
}

// examples returns paths for which different matches are, and whether they are all.
func (h *hostPlan) examples() (out []string, complete bool) {
	var list []*gateway.Match
	var texts []string
	regex := false
	seen := map[string]bool{}
	add := func(path string) {
		if canonical, ok := hostpath.Path(path); ok && canonical == path && !seen[path] {
			seen[path] = true
			out = append(out, path)
		}
	}
	add("/" + other)
	for _, p := range h.all {
		m := p.found().Match
		list, texts, regex = append(list, m), append(texts, expressionOf(m)), regex || m.Regex != nil
		if m.Regex == nil && m.Call == nil {
			add(cmp.Or(m.Path, "/"))
			add(m.Path + other)
			add(m.Path + "/" + other)
		}
		if m.Call != nil {
			if r, ok := requestOf(m, h.host); ok {
				add(r.Path)
			}
		}
	}
	if !regex {
		return out, true
	}
	slices.Sort(texts)
	id := strings.Join(slices.Compact(texts), "\x00")
	w, known := h.c.walks[id]
	if !known {
		e := newExplorer(list, h.c.work)
		w = &walked{users: e.users}
		w.paths, w.complete = e.paths()
		h.c.walks[id] = w
	}
	h.users = w.users
	for _, path := range w.paths {
		add(path)
	}
	return out, w.complete
}

// path compares the answers for a path. The first match that takes a request decides, so it is enough to ask with the fields of a match
// that changes and of one other match. It reports whether all was asked: the number of questions is limited.
func (h *hostPlan) path(path string) bool {
	var takers []*pair
	some := false
	if !h.spend(len(h.all) + h.users*len(path)) {
		return false
	}
	for _, p := range h.all {
		if takesPath(p.found().Match, path) {
			takers = append(takers, p)
			some = some || p.unlike()
		}
	}
	if !some {
		return true
	}
	for _, p := range takers {
		if !p.unlike() {
			continue
		}
		for _, o := range takers {
			if !h.spend(1) {
				return false
			}
			m, cookies, ok := both(p.found().Match, o.found().Match, path)
			if m == nil {
				continue // no request has the fields of both
			}
			m.Host = h.host
			id := matchText(m)
			if ok && h.seen[id] {
				continue
			}
			h.seen[id] = true
			r, found := requestOf(m, h.host)
			for _, f := range cookies {
				r.Fields.(*request).cookies[f.Name] = f.Value
			}
			if !ok || !found {
				h.unknown[p] = true
				continue
			}
			if !h.spend(2*h.users*len(path)) || len(h.seen) > mostAsked {
				h.stopped = true
				return false
			}
			h.example(m, r)
		}
	}
	return true
}

// spend takes work, and notes if so much was not left.
func (h *hostPlan) spend(n int) bool {
	h.left -= n
	h.stopped = h.stopped || !h.c.work.take(n) || h.left < 0
	return !h.stopped
}

// ruled is a rule of a side.
type ruled struct {
	rule  *gateway.Rule
	after bool
}

// example compares what becomes of a request for an example. It adds nothing that is known of the host.
func (h *hostPlan) example(m *gateway.Match, r *gateway.Request) {
	c, f := h.c, &found{Match: m}
	a, b := c.answer(c.was, h.was, nil, f, r, true), c.answer(c.is, h.is, nil, f, r, true)
	text, cuts := differ(&a, &b)
	if text == "" || c.knows(h.host, r, text, cuts) {
		return
	}
	by := []ruled{{b.rule, true}, {a.rule, false}}
	if b.rule == nil || a.rule != nil && b.refused != "" {
		slices.Reverse(by)
	}
	for _, try := range []struct {
		ruled
		regex bool
	}{{by[0], true}, {by[1], true}, {by[0], false}} { // an expression tells more than a prefix
		for _, o := range h.all {
			x := o.found().Match
			if try.rule == nil || !o.has(try.rule, try.after) || (x.Regex != nil) != try.regex || x.Exact || x.Call != nil || !takes(x, r) {
				continue
			}
			named := *x
			named.Host = h.host
			where := c.where(h.k, &found{Match: &named}, h.was, h.is) + ", as " + r.Path
			if with := withText(m); with != withText(&named) {
				where += with
			}
			named.Method, named.Headers, named.Queries, named.Cookie = m.Method, m.Headers, m.Queries, m.Cookie
			c.addAt(h.host, where, text, cuts, &named)
			return
		}
	}
	c.addAt(h.host, c.where(h.k, f, h.was, h.is), text, cuts, m)
}

// addAt adds a change at a host, and notes for which match it is.
func (c *comparison) addAt(host, where, text, cuts string, m *gateway.Match) {
	if text == "" {
		return
	}
	if c.told[host] == nil {
		c.told[host] = map[Change][]*gateway.Match{}
	}
	same := Change{Text: text, Cuts: cuts}
	c.told[host][same] = append(c.told[host][same], m)
	c.add(where, text, cuts)
}

// knows reports whether what becomes of a request was told of a match that is for it.
func (c *comparison) knows(host string, r *gateway.Request, text, cuts string) bool {
	return slices.ContainsFunc(c.told[host][Change{Text: text, Cuts: cuts}], func(m *gateway.Match) bool { return takes(m, r) })
}

// same reports whether two rules of one side are the same one.
func same(a, b *gateway.Rule) bool { return a.Route.Compare(b.Route) == 0 && a.Index == b.Index }
