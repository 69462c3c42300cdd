package authz

import (
	"bytes"
	"errors"

	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
)

// Bounds of the answer of a server.
const (
	// MaxBody is how long its body may be that a client gets, in bytes; it gets none that is longer.
	MaxBody = 64 << 10
	// MaxFields is how many fields it may have.
	MaxFields = 128
)

var errFields = errors.New("the answer has too many fields")

// Answer is that of the server. It shares no bytes with a connection.
type Answer struct {
	Status int
	Fields []http1.Field
	// Body is nil if it is too long.
	Body []byte
	// Trailers are the fields behind it.
	Trailers []http1.Field
}

// NewAnswer returns an answer with a head, whose body Add adds.
func NewAnswer(r *http1.Response) *Answer { return &Answer{r.Status, clones(r.Fields), []byte{}, nil} }

// clones returns fields, and of too many ones so many that it is seen.
func clones(fields []http1.Field) (out []http1.Field) {
	for i := range fields[:min(len(fields), MaxFields+1)] {
		f := &fields[i]
		out = append(out, http1.Field{Name: bytes.Clone(f.Name), Value: bytes.Clone(f.Value), Kind: f.Kind})
	}
	return out
}

// Add adds a part of the body. It reports false if that is too long: then no more of it is of use.
func (a *Answer) Add(data []byte) bool {
	if a.Body == nil || len(a.Body)+len(data) > MaxBody {
		a.Body = nil
		return false
	}
	a.Body = append(a.Body, data...)
	return true
}

// End adds the fields behind the body.
func (a *Answer) End(trailers []http1.Field) { a.Trailers = clones(trailers) }
