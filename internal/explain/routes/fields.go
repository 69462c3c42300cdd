package routes

import (
	"regexp/syntax"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/filter"
)

// both returns a match for one path with the fields that two matches ask for, nil if no request has these. ok is false if that is not
// known. A match has one cookie: more are the other ones, which are also in the header of cookies.
func both(a, b *gateway.Match, path string) (m *gateway.Match, more []filter.Match, ok bool) {
	m = &gateway.Match{Rule: a.Rule, Path: path, Exact: true, Method: a.Method}
	if b.Method != "" {
		if m.Method != "" && m.Method != b.Method {
			return nil, nil, true
		}
		m.Method = b.Method
	}
	cookies := func(m *gateway.Match) []filter.Match {
		if m.Cookie == nil {
			return nil
		}
		return []filter.Match{*m.Cookie}
	}
	var can, known [3]bool
	var cookie []filter.Match
	m.Headers, can[0], known[0] = merge(a.Headers, b.Headers)
	m.Queries, can[1], known[1] = merge(a.Queries, b.Queries)
	cookie, can[2], known[2] = merge(cookies(a), cookies(b))
	if can != [3]bool{true, true, true} {
		return nil, nil, true
	}
	if len(cookie) > 0 {
		m.Cookie, more = &cookie[0], cookie[1:]
	}
	ok = known == [3]bool{true, true, true}
	for i := range more {
		value, found := valueOf(&more[i])
		more[i] = filter.Match{Name: more[i].Name, Value: value}
		m.Headers, ok = append(m.Headers, filter.Match{Name: "cookie", Value: more[i].Name + "=" + value}), ok && found
	}
	return m, more, ok
}

// merge returns the fields of two lists. can is false if no request has all of them, and known if that is not known.
func merge(a, b []filter.Match) (out []filter.Match, can, known bool) {
	out, known = slices.Clone(a), true
	for _, f := range b {
		i := slices.IndexFunc(out, func(o filter.Match) bool { return o.Name == f.Name })
		if i < 0 {
			out = append(out, f)
			continue
		}
		one, other := out[i], f
		if one.Regex != nil && other.Regex == nil {
			one, other = other, one
		}
		value, ok := valueOf(&one)
		switch {
		case valueText(&one) == valueText(&other):
		case ok && other.Takes(value, true):
			out[i] = one
		case one.Regex == nil:
			return nil, false, true
		default:
			value, ok = valueOf(&other)
			known = known && ok && one.Takes(value, true)
			out[i] = other
		}
	}
	return out, true, known
}

// takes reports whether a match is for a request.
func takes(m *gateway.Match, r *gateway.Request) bool {
	if m.Method != "" && m.Method != r.Method || !takesPath(m, r.Path) {
		return false
	}
	all := func(list []filter.Match, value func(string) (string, bool)) bool {
		for i := range list {
			if !list[i].Takes(value(list[i].Name)) {
				return false
			}
		}
		return true
	}
	return all(m.Headers, r.Fields.Header) && all(m.Queries, r.Fields.Query) &&
		(m.Cookie == nil || m.Cookie.Takes(r.Fields.Cookie(m.Cookie.Name)))
}

// takesPath reports whether a match is for a path, whatever fields it asks for.
func takesPath(m *gateway.Match, path string) bool {
	switch {
	case m.Call != nil:
		service, method, ok := filter.SplitCall(path)
		part := func(f *filter.Match, value string) bool {
			return f.Regex == nil && f.Value == "" || f.Takes(value, true)
		}
		return ok && part(&m.Call[0], service) && part(&m.Call[1], method)
	case m.Last:
		return true
	case m.Regex != nil:
		return len(path) <= filter.MaxInput && m.Regex.MatchString(path)
	case m.Exact:
		return path == m.Path
	case m.Begins:
		return strings.HasPrefix(path, m.Path)
	}
	prefix := strings.TrimSuffix(m.Path, "/")
	return strings.HasPrefix(path, prefix) && (len(path) == len(prefix) || path[len(prefix)] == '/')
}

// beginning returns the text that the paths of a match begin with.
func beginning(m *gateway.Match) string {
	if m.Regex == nil {
		return strings.TrimSuffix(m.Path, "/")
	}
	tree, err := syntax.Parse(m.Regex.String(), syntax.Perl)
	if err != nil {
		return ""
	}
	var out strings.Builder
	if anchored, _ := literal(&out, tree); !anchored {
		return ""
	}
	return out.String()
}

// literal writes the text that an expression begins with. anchored is set if it is for the beginning of a path, and whole if the expression
// is for nothing else.
func literal(out *strings.Builder, re *syntax.Regexp) (anchored, whole bool) {
	switch re.Op {
	case syntax.OpBeginText, syntax.OpBeginLine:
		return true, true
	case syntax.OpLiteral:
		out.WriteString(string(re.Rune))
		return false, true
	case syntax.OpCapture, syntax.OpConcat:
		for _, s := range re.Sub {
			at, all := literal(out, s)
			anchored = anchored || at
			if !all {
				return anchored, false
			}
		}
		return anchored, true
	}
	return false, re.Op == syntax.OpEmptyMatch
}

// overlap reports whether there may be a path that two matches are for. It is false only if there is none.
func overlap(a, b *gateway.Match) bool {
	if a.Call != nil || b.Call != nil || a.Last || b.Last {
		return true
	}
	switch {
	case a.Exact:
		return takesPath(b, a.Path)
	case b.Exact:
		return takesPath(a, b.Path)
	}
	x, y := strings.ToLower(beginning(a)), strings.ToLower(beginning(b)) // expressions of Ingresses take both
	return strings.HasPrefix(x, y) || strings.HasPrefix(y, x)
}
