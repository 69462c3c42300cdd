package http2

import (
	"bytes"

	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
)

// keep copies the text of a block, so that its fields outlive it. Earlier copies stay valid. The caller holds mu.
func (s *Stream) keep(b *block) {
	at := len(s.arena)
	s.arena = append(s.arena, b.text...)
	rest := s.arena[at:]
	for i := range b.fields {
		f := &b.fields[i]
		n, v := len(f.Name), len(f.Value)
		f.Name, f.Value, rest = rest[:n:n], rest[n:n+v:n+v], rest[n+v:]
	}
}

// pseudo are the fields of a message's first line: RFC 9113, section 8.3, and RFC 8441, section 4.
type pseudo struct{ method, scheme, authority, path, protocol, status []byte }

// slot returns where a field belongs, nil for one that is unknown.
func (p *pseudo) slot(name string) *[]byte {
	switch name {
	case ":method":
		return &p.method
	case ":scheme":
		return &p.scheme
	case ":authority":
		return &p.authority
	case ":path":
		return &p.path
	case ":protocol":
		return &p.protocol
	case ":status":
		return &p.status
	}
	return nil
}

// split takes the fields of the first line from the others. It reports false if the message is malformed: RFC 9113, sections
// 8.1 to 8.3.
func split(fields []http1.Field) (p pseudo, rest []http1.Field, ok bool) {
	n := 0
	for ; n < len(fields) && len(fields[n].Name) > 0 && fields[n].Name[0] == ':'; n++ {
		to := p.slot(string(fields[n].Name))
		if to == nil || *to != nil {
			return p, nil, false
		}
		if *to = fields[n].Value; len(*to) == 0 && string(fields[n].Name) != ":authority" {
			return p, nil, false
		}
	}
	return p, fields[n:], true
}

// isOfConnection reports whether a field is of a connection of HTTP/1.1, which no message may have: section 8.2.2.
func isOfConnection(f *http1.Field) bool {
	switch string(f.Name) {
	case "connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade":
		return true
	case "te":
		return string(f.Value) != "trailers"
	}
	return false
}

// takeRequest makes a request of a block. It reports false if that is malformed. The caller holds mu.
func (s *Stream) takeRequest(b *block) bool {
	r := &s.Request
	r.Reset()
	r.Minor = 1
	if s.TooLarge = b.tooLong; s.TooLarge {
		return true
	}
	s.heads = b.size
	s.keep(b)
	p, fields, ok := split(b.fields)
	if !ok || p.status != nil || p.method == nil {
		return false
	}
	connect := string(p.method) == "CONNECT"
	s.Socket = connect && string(p.protocol) == "websocket"
	switch {
	case p.protocol != nil && !connect:
		return false
	case connect && p.protocol == nil: // a request for a tunnel, which nobody gets
		if p.scheme != nil || p.path != nil || p.authority == nil {
			return false
		}
		p.path = p.authority
	case p.scheme == nil || p.path == nil:
		return false
	}
	r.Method, r.Target, r.Host = p.method, p.path, p.authority
	if s.Socket {
		r.Method = []byte("GET")
	}
	for i := range fields {
		if isOfConnection(&fields[i]) {
			return false
		}
	}
	r.Fields = s.crumbs(r.Fields, fields)
	if r.Assemble(!b.end && !s.Socket) != nil {
		return false
	}
	s.length = r.Length
	return !b.end || s.length <= 0
}

// crumbs adds fields, with all fields Cookie as one: RFC 9113, section 8.2.3.
func (s *Stream) crumbs(to, fields []http1.Field) []http1.Field {
	first, cookies := -1, 0
	for _, f := range fields {
		if string(f.Name) == "cookie" {
			if cookies++; cookies == 1 {
				first = len(to)
			} else {
				continue
			}
		}
		to = append(to, f)
	}
	if cookies < 2 {
		return to
	}
	var all [][]byte
	for _, f := range fields {
		if string(f.Name) == "cookie" {
			all = append(all, f.Value)
		}
	}
	to[first].Value = bytes.Join(all, []byte("; "))
	return to
}

// maxAnswers bounds the heads of interim answers that wait.
const maxAnswers = 33

// tooMuch reports whether a block is too long, or all of the stream's are: interim heads stay in memory until it ends.
func (s *Stream) tooMuch(b *block) bool {
	s.heads += b.size
	return b.tooLong || s.heads > 2*s.c.o.MaxHead
}

// takeAnswer makes an answer of a block. It reports false if that is malformed. The caller holds mu.
func (s *Stream) takeAnswer(b *block) bool {
	if s.tooMuch(b) || len(s.answers) >= maxAnswers {
		return false
	}
	s.keep(b)
	p, fields, ok := split(b.fields)
	if !ok || len(p.status) != 3 || p.method != nil || p.path != nil || p.authority != nil || p.scheme != nil || p.protocol != nil {
		return false
	}
	var r http1.Response
	r.Reset()
	r.Minor = 1
	for _, d := range p.status {
		if d < '0' || d > '9' {
			return false
		}
		r.Status = r.Status*10 + int(d-'0')
	}
	at := len(s.fields)
	s.fields = append(s.fields, fields...)
	r.Fields = s.fields[at:len(s.fields):len(s.fields)]
	if r.Status < 100 || r.Status == 101 || r.Assemble() != nil {
		return false
	}
	if s.answered = r.Status >= 200; s.answered {
		if s.length = r.Length; s.isHead || http1.Bodyless(r.Status) {
			s.length = 0
		}
	} else if b.end {
		return false
	}
	s.answers = append(s.answers, r)
	return true
}

// takeTrailers takes the fields behind a body. It reports false if they are malformed. The caller holds mu.
func (s *Stream) takeTrailers(b *block) bool {
	if s.tooMuch(b) {
		return false
	}
	s.keep(b)
	for i := range b.fields {
		f := &b.fields[i]
		if f.Classify() != nil || f.Kind == http1.ContentLength || isOfConnection(f) {
			return false
		}
	}
	s.trailers = append(s.trailers, b.fields...)
	return true
}
