package web

import (
	"bytes"
	"errors"
	"net"
	"strconv"

	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// errMalformed means that a client's bytes are no requests of HTTP/1.1 on whose ends everybody agrees.
var errMalformed = errors.New("malformed request")

// guard lets only those bytes of a client pass to package net/http that are requests as RFC 9112 wants them.
// net/http reads leniently (a bare LF, folded lines, Content-Length beside Transfer-Encoding), and a Pod
// behind might read otherwise: then the end of one request is the beginning of another one (request smuggling).
type guard struct {
	net.Conn
	web *clientConn
	requests
	err error
}

// Read fails with errMalformed before the byte that is wrong.
func (g *guard) Read(p []byte) (n int, err error) {
	err = panics.Err                                                      // if there is one
	defer g.web.engine.host.Panics().Recover(g.web.config.Service, g.web) // goroutines of net/http read, too
	return g.read(p)
}

func (g *guard) read(p []byte) (int, error) {
	if g.err != nil {
		return 0, g.err
	}
	n, err := g.Conn.Read(p)
	if good := g.feed(p[:n]); good < n {
		g.web.malformed.Store(true)
		if g.err = errMalformed; good == 0 {
			return 0, g.err
		}
		return good, nil
	}
	return n, err
}

// CloseWrite sends the end.
func (g *guard) CloseWrite() error {
	if s, ok := g.Conn.(stream.Conn); ok {
		return s.CloseWrite()
	}
	return nil
}

// requests follows a stream of requests. The zero value is at the beginning of one.
type requests struct {
	state   state
	trailer bool   // the fields are those after a body
	line    []byte // of a request line its first bytes, of a field its name
	value   []byte // of a field
	tail    [8]byte
	later   bool // it is not the first request
	// Of the request at hand:
	length   []byte // the Content-Length, nil if there is none
	chunked  bool
	upgrades bool
	left     uint64 // of a body, a chunk or prefaceEnd
}

type state int

const (
	inRequestLine state = iota
	inRequestLineEnd
	inPreface
	atField
	inName
	inValue
	inFieldEnd
	inHeadEnd
	inBody
	atChunkSize
	inChunkSize
	inChunkSizeEnd
	inChunk
	afterChunk
	afterChunkEnd
	// passing is what follows a request for another protocol. It is the last one for a server that does not
	// change the protocol: see prepare.
	passing
)

const (
	maxName  = 32 // of a field that matters here
	maxValue = 64
	// preface is how a connection of HTTP/2 begins, in two parts: RFC 9113, section 3.4.
	preface    = "PRI * HTTP/2.0"
	prefaceEnd = "\r\nSM\r\n\r\n"
)

// feed takes the next bytes, and returns how many of them are good.
func (r *requests) feed(p []byte) int {
	for i := 0; i < len(p); i++ {
		switch r.state {
		case passing:
			return len(p)
		case inBody, inChunk:
			n := min(uint64(len(p)-i), r.left)
			i += int(n) - 1
			if r.left -= n; r.left > 0 {
				continue
			}
			if r.state == inChunk {
				r.state = afterChunk
			} else {
				r.endOfRequest()
			}
		default:
			if !r.take(p[i]) {
				return i
			}
		}
	}
	return len(p)
}

// next is the beginning of another request.
func (r *requests) next() {
	*r = requests{line: r.line[:0], value: r.value[:0], later: true}
}

// take takes a byte outside of bodies. It reports whether that is good.
func (r *requests) take(b byte) bool {
	switch r.state {
	case inRequestLine, inRequestLineEnd, inPreface:
		return r.takeRequestLine(b)
	case atField, inName, inValue, inFieldEnd, inHeadEnd:
		return r.takeField(b)
	}
	return r.takeChunk(b)
}

func (r *requests) takeRequestLine(b byte) bool {
	switch {
	case r.state == inRequestLineEnd && b == '\n':
		if !r.later && string(r.line) == preface {
			r.state, r.left = inPreface, uint64(len(prefaceEnd))
			return true
		}
		r.state = atField
		return string(r.tail[:]) == "HTTP/1.1" || string(r.tail[:]) == "HTTP/1.0"
	case r.state == inRequestLineEnd:
		return false
	case r.state == inPreface: // with fields it would be a request of HTTP/1.1 to net/http
		if b != prefaceEnd[len(prefaceEnd)-int(r.left)] {
			return false
		}
		if r.left--; r.left == 0 {
			r.state = passing
		}
	case b == '\r':
		r.state = inRequestLineEnd
		return len(r.line) > 0
	case b < ' ' || b == 0x7f:
		return false
	default:
		copy(r.tail[:], r.tail[1:])
		r.tail[7] = b
		if len(r.line) <= len(preface) {
			r.line = append(r.line, b)
		}
	}
	return true
}

func (r *requests) takeField(b byte) bool {
	switch r.state {
	case atField:
		r.line, r.value = r.line[:0], r.value[:0]
		if b == '\r' {
			r.state = inHeadEnd
			return true
		}
		r.state = inName // a blank is no part of a name: nor is a folded line
		fallthrough
	case inName:
		if b == ':' && len(r.line) > 0 {
			r.state = inValue
			return true
		}
		if !isToken(b) {
			return false
		}
		if len(r.line) <= maxName {
			r.line = append(r.line, lower(b))
		}
	case inValue:
		if b == '\r' {
			r.state = inFieldEnd
			return true
		}
		if b < ' ' && b != '\t' || b == 0x7f {
			return false
		}
		if len(r.value) <= maxValue {
			r.value = append(r.value, b)
		}
	case inFieldEnd:
		r.state = atField
		return b == '\n' && r.field()
	case inHeadEnd:
		return b == '\n' && r.endOfHead()
	}
	return true
}

// field takes a whole field into account.
func (r *requests) field() bool {
	value := bytes.Trim(r.value, " \t")
	whole := len(r.value) <= maxValue
	switch string(r.line) {
	case "content-length":
		if !whole || r.trailer || r.length != nil || len(value) == 0 || len(value) > 18 {
			return false
		}
		for _, c := range value {
			if c < '0' || c > '9' {
				return false
			}
		}
		r.length = bytes.Clone(value)
	case "transfer-encoding":
		if !whole || r.trailer || r.chunked || !bytes.EqualFold(value, []byte("chunked")) || string(r.tail[:]) != "HTTP/1.1" {
			return false
		}
		r.chunked = true
	case "upgrade":
		r.upgrades = r.upgrades || !r.trailer // ServeHTTP ends the connection by the same rule
	}
	return true
}

// endOfHead decides what follows the fields.
func (r *requests) endOfHead() bool {
	switch {
	case r.trailer:
		return r.endOfRequest()
	case r.chunked && r.length != nil:
		return false
	case r.chunked:
		r.state = atChunkSize
	case r.length != nil:
		r.left, _ = strconv.ParseUint(string(r.length), 10, 64) // of digits
		if r.state = inBody; r.left == 0 {
			return r.endOfRequest()
		}
	default:
		return r.endOfRequest()
	}
	return true
}

func (r *requests) endOfRequest() bool {
	if r.upgrades {
		r.state = passing
	} else {
		r.next()
	}
	return true
}

// takeChunk takes what is around the data of chunks. Extensions have no use, and many ways to be read.
func (r *requests) takeChunk(b byte) bool {
	switch r.state {
	case atChunkSize, inChunkSize:
		if b == '\r' && r.state == inChunkSize {
			r.state = inChunkSizeEnd
			return true
		}
		digit := bytes.IndexByte([]byte("0123456789abcdef"), lower(b))
		if digit < 0 || r.left >= 1<<56 {
			return false
		}
		if r.state == atChunkSize {
			r.left = 0
		}
		r.left = r.left<<4 | uint64(digit)
		r.state = inChunkSize
	case inChunkSizeEnd:
		if r.state = inChunk; r.left == 0 {
			r.state, r.trailer = atField, true
		}
		return b == '\n'
	case afterChunk:
		r.state = afterChunkEnd
		return b == '\r'
	case afterChunkEnd:
		r.state = atChunkSize
		return b == '\n'
	}
	return true
}

func lower(b byte) byte {
	if b >= 'A' && b <= 'Z' {
		return b + 'a' - 'A'
	}
	return b
}

// isToken reports whether a byte may be in the name of a field (RFC 9110, section 5.6.2).
func isToken(b byte) bool {
	return b >= '0' && b <= '9' || lower(b) >= 'a' && lower(b) <= 'z' || bytes.IndexByte([]byte("!#$%&'*+-.^_`|~"), b) >= 0
}
