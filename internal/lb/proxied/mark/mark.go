// Package mark gives requests the fields by which they are found again, and by which Pods know clients.
package mark

import (
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
)

// Names of fields by which requests are found again in logs.
var (
	requestIDName   = []byte("X-Request-Id")
	traceParentName = []byte("Traceparent")
)

// Marks are what a Service asks for (dialect.Headers).
type Marks struct {
	Underscores            bool // keeps fields whose names have a "_"
	RequestID, TraceParent bool
	ClientCertificate      string // the field for the subject of a client's certificate that was verified, "" for none
}

// Request changes the fields of a request: which names stay, by what it is found again, which is returned if it is asked for, and what
// the Pod gets about the client's certificate in place of what the client says.
func (m *Marks) Request(r *http1.Request, s *tls.ConnectionState) (id string) {
	if m.Underscores {
		for i := range r.Fields {
			if f := &r.Fields[i]; f.Kind == http1.Underscored {
				f.Kind = http1.Other
			}
		}
	}
	if m.RequestID {
		id = RequestID(r)
	}
	if m.TraceParent {
		TraceParent(r)
	}
	if m.ClientCertificate != "" {
		var value []byte
		if subject := Subject(s); subject != "" {
			value = []byte(subject)
		}
		SetField(r, []byte(m.ClientCertificate), value)
	}
	return id
}

// Trailers keeps trailers from the Pod whose names are of fields that Request gives it: some programs merge them.
func (m *Marks) Trailers(trailers []http1.Field) {
	Withhold(trailers, m.ClientCertificate)
	if m.RequestID {
		Withhold(trailers, string(requestIDName))
	}
	if m.TraceParent {
		Withhold(trailers, string(traceParentName))
	}
}

// maxRequestID bounds an identifier that a client has given.
const maxRequestID = 128

// RequestID returns the identifier of a request, which gets one if it has none.
func RequestID(r *http1.Request) string {
	return string(identify(r, requestIDName, isRequestID, func() []byte { return random(16) }))
}

// TraceParent begins a trace with a request that is of none. By https://www.w3.org/TR/trace-context/ what adds no span passes a trace
// on as it is.
func TraceParent(r *http1.Request) { identify(r, traceParentName, isTraceParent, newTraceParent) }

// TraceID returns the ID of the trace that a request is of, 32 hexadecimal digits, "" for none.
func TraceID(r *http1.Request) string {
	for i := range r.Fields {
		if f := &r.Fields[i]; bytes.EqualFold(f.Name, traceParentName) && isTraceParent(f.Value) {
			return string(f.Value[3:35])
		}
	}
	return ""
}

// identify returns the value of a field that a request has once and well, or gives it one.
func identify(r *http1.Request, name []byte, valid func([]byte) bool, made func() []byte) []byte {
	found, times := []byte(nil), 0
	for i := range r.Fields {
		if f := &r.Fields[i]; f.Kind == http1.Other && bytes.EqualFold(f.Name, name) {
			found = f.Value
			times++
		}
	}
	if times == 1 && valid(found) {
		return found
	}
	value := made()
	SetField(r, name, value)
	return value
}

// SetField makes a request have a field once, and none of its spellings that a program may take for it.
func SetField(r *http1.Request, name, value []byte) {
	for i := range r.Fields {
		if f := &r.Fields[i]; Alike(f.Name, name) {
			f.Kind = http1.Named // is not passed on
		}
	}
	if value != nil {
		r.Fields = append(r.Fields, http1.Field{Name: name, Value: value})
	}
}

// Withhold keeps trailers of a name from the Pod. "" is no name.
func Withhold(trailers []http1.Field, name string) {
	for i := range trailers {
		if f := &trailers[i]; name != "" && Alike(f.Name, []byte(name)) {
			f.Kind = http1.Named // is not passed on
		}
	}
}

// Alike reports whether programs that get names as variables (CGI, WSGI) take one for the other.
func Alike(a, b []byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		x, y := a[i], b[i]
		if x == '_' {
			x = '-'
		}
		if y == '_' {
			y = '-'
		}
		if x|0x20 != y|0x20 || x == '-' != (y == '-') {
			return false
		}
	}
	return true
}

func isRequestID(b []byte) bool {
	for _, c := range b {
		if c <= ' ' || c >= 0x7f || c == '"' || c == '\\' {
			return false
		}
	}
	return len(b) > 0 && len(b) <= maxRequestID
}

// isTraceParent reports whether b is VERSION-TRACE-SPAN-FLAGS; versions after 00 may have more.
func isTraceParent(b []byte) bool {
	const size = 55
	if len(b) < size || len(b) > maxRequestID || string(b[:2]) == "00" && len(b) > size || string(b[:2]) == "ff" ||
		len(b) > size && b[size] != '-' {
		return false
	}
	for i, c := range b[:size] {
		dash := i == 2 || i == 35 || i == 52
		if dash != (c == '-') || !dash && (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	zero := func(b []byte) bool { return len(bytes.Trim(b, "0")) == 0 }
	return !zero(b[3:35]) && !zero(b[36:52])
}

// newTraceParent begins a trace; that it is recorded others decide.
func newTraceParent() []byte {
	out := append([]byte("00-"), random(16)...)
	out = append(append(out, '-'), random(8)...)
	return append(out, "-00"...)
}

// random returns n random bytes in hexadecimal digits.
func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return hex.AppendEncode(nil, b)
}

// maxSubject bounds the subject of a certificate that is passed on.
const maxSubject = 1024

// Subject returns the subject of the certificate of a client that was verified, as RFC 4514 writes it, in printable ASCII, ""
// without one.
func Subject(s *tls.ConnectionState) string {
	if len(s.VerifiedChains) == 0 || len(s.PeerCertificates) == 0 {
		return ""
	}
	text := s.PeerCertificates[0].Subject.String()
	var out strings.Builder
	for i := range len(text) {
		if c := text[i]; c < ' ' || c >= 0x7f {
			fmt.Fprintf(&out, `\%02X`, c)
		} else {
			out.WriteByte(c)
		}
	}
	if text = out.String(); len(text) > maxSubject { // a part of a name is another name
		return "too-long"
	}
	return text
}
