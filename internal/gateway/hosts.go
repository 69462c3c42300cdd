package gateway

import (
	"strings"
)

// CanonicalHost returns the host of a request without its port, in lower case and without a dot at the end.
func CanonicalHost(host string) string {
	if i := strings.LastIndexByte(host, ':'); i >= 0 && !strings.HasSuffix(host, "]") && strings.IndexByte(host[:i], ':') < 0 {
		host = host[:i]
	} else if i >= 0 && i > 0 && host[i-1] == ']' {
		host = host[:i]
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// hostIndex finds what belongs to the most specific pattern for a host. Patterns are names, names that begin with "*.",
// and "", which is for every host.
type hostIndex[T any] struct {
	exact    map[string]T
	wildcard map[string]T // by what follows the "*"
	rest     T
	hasRest  bool
	// oneLabel is true if a "*" stands for exactly one label, as in an Ingress.
	oneLabel bool
}

func newHostIndex[T any](oneLabel bool) *hostIndex[T] {
	return &hostIndex[T]{exact: map[string]T{}, wildcard: map[string]T{}, oneLabel: oneLabel}
}

func (x *hostIndex[T]) set(pattern string, v T) {
	switch {
	case pattern == "":
		x.rest, x.hasRest = v, true
	case strings.HasPrefix(pattern, "*."):
		x.wildcard[pattern[1:]] = v
	default:
		x.exact[pattern] = v
	}
}

// each calls yield for what belongs to the patterns for a host, the most specific first, until it returns false.
func (x *hostIndex[T]) each(host string, yield func(T) bool) {
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

// find returns what belongs to the most specific pattern for a host.
func (x *hostIndex[T]) find(host string) (v T, ok bool) {
	x.each(host, func(found T) bool {
		v, ok = found, true
		return false
	})
	return v, ok
}

// intersectHosts returns the pattern for the hosts that two patterns have in common. ok is false if there are none.
func intersectHosts(a, b string) (pattern string, ok bool) {
	switch {
	case a == "" || a == b:
		return b, true
	case b == "":
		return a, true
	case coversHost(a, b):
		return b, true
	case coversHost(b, a):
		return a, true
	}
	return "", false
}

// coversHost reports whether a pattern with "*." is for all hosts of another pattern.
func coversHost(wide, narrow string) bool {
	if !strings.HasPrefix(wide, "*.") {
		return false
	}
	narrow = strings.TrimPrefix(narrow, "*")
	return strings.HasSuffix(narrow, wide[1:]) && len(narrow) >= len(wide)-1 && narrow != strings.TrimPrefix(wide, "*.")
}

// get returns what belongs to a pattern.
func (x *hostIndex[T]) get(pattern string) (v T) {
	switch {
	case pattern == "":
		return x.rest
	case strings.HasPrefix(pattern, "*."):
		return x.wildcard[pattern[1:]]
	}
	return x.exact[pattern]
}
