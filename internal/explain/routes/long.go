package routes

import (
	"maps"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/gateway/filter"
)

// tooLong is what expressions do not look at (filter.MaxInput).
const tooLong = "more than 4,096 bytes"

// long compares what becomes of long paths at the hosts of Ingresses that get their first expression, or lose their last one: paths that
// expressions do not look at are closed there.
func (s *scene) long() {
	if !s.c.ingress || s.was == nil || s.is == nil {
		return
	}
	for _, host := range slices.Sorted(maps.Keys(s.patterns)) {
		before, had := s.plain(host, false)
		after, has := s.plain(host, true)
		if had == has {
			continue
		}
		text, cuts := "", ""
		for _, f := range append(before, after...) {
			if t, c := s.longer(host, f); text == "" || c != "" {
				text, cuts = t, c
			}
			if cuts != "" {
				break
			}
		}
		s.c.add(addressText(s.scheme(), s.k.Number, host, "/ (paths of "+tooLong+")"), text, cuts)
	}
}

// plain returns the matches of a side for a host that take paths of any length, and whether there is an expression beside them.
func (s *scene) plain(host string, after bool) (out []*found, regex bool) {
	p := s.answering(host, after)
	if p == nil {
		return nil, false
	}
	matches := s.c.was.matches[s.k]
	if after {
		matches = s.c.is.matches[s.k]
	}
	for _, id := range slices.Sorted(maps.Keys(p.ids)) {
		switch f := matches[id]; {
		case f == nil || f.Exact || f.Call != nil:
		case f.Regex != nil:
			regex = true
		default:
			out = append(out, f)
		}
	}
	return out, regex
}

// longer compares the answers to a long path of a match, as differ does.
func (s *scene) longer(host string, f *found) (text, cuts string) {
	m := *f.Match
	m.Host, m.Exact, m.Last, m.Begins = host, true, false, false
	if !f.Begins {
		m.Path = strings.TrimSuffix(m.Path, "/") + "/"
	}
	m.Path += strings.Repeat("x", filter.MaxInput)
	r, ok := requestOf(&m, host)
	if !ok {
		return "", ""
	}
	of := &found{Match: &m}
	a, b := s.c.answer(s.c.was, s.was, nil, of, r, true), s.c.answer(s.c.is, s.is, nil, of, r, true)
	return differ(&a, &b)
}
