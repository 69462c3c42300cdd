package hostpath

import (
	"iter"
	"maps"
	"strings"
)

// Host returns the host of a request without its port, in lower case and without a dot at the end.
func Host(host string) string {
	if i := strings.LastIndexByte(host, ':'); i >= 0 && !strings.HasSuffix(host, "]") && strings.IndexByte(host[:i], ':') < 0 {
		host = host[:i]
	} else if i >= 0 && i > 0 && host[i-1] == ']' {
		host = host[:i]
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// All returns the patterns that hostnames are, "" for all hosts if there are none.
func All[T ~string](names []T) (out []string) {
	for _, h := range names {
		out = append(out, strings.ToLower(string(h)))
	}
	if len(out) == 0 {
		out = append(out, "")
	}
	return out
}

// Wide returns the pattern of all hosts with one label in place of the first one of a host, "" if it has only one.
func Wide(host string) string {
	if i := strings.IndexByte(host, '.'); i > 0 {
		return "*" + host[i:]
	}
	return ""
}

// Index finds what belongs to the most specific pattern for a host. Patterns are names, names that begin with "*.",
// and "", which is for every host.
type Index[T any] struct {
	exact    map[string]T
	wildcard map[string]T // by what follows the "*"
	rest     T
	hasRest  bool
	// oneLabel is true if a "*" stands for exactly one label, as in an Ingress.
	oneLabel bool
}

// NewIndex returns an Index of no patterns. With oneLabel a "*" stands for exactly one label, as in an Ingress.
func NewIndex[T any](oneLabel bool) *Index[T] {
	return &Index[T]{exact: map[string]T{}, wildcard: map[string]T{}, oneLabel: oneLabel}
}

// Set maps a pattern to v.
func (x *Index[T]) Set(pattern string, v T) {
	switch {
	case pattern == "":
		x.rest, x.hasRest = v, true
	case strings.HasPrefix(pattern, "*."):
		x.wildcard[pattern[1:]] = v
	default:
		x.exact[pattern] = v
	}
}

// Delete removes a pattern.
func (x *Index[T]) Delete(pattern string) {
	switch {
	case pattern == "":
		var none T
		x.rest, x.hasRest = none, false
	case strings.HasPrefix(pattern, "*."):
		delete(x.wildcard, pattern[1:])
	default:
		delete(x.exact, pattern)
	}
}

// Clone returns an Index that leads to the same.
func (x *Index[T]) Clone() *Index[T] {
	out := *x
	out.exact, out.wildcard = maps.Clone(x.exact), maps.Clone(x.wildcard)
	return &out
}

// Each calls yield for what belongs to the patterns for a host, the most specific first, until it returns false.
func (x *Index[T]) Each(host string, yield func(T) bool) {
	if v, ok := x.exact[host]; ok && !yield(v) {
		return
	}
	if len(x.wildcard) > 0 {
		for at, labels := 0, 0; labels < maxLabels; labels++ {
			i := strings.IndexByte(host[at:], '.')
			if i < 0 || x.oneLabel && labels > 0 {
				break
			}
			if at += i; at > 0 { // the "*" is for one byte at least
				if v, ok := x.wildcard[host[at:]]; ok && !yield(v) {
					return
				}
			}
			at++
		}
	}
	if x.hasRest {
		yield(x.rest)
	}
}

// maxLabels bounds the work for a name: a name of DNS has at most 127 labels.
const maxLabels = 127

// Find returns what belongs to the most specific pattern for a host.
func (x *Index[T]) Find(host string) (v T, ok bool) {
	x.Each(host, func(found T) bool {
		v, ok = found, true
		return false
	})
	return v, ok
}

// Intersect returns the pattern for the hosts that two patterns have in common. ok is false if there are none.
func Intersect(a, b string) (pattern string, ok bool) {
	switch {
	case a == "" || a == b:
		return b, true
	case b == "":
		return a, true
	case covers(a, b):
		return b, true
	case covers(b, a):
		return a, true
	}
	return "", false
}

// covers reports whether a pattern with "*." is for all hosts of another pattern.
func covers(wide, narrow string) bool {
	if !strings.HasPrefix(wide, "*.") {
		return false
	}
	narrow = strings.TrimPrefix(narrow, "*")
	return strings.HasSuffix(narrow, wide[1:]) && len(narrow) >= len(wide)-1 && narrow != strings.TrimPrefix(wide, "*.")
}

// Get returns what belongs to a pattern.
func (x *Index[T]) Get(pattern string) (v T) {
	switch {
	case pattern == "":
		return x.rest
	case strings.HasPrefix(pattern, "*."):
		return x.wildcard[pattern[1:]]
	}
	return x.exact[pattern]
}

// All returns the patterns with what belongs to them, in no order. A nil Index has none.
func (x *Index[T]) All() iter.Seq2[string, T] {
	return func(yield func(string, T) bool) {
		if x == nil || x.hasRest && !yield("", x.rest) {
			return
		}
		for host, v := range x.exact {
			if !yield(host, v) {
				return
			}
		}
		for host, v := range x.wildcard {
			if !yield("*"+host, v) {
				return
			}
		}
	}
}
