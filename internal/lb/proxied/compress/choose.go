// Package compress decides which answers are compressed, and compresses them. It knows no connection.
package compress

import (
	"bytes"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
)

// least is how long an answer must be, in bytes, if its length is known: a shorter one fits into a packet anyway.
const least = 1024

// types are the media types whose answers become much shorter, beside text/*, *+json and *+xml.
//
//nolint:gochecknoglobals // constant
var types = []string{
	"application/javascript", "application/json", "application/ld+json", "application/manifest+json", "application/rtf",
	"application/vnd.ms-fontobject", "application/wasm", "application/x-javascript", "application/x-ndjson", "application/xml",
	"application/yaml", "font/otf", "font/ttf", "image/bmp", "image/svg+xml", "image/x-icon",
}

// Choose returns what compresses an answer by one of the content codings, of which the first is the best, nil if nothing does. takes is
// what the client accepts, 0 if it gets no compressed answer: to HEAD, and with HTTP/1.0. Choose changes the fields of the answer: Vary
// tells also other clients that the coding depends on what they accept, so that no cache hands out the wrong one.
func Choose(codings []string, takes Accepts, r *http1.Response) *Encoder {
	if len(codings) == 0 {
		return nil
	}
	if r.Status == http.StatusNotModified { // of an answer that may have been compressed
		vary(r)
		return nil
	}
	if !suits(r) {
		return nil
	}
	vary(r)
	coding := takes.first(codings)
	if coding == "" {
		return nil
	}
	e := New(coding)
	if e != nil {
		encode(r, coding)
	}
	return e
}

// suits reports whether an answer can be compressed, whatever its client accepts.
func suits(r *http1.Response) bool {
	if r.Status != http.StatusOK && r.Status != http.StatusForbidden && r.Status != http.StatusNotFound || r.Length >= 0 && r.Length < least {
		return false
	}
	compressible := false
	for i := range r.Fields {
		f := &r.Fields[i]
		switch {
		case http1.EqualFold(f.Name, "content-type"):
			compressible = shrinks(f.Value)
		case http1.EqualFold(f.Name, "cache-control"):
			if hasToken(f.Value, "no-transform") {
				return false
			}
		case http1.EqualFold(f.Name, "content-encoding"), http1.EqualFold(f.Name, "content-range"), http1.EqualFold(f.Name, "content-md5"),
			http1.EqualFold(f.Name, "digest"), http1.EqualFold(f.Name, "content-digest"), http1.EqualFold(f.Name, "repr-digest"),
			http1.EqualFold(f.Name, "signature"):
			return false // it is encoded, it is a part, or something else is about its bytes as they are
		}
	}
	return compressible
}

// shrinks reports whether a media type is of text, or of something else that becomes much shorter.
func shrinks(value []byte) bool {
	name, _, _ := strings.Cut(strings.ToLower(string(value)), ";")
	name = strings.TrimSpace(name)
	switch {
	case strings.HasPrefix(name, "application/grpc"):
		return false
	case strings.HasPrefix(name, "text/"), strings.HasSuffix(name, "+json"), strings.HasSuffix(name, "+xml"):
		return true
	}
	return slices.Contains(types, name)
}

// hasToken reports whether a list has a word.
func hasToken(list []byte, word string) bool {
	for item := range bytes.SplitSeq(list, []byte(",")) {
		if strings.EqualFold(strings.TrimSpace(string(item)), word) {
			return true
		}
	}
	return false
}

// vary adds Accept-Encoding to Vary, unless that is there.
func vary(r *http1.Response) {
	for i := range r.Fields {
		if f := &r.Fields[i]; http1.EqualFold(f.Name, "vary") && (hasToken(f.Value, "accept-encoding") || hasToken(f.Value, "*")) {
			return
		}
	}
	r.Fields = append(r.Fields, http1.Field{Name: []byte("Vary"), Value: []byte("Accept-Encoding")})
}

// Accepts are the codings that a client accepts. They share no bytes with its request, whose head may be gone when an answer comes.
type Accepts uint8

// The codings that are known.
const (
	acceptsGzip Accepts = 1 << iota
	acceptsZstd
	acceptsAll = acceptsGzip | acceptsZstd
)

// Accepted returns what a client accepts by the fields of its request (RFC 9110, section 12.5.3).
func Accepted(fields []http1.Field) Accepts {
	var takes, named Accepts
	all := false
	for i := range fields {
		f := &fields[i]
		if f.Kind != http1.Other || !http1.EqualFold(f.Name, "accept-encoding") {
			continue
		}
		for item := range bytes.SplitSeq(f.Value, []byte(",")) {
			name, weight, _ := bytes.Cut(item, []byte(";"))
			if name = bytes.TrimSpace(name); string(name) == "*" {
				all = wants(weight)
				continue
			}
			coding := codingOf(name)
			named |= coding
			if takes &^= coding; wants(weight) {
				takes |= coding
			}
		}
	}
	if all {
		takes |= acceptsAll &^ named
	}
	return takes
}

// codingOf returns the coding of a name, 0 for one that is not known.
func codingOf(name []byte) Accepts {
	switch {
	case http1.EqualFold(name, "gzip"):
		return acceptsGzip
	case http1.EqualFold(name, "zstd"):
		return acceptsZstd
	}
	return 0
}

// first returns the first coding that a client accepts, "" for none.
func (a Accepts) first(codings []string) string {
	for _, c := range codings {
		if a&codingOf([]byte(c)) != 0 {
			return c
		}
	}
	return ""
}

// wants reports whether a weight, as "q=0.5", is more than 0, which another text is not.
func wants(text []byte) bool {
	if text = bytes.TrimSpace(text); len(text) == 0 {
		return true
	}
	q, ok := strings.CutPrefix(strings.ToLower(string(text)), "q=")
	n, err := strconv.ParseFloat(q, 32)
	return ok && err == nil && n > 0 && n <= 1
}

// encode makes the fields be of the compressed answer: its length is not known, its validator is weak, and there are no parts of it.
func encode(r *http1.Response, coding string) {
	r.Length, r.Chunked = -1, false
	kept := r.Fields[:0]
	for _, f := range r.Fields {
		switch {
		case f.Kind == http1.ContentLength, http1.EqualFold(f.Name, "accept-ranges"):
			continue
		case http1.EqualFold(f.Name, "etag") && bytes.HasPrefix(f.Value, []byte(`"`)):
			f.Value = append([]byte("W/"), f.Value...)
		}
		kept = append(kept, f)
	}
	r.Fields = append(kept, http1.Field{Name: []byte("Content-Encoding"), Value: []byte(coding)})
}
