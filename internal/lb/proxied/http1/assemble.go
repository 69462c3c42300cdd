package http1

import "bytes"

// Classify sets the kind of a field of HTTP/2, and takes the blanks around its value away. It fails if the field is none.
func (f *Field) Classify() error {
	f.Value = trim(f.Value)
	if len(f.Name) == 0 || !all(f.Value, valueByte) {
		return ErrMalformed
	}
	for _, c := range f.Name {
		if classes[c]&tokenByte == 0 || c >= 'A' && c <= 'Z' {
			return ErrMalformed
		}
	}
	f.Kind = kindOf(f.Name)
	return nil
}

// assemble takes fields into account that came by HTTP/2.
func (h *head) assemble() error {
	for i := range h.Fields {
		f := &h.Fields[i]
		if err := f.Classify(); err != nil {
			return err
		}
		if f.Kind == ContentLength {
			if err := h.special(*f); err != nil {
				return err
			}
		}
	}
	return nil
}

// EqualFold reports whether a name is lowered but for the case.
func EqualFold(name []byte, lowered string) bool { return equalFold(name, lowered) }

// UntilEnd is a body that ends with its connection.
func UntilEnd() Body { return Body{kind: endless} }

// Assemble completes a request of HTTP/2, of which Method, Target, Host and Fields are set, as Parse does one of HTTP/1.1. body
// reports whether a body follows; without a length it counts as chunked.
func (r *Request) Assemble(body bool) error {
	if err := r.assemble(); err != nil {
		return err
	}
	r.Chunked = body && r.Length < 0
	if r.lengths > 1 || len(r.Method) == 0 || !all(r.Method, tokenByte) || len(r.Target) == 0 || !all(r.Target, targetByte) {
		return ErrMalformed
	}
	authority := r.Host
	for i := range r.Fields {
		r.note(&r.Fields[i])
	}
	if r.hosts > 1 || r.hosts == 1 && authority != nil && !bytes.EqualFold(authority, r.Host) || !all(r.Host, hostByte) ||
		!all(authority, hostByte) {
		return ErrMalformed
	}
	if authority != nil {
		r.Host = authority
	}
	return r.target()
}

// Assemble completes an answer of HTTP/2, of which Status and Fields are set.
func (r *Response) Assemble() error {
	if err := r.assemble(); err != nil {
		return err
	}
	for _, f := range r.Fields {
		r.note(f)
	}
	return nil
}
