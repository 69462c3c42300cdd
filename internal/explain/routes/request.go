package routes

import (
	"cmp"
	"fmt"
	"net/url"
	"regexp"
	"regexp/syntax"
	"strings"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
)

// other is a part of a path, a host or a name that no rule has.
const other = "fairlead-plan-any"

// request is one that a match takes. It is a gateway.Fields.
type request struct{ headers, queries, cookies map[string]string }

// Header returns the value of a field.
func (r *request) Header(name string) (string, bool) { v, ok := r.headers[name]; return v, ok }

// Cookie returns the value of a cookie.
func (r *request) Cookie(name string) (string, bool) { v, ok := r.cookies[name]; return v, ok }

// Query returns the value of a parameter.
func (r *request) Query(name string) (string, bool) { v, ok := r.queries[name]; return v, ok }

// requestOf returns a request that a match takes, and, if it can be, no match that is more specific. ok is false if none was found, as
// for some regular expressions.
func requestOf(m *gateway.Match, host string) (r *gateway.Request, ok bool) {
	fields := &request{map[string]string{}, map[string]string{}, map[string]string{}}
	ok = true
	put := func(to map[string]string, list ...filter.Match) {
		for i := range list {
			v, found := valueOf(&list[i])
			to[list[i].Name] = v
			ok = ok && found
		}
	}
	put(fields.headers, m.Headers...)
	put(fields.queries, m.Queries...)
	if m.Cookie != nil {
		put(fields.cookies, *m.Cookie)
	}
	path := m.Path
	switch {
	case m.Call != nil:
		service, found := valueOf(&m.Call[0])
		method, also := valueOf(&m.Call[1])
		path, ok = "/"+cmp.Or(service, other)+"/"+cmp.Or(method, other), ok && found && also
	case m.Regex != nil:
		found := false
		path, found = example(m.Regex)
		ok = ok && found
	case m.Begins:
		path += other
	case !m.Exact:
		path += "/" + other
	}
	canonical, plain := hostpath.Path(path)
	return &gateway.Request{Host: hostOf(host), Path: canonical, Method: m.Method, Fields: fields}, ok && plain && canonical == path
}

// hostOf returns a host of a pattern.
func hostOf(pattern string) string {
	if pattern == "" {
		return other + ".invalid"
	}
	return strings.Replace(pattern, "*", other, 1)
}

// valueOf returns a value that a match takes. ok is false if none was found.
func valueOf(m *filter.Match) (value string, ok bool) {
	if m.Regex == nil {
		return m.Value, true
	}
	return example(m.Regex)
}

// example returns a text that an expression takes. ok is false if none was found.
func example(re *regexp.Regexp) (text string, ok bool) {
	tree, err := syntax.Parse(re.String(), syntax.Perl)
	if err != nil {
		return "", false
	}
	var out strings.Builder
	write(&out, tree)
	text = out.String()
	return text, re.MatchString(text)
}

// mostRepeats bounds the work for an expression.
const mostRepeats = 64

// write writes a text that an expression takes: the shortest, but for what must not be at the place.
func write(out *strings.Builder, re *syntax.Regexp) {
	switch re.Op {
	case syntax.OpLiteral:
		out.WriteString(string(re.Rune))
	case syntax.OpCharClass:
		out.WriteRune(letterOf(re.Rune))
	case syntax.OpAnyChar, syntax.OpAnyCharNotNL:
		out.WriteByte('x')
	case syntax.OpCapture, syntax.OpPlus, syntax.OpConcat:
		for _, s := range re.Sub {
			write(out, s)
		}
	case syntax.OpAlternate:
		write(out, re.Sub[0])
	case syntax.OpRepeat:
		for range min(re.Min, mostRepeats) {
			write(out, re.Sub[0])
		}
	}
}

// letterOf returns a character of a class, given by its ranges: a letter or a digit if there is one.
func letterOf(ranges []rune) rune {
	best := rune('x')
	for i := 0; i+1 < len(ranges); i += 2 {
		for _, c := range "a0A-_./" {
			if c >= ranges[i] && c <= ranges[i+1] {
				return c
			}
		}
		if i == 0 {
			best = ranges[0]
		}
	}
	return best
}

// key tells matches apart: two with the same take the same requests.
func key(m *gateway.Match) string {
	return m.Host + "\x00" + matchText(m)
}

// matchText is a match in words, as the part of an address behind the host.
func matchText(m *gateway.Match) string {
	return pathText(m) + withText(m)
}

// withText is what a match asks for beside the path, "" for nothing.
func withText(m *gateway.Match) string {
	var with []string
	if m.Method != "" {
		with = append(with, "method "+m.Method)
	}
	add := func(what string, list ...filter.Match) {
		for i := range list {
			with = append(with, what+" "+list[i].Name+valueText(&list[i]))
		}
	}
	add("header", m.Headers...)
	add("parameter", m.Queries...)
	if m.Cookie != nil {
		add("cookie", *m.Cookie)
	}
	if len(with) > 0 {
		return " with " + strings.Join(with, ", ")
	}
	return ""
}

func valueText(m *filter.Match) string {
	if m.Regex != nil {
		return " matching " + cmp.Or(m.Value, m.Regex.String())
	}
	return "=" + m.Value
}

func pathText(m *gateway.Match) string {
	switch {
	case m.Call != nil:
		part := func(c *filter.Match) string {
			if c.Regex != nil {
				return "{" + c.Value + "}"
			}
			return cmp.Or(c.Value, "*")
		}
		return "/" + part(&m.Call[0]) + "/" + part(&m.Call[1])
	case m.Last:
		return "/ (paths of no rule)"
	case m.Regex != nil:
		return fmt.Sprintf("/ (paths matching %s)", cmp.Or(m.Path, m.Regex.String()))
	case m.Exact:
		return m.Path + " (only this path)"
	case m.Begins:
		return m.Path + "*"
	}
	return cmp.Or(m.Path, "/")
}

// shown is the path of a match for a text, as where a redirect leads.
func shown(m *gateway.Match, r *gateway.Request) string {
	if m.Exact || m.Regex != nil || m.Call != nil {
		return r.Path
	}
	return cmp.Or(m.Path, "/")
}

// hostText is a pattern of hosts in an address.
func hostText(pattern string) string { return cmp.Or(pattern, "*") }

// addressText is a place in words: http://host:port/path.
func addressText(scheme string, port uint16, host, rest string) string {
	if scheme == "" {
		return hostText(host) + rest
	}
	at := (&url.URL{Scheme: scheme}).Scheme + "://" + hostText(host)
	if known := map[string]uint16{"http": 80, "https": 443}[scheme]; port != known {
		at += fmt.Sprintf(":%d", port)
	}
	return at + rest
}
