// Package http1 reads messages of HTTP/1.0 and HTTP/1.1 (RFC 9112) from bytes. It copies nothing, knows no connection,
// and takes of requests only what everybody reads alike: what servers may read differently is an error, as then the
// end of one request could be the beginning of another one (request smuggling).
package http1

import (
	"bytes"
	"errors"
)

// ErrMalformed means that bytes are no message of HTTP/1.1 on whose end everybody agrees.
var ErrMalformed = errors.New("malformed message of HTTP/1.1")

// Kind is a field name that means something to a proxy.
type Kind uint8

// The kinds of fields. Other is the end-to-end rest.
const (
	Other Kind = iota
	Host
	ContentLength
	TransferEncoding
	Connection
	Upgrade
	Expect
	TE
	Trailer
	Cookie
	SetCookie
	Date
	UserAgent
	XForwardedFor
	// Forwarded are those about earlier proxies that are not passed on: Forwarded, X-Forwarded-Host, X-Forwarded-Port,
	// X-Forwarded-Proto, X-Real-Ip.
	Forwarded
	// HopByHop are further ones that are of one connection: Keep-Alive, Proxy-Connection, Proxy-Authenticate and
	// Proxy-Authorization.
	HopByHop
	// Underscored are fields of requests whose names have a "_", which is "-" to programs that get names as variables (CGI,
	// WSGI): there they may pass for one that is trusted, as X_Real_IP.
	Underscored
	// Named are the fields that Connection names.
	Named
)

// Field is a field of a head or of trailers. Name and Value are slices of the input; Value has no blanks around it.
type Field struct {
	Name, Value []byte
	Kind        Kind
}

// ValuesOf returns the values of the fields of one kind.
func ValuesOf(fields []Field, k Kind) (out []string) {
	for i := range fields {
		if fields[i].Kind == k {
			out = append(out, string(fields[i].Value))
		}
	}
	return out
}

// kinds are the names, in lower case, by their lengths.
var kinds = [...][]struct {
	name string
	kind Kind
}{
	2:  {{"te", TE}},
	4:  {{"host", Host}, {"date", Date}},
	6:  {{"cookie", Cookie}, {"expect", Expect}},
	7:  {{"upgrade", Upgrade}, {"trailer", Trailer}},
	9:  {{"forwarded", Forwarded}, {"x-real-ip", Forwarded}},
	10: {{"connection", Connection}, {"user-agent", UserAgent}, {"keep-alive", HopByHop}, {"set-cookie", SetCookie}},
	14: {{"content-length", ContentLength}},
	15: {{"x-forwarded-for", XForwardedFor}},
	16: {{"x-forwarded-host", Forwarded}, {"x-forwarded-port", Forwarded}, {"proxy-connection", HopByHop}},
	17: {{"transfer-encoding", TransferEncoding}, {"x-forwarded-proto", Forwarded}},
	18: {{"proxy-authenticate", HopByHop}},
	19: {{"proxy-authorization", HopByHop}},
}

func kindOf(name []byte) Kind {
	if len(name) >= len(kinds) {
		return Other
	}
	for _, k := range kinds[len(name)] {
		if equalFold(name, k.name) {
			return k.kind
		}
	}
	return Other
}

// equalFold reports whether name is lowered, which is in lower case and of its length or not, but for the case.
func equalFold(name []byte, lowered string) bool {
	if len(name) != len(lowered) {
		return false
	}
	for i := range len(lowered) {
		if lower(name[i]) != lowered[i] {
			return false
		}
	}
	return true
}

func lower(b byte) byte {
	if b >= 'A' && b <= 'Z' {
		return b + 'a' - 'A'
	}
	return b
}

// What a byte may be part of.
const (
	tokenByte  = 1 << iota // a method or the name of a field: RFC 9110, section 5.6.2
	valueByte              // the value of a field
	targetByte             // the target of a request
	hostByte               // Host: RFC 3986, section 3.2, without user information
	pathByte               // a path that net/url writes as it has read it
	digitByte              // a hexadecimal digit
)

var classes = func() (c [256]uint8) {
	set := func(class uint8, text string) {
		for i := range len(text) {
			c[text[i]] |= class
		}
	}
	const letters, digits = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"
	set(tokenByte, letters+digits+"!#$%&'*+-.^_`|~")
	set(hostByte, letters+digits+"!$%&'()*+,-.:;=[]_~")
	set(pathByte, letters+digits+"-_.~!$&'()*+,;=:@[]/")
	set(digitByte, digits+"abcdefABCDEF")
	set(valueByte, "\t ")
	for b := '!'; b <= 0xff; b++ {
		if b != 0x7f {
			c[b] |= valueByte | targetByte
		}
	}
	return c
}()

func all(b []byte, class uint8) bool {
	for _, c := range b {
		if classes[c]&class == 0 {
			return false
		}
	}
	return true
}

// trim takes blanks away. It is bytes.Trim(b, " \t"), which is slower.
func trim(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}

// head is what requests and answers have in common.
type head struct {
	// Minor is the x of HTTP/1.x: 0 or 1.
	Minor  int
	Fields []Field
	// Length is that of Content-Length, -1 without one. Chunked is Transfer-Encoding: chunked. No message has both.
	Length  int64
	Chunked bool
	// Close and KeepAlive are words of Connection.
	Close, KeepAlive bool
	// Upgrades reports whether there is a field Upgrade, and Upgrade is the value of the first one if Connection has the
	// word, too.
	Upgrades bool
	Upgrade  []byte

	scanned int  // where the line begins that was not whole at the last try
	seen    int  // how much of it was looked at: what comes byte by byte costs no more than at once
	names   int  // other words of Connection
	lengths int  // fields Content-Length
	word    bool // Connection has upgrade
}

func (h *head) reset() { *h = head{Fields: h.Fields[:0], Length: -1} }

// end returns where the empty line after a head ends, 0 if b has none yet. With strict, a line must end in CR LF.
func (h *head) end(b []byte, strict bool) (int, error) {
	for {
		i := bytes.IndexByte(b[h.seen:], '\n')
		if i < 0 {
			if strict && !plausible(b[max(h.scanned, h.seen-1):]) { // again the last byte, which may be CR
				return 0, ErrMalformed
			}
			h.seen = len(b)
			return 0, nil
		}
		next := h.seen + i + 1
		line := b[h.scanned : next-1]
		if whole := bytes.HasSuffix(line, cr); whole {
			line = line[:len(line)-1]
		} else if strict {
			return 0, ErrMalformed
		}
		first := h.scanned == 0
		h.scanned, h.seen = next, next
		if len(line) == 0 {
			if first {
				return 0, ErrMalformed
			}
			return h.scanned, nil
		}
	}
}

var cr = []byte{'\r'}

// plausible reports whether the beginning of a line may become one.
func plausible(b []byte) bool {
	if n := len(b); n > 0 && b[n-1] == '\r' {
		b = b[:n-1]
	}
	return all(b, valueByte)
}

// line takes the next line from b, which has one.
func line(b []byte) (text, rest []byte) {
	i := bytes.IndexByte(b, '\n')
	text, rest = b[:i], b[i+1:]
	if bytes.HasSuffix(text, cr) {
		text = text[:len(text)-1]
	}
	return text, rest
}

// field reads a line as a field.
func field(text []byte) (Field, error) {
	i := bytes.IndexByte(text, ':')
	if i <= 0 || !all(text[:i], tokenByte) { // a blank is no part of a name: nor is a folded line one
		return Field{}, ErrMalformed
	}
	value := trim(text[i+1:])
	if !all(value, valueByte) {
		return Field{}, ErrMalformed
	}
	return Field{text[:i], value, kindOf(text[:i])}, nil
}

// fields reads the fields in b, which ends with the empty line. Names of Connection make the fields Named.
func (h *head) fields(b []byte) error {
	for {
		var text []byte
		if text, b = line(b); len(text) == 0 {
			break
		}
		f, err := field(text)
		if err != nil {
			return err
		}
		if f.Kind != Other {
			if err := h.special(f); err != nil {
				return err
			}
		}
		h.Fields = append(h.Fields, f)
	}
	if h.Chunked && (h.lengths > 0 || h.Minor == 0) {
		return ErrMalformed
	}
	if !h.word {
		h.Upgrade = nil
	}
	if h.names > 0 {
		h.nameFields()
	}
	return nil
}

// special takes a field into account that is about the message or its connection.
func (h *head) special(f Field) error {
	switch f.Kind {
	case ContentLength:
		n, ok := digits(f.Value)
		if !ok || h.lengths > 0 && n != h.Length {
			return ErrMalformed
		}
		h.Length = n
		h.lengths++
	case TransferEncoding:
		if h.Chunked || !equalFold(f.Value, "chunked") {
			return ErrMalformed
		}
		h.Chunked = true
	case Upgrade:
		if !h.Upgrades {
			h.Upgrade = f.Value
		}
		h.Upgrades = true
	case Connection:
		for word := range bytes.SplitSeq(f.Value, comma) {
			switch word = trim(word); {
			case equalFold(word, "close"):
				h.Close = true
			case equalFold(word, "keep-alive"):
				h.KeepAlive = true
			case equalFold(word, "upgrade"):
				h.word = true
			case len(word) > 0:
				h.names++
			}
		}
	}
	return nil
}

var comma = []byte{','}

// maxNames bounds how many fields Connection may name: each costs a look at all fields.
const maxNames = 32

// nameFields makes the fields that Connection names Named, except fields of the message (RFC 9110, section
// 7.6.1).
func (h *head) nameFields() {
	names := 0
	for _, c := range h.Fields {
		if c.Kind != Connection {
			continue
		}
		for word := range bytes.SplitSeq(c.Value, comma) {
			if word = trim(word); len(word) == 0 {
				continue
			}
			if names++; names > maxNames {
				return
			}
			for i := range h.Fields {
				switch f := &h.Fields[i]; f.Kind {
				case Host, ContentLength, TransferEncoding, Connection, Upgrade, Expect, TE, Trailer, HopByHop:
				default:
					if bytes.EqualFold(f.Name, word) {
						f.Kind = Named
					}
				}
			}
		}
	}
}

// digits reads a length of at most 18 digits.
func digits(b []byte) (n int64, ok bool) {
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}
