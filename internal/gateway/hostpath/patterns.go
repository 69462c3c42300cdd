package hostpath

import "strings"

// Patterns are patterns of hosts, to find out whether others have hosts in common with them.
type Patterns struct {
	all map[string]bool
	// below has what follows each dot of a pattern, with the dot.
	below map[string]bool
}

// NewPatterns returns no patterns.
func NewPatterns() *Patterns { return &Patterns{map[string]bool{}, map[string]bool{}} }

// Add adds a pattern.
func (p *Patterns) Add(pattern string) {
	p.all[pattern] = true
	for at := range pattern {
		if pattern[at] == '.' {
			p.below[pattern[at:]] = true
		}
	}
}

// Meets reports whether a pattern has hosts in common with one of them.
func (p *Patterns) Meets(pattern string) bool {
	switch {
	case len(p.all) == 0:
		return false
	case pattern == "" || p.all[""] || p.all[pattern]:
		return true
	}
	rest, wild := strings.CutPrefix(pattern, "*")
	if wild && p.below[rest] {
		return true
	}
	for at := range rest {
		if rest[at] == '.' && at+len(pattern)-len(rest) > 0 && p.all["*"+rest[at:]] {
			return true
		}
	}
	return false
}
