package filter

import (
	"fmt"
	"slices"
	"strings"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// Modifier changes header fields: it removes, then sets, then adds. Names are as they were written; they are compared
// without regard to case.
type Modifier struct {
	Set, Add []Field
	Remove   []string
}

// Field is a header field.
type Field struct{ Name, Value string }

// Empty reports whether a modifier changes nothing.
func (m *Modifier) Empty() bool { return len(m.Set)+len(m.Add)+len(m.Remove) == 0 }

// framing are the fields by which messages and connections are told apart, or which the load balancer sets: no rule may
// change them.
var framing = []string{
	"connection", "content-length", "host", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect",
	"x-forwarded-for", "x-forwarded-proto", "x-forwarded-port",
}

// ValidField reports whether a rule may set a field. The definitions of the kinds do not look at values: one with a line
// break would begin another field, or another message.
func ValidField(name, value string) bool {
	if name == "" || slices.Contains(framing, strings.ToLower(name)) {
		return false
	}
	for _, c := range []byte(name) {
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`"(),/:;<=>?@[\]{}`, c) >= 0 {
			return false
		}
	}
	for _, c := range []byte(value) {
		if c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// ReadModifier reads a change of header fields. wrong names the first invalid field.
func ReadModifier(spec *gwv1.HTTPHeaderFilter) (m Modifier, wrong string) {
	fail := func(field string, i int, more string) {
		if wrong == "" {
			wrong = fmt.Sprintf("%s[%d]: want the name of a field that belongs to no connection%s", field, i, more)
		}
	}
	read := func(field string, list []gwv1.HTTPHeader) (out []Field) {
		for i, h := range list {
			if !ValidField(string(h.Name), h.Value) {
				fail(field, i, ", and a value of one line")
			}
			out = append(out, Field{string(h.Name), h.Value})
		}
		return out
	}
	m.Set, m.Add = read("set", spec.Set), read("add", spec.Add)
	for i, name := range spec.Remove {
		if !ValidField(name, "x") {
			fail("remove", i, "")
		}
		m.Remove = append(m.Remove, name)
	}
	return m, wrong
}
