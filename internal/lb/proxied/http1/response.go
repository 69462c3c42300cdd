package http1

import "bytes"

// Response is the head of an answer.
type Response struct {
	head
	Status int
	Reason []byte
	// Dated reports whether there is a field Date, and Announced whether trailers are.
	Dated, Announced bool
}

// Reset prepares for another answer.
func (r *Response) Reset() { *r = Response{head: r.head}; r.reset() }

// Parse reads the head of an answer at the beginning of b, as Request.Parse does. A line may end in LF only, as
// programs behind servers write it; nothing of that is passed on.
func (r *Response) Parse(b []byte) (int, error) {
	n, err := r.end(b, false)
	if n == 0 || err != nil {
		return 0, err
	}
	text, rest := line(b[:n])
	if err := r.statusLine(text); err != nil {
		return 0, err
	}
	if err := r.fields(rest); err != nil {
		return 0, err
	}
	for _, f := range r.Fields {
		r.note(f)
	}
	return n, nil
}

// note takes a field of an answer into account.
func (r *Response) note(f Field) {
	r.Dated = r.Dated || f.Kind == Date
	r.Announced = r.Announced || f.Kind == Trailer && len(f.Value) > 0
}

func (r *Response) statusLine(text []byte) error {
	const version = "HTTP/1.1 200"
	if len(text) < len(version) || string(text[:7]) != version[:7] || text[8] != ' ' {
		return ErrMalformed
	}
	switch text[7] {
	case '0':
	case '1':
		r.Minor = 1
	default:
		return ErrMalformed
	}
	for _, c := range text[9:12] {
		if c < '0' || c > '9' {
			return ErrMalformed
		}
		r.Status = r.Status*10 + int(c-'0')
	}
	reason, ok := text[12:], true
	if len(reason) > 0 {
		reason, ok = bytes.CutPrefix(reason, blank)
	}
	if !ok || r.Status < 100 || !all(reason, valueByte) {
		return ErrMalformed
	}
	r.Reason = reason
	return nil
}

// Bodyless reports whether an answer with a status has no body, whatever its fields say (RFC 9110, section 6.4.1).
func Bodyless(status int) bool { return status < 200 || status == 204 || status == 304 }

// Body returns what follows the head: isHead reports whether the request was one of HEAD.
func (r *Response) Body(isHead bool) Body {
	switch {
	case isHead || Bodyless(r.Status):
		return Body{}
	case r.Chunked:
		return Body{kind: chunked}
	case r.Length >= 0:
		if r.Length == 0 {
			return Body{}
		}
		return Body{kind: sized, left: uint64(r.Length)}
	}
	return Body{kind: endless}
}

// Persists reports whether the Pod's connection may have another request after this one, if the body has an end.
func (r *Response) Persists() bool { return !r.Close && (r.Minor == 1 || r.KeepAlive) }
