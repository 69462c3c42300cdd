package http1

import (
	"bytes"
	"net/url"
)

// Request is the head of a request.
type Request struct {
	head
	Method []byte
	// Target is what a server is asked for, in origin form ("/path?query") or "*"; of CONNECT it is as it was sent.
	Target []byte
	// Host is that of the target, if it has one, else of the field; it may be empty.
	Host []byte
	// Continue reports whether the client waits for 100 before it sends the body. Expectation is any other one.
	Continue, Expectation bool
	// Trailers reports whether the client takes trailers (TE), and Announced whether it announces some.
	Trailers, Announced bool

	hosts int
}

// Reset prepares for another request.
func (r *Request) Reset() { *r = Request{head: r.head}; r.reset() }

// Clone returns a copy that shares no bytes with r. It asks for no other protocol, and has no body until Length is set.
func (r *Request) Clone() *Request {
	c := &Request{Method: bytes.Clone(r.Method), Target: bytes.Clone(r.Target), Host: bytes.Clone(r.Host), Trailers: r.Trailers}
	c.Minor = r.Minor
	for _, f := range r.Fields {
		c.Fields = append(c.Fields, Field{bytes.Clone(f.Name), bytes.Clone(f.Value), f.Kind})
	}
	return c
}

// Parse reads the head of a request at the beginning of b, which is the same as at the last call and what came since.
// It returns how many bytes it has, 0 if it is not whole yet. What it finds is part of b.
func (r *Request) Parse(b []byte) (int, error) {
	n, err := r.end(b, true)
	if n == 0 || err != nil {
		return 0, err
	}
	text, rest := line(b[:n])
	if err := r.requestLine(text); err != nil {
		return 0, err
	}
	if err := r.fields(rest); err != nil {
		return 0, err
	}
	if r.lengths > 1 {
		return 0, ErrMalformed
	}
	for i := range r.Fields {
		r.note(&r.Fields[i])
	}
	if r.hosts > 1 || r.hosts == 0 && r.Minor == 1 || !all(r.Host, hostByte) {
		return 0, ErrMalformed
	}
	return n, r.target()
}

func (r *Request) requestLine(text []byte) error {
	const version = "HTTP/1.1"
	method, rest, ok := bytes.Cut(text, blank)
	if !ok || len(method) == 0 || !all(method, tokenByte) {
		return ErrMalformed
	}
	target, proto, ok := bytes.Cut(rest, blank)
	if !ok || len(target) == 0 || !all(target, targetByte) || len(proto) != len(version) || string(proto[:7]) != version[:7] {
		return ErrMalformed
	}
	switch proto[7] {
	case '0':
	case '1':
		r.Minor = 1
	default:
		return ErrMalformed
	}
	r.Method, r.Target = method, target
	return nil
}

var blank = []byte{' '}

// note takes a field of a request into account.
func (r *Request) note(f *Field) {
	switch f.Kind {
	case Host:
		r.hosts++
		r.Host = f.Value
	case Expect:
		if equalFold(f.Value, "100-continue") {
			r.Continue = r.Minor == 1 && (r.Chunked || r.Length > 0)
			r.Expectation = r.Expectation || r.Minor == 0
		} else if len(f.Value) > 0 {
			r.Expectation = true
		}
	case TE:
		for word := range bytes.SplitSeq(f.Value, comma) {
			r.Trailers = r.Trailers || equalFold(trim(word), "trailers")
		}
	case Trailer:
		r.Announced = r.Announced || len(f.Value) > 0
	case Other:
		if bytes.IndexByte(f.Name, '_') >= 0 {
			f.Kind = Underscored
		}
	}
}

// target brings the target into origin form, as package net/url writes it.
func (r *Request) target() error {
	if string(r.Method) == "CONNECT" || plain(r.Target) {
		return nil
	}
	u, err := url.ParseRequestURI(string(r.Target))
	if err != nil || u.Opaque != "" {
		return ErrMalformed
	}
	if u.Host != "" {
		r.Host = []byte(u.Host)
	}
	if r.Target = []byte(u.RequestURI()); !all(r.Host, hostByte) || !all(r.Target, targetByte) {
		return ErrMalformed
	}
	return nil
}

// plain reports whether a target is in origin form, and written as net/url would write it.
func plain(b []byte) bool {
	if b[0] != '/' {
		return false
	}
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case classes[c]&pathByte != 0:
		case c == '?':
			return true
		case c == '%' && i+2 < len(b) && classes[b[i+1]]&classes[b[i+2]]&digitByte != 0:
			i += 2
		default:
			return false
		}
	}
	return true
}

// Persists reports whether the client's connection may have another request after this one.
func (r *Request) Persists() bool { return !r.Close && (r.Minor == 1 || r.KeepAlive) }

// Body returns what follows the head.
func (r *Request) Body() Body {
	switch {
	case r.Chunked:
		return Body{kind: chunked, strict: true}
	case r.Length > 0:
		return Body{kind: sized, left: uint64(r.Length)}
	}
	return Body{}
}

// Idempotent reports whether the request may be sent again (RFC 9110, section 9.2.2).
func (r *Request) Idempotent() bool {
	switch string(r.Method) {
	case "GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE":
		return true
	}
	for _, f := range r.Fields {
		if equalFold(f.Name, "idempotency-key") || equalFold(f.Name, "x-idempotency-key") {
			return true
		}
	}
	return false
}
