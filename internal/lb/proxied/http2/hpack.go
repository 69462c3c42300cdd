package http2

import "strconv"

// Encoder makes a header block (RFC 7541) that depends on no other one: names of the static table are a number, and
// nothing enters the dynamic table. So blocks can be made at any time and in any order, as HAProxy makes them.
type Encoder struct{ Block []byte }

// staticNames are the numbers of names in the static table: RFC 7541, appendix A.
var staticNames = map[string]int{
	":authority": 1, ":method": 2, ":path": 4, ":scheme": 6, ":status": 8, "accept-charset": 15, "accept-encoding": 16,
	"accept-language": 17, "accept-ranges": 18, "accept": 19, "access-control-allow-origin": 20, "age": 21, "allow": 22,
	"authorization": 23, "cache-control": 24, "content-disposition": 25, "content-encoding": 26, "content-language": 27,
	"content-length": 28, "content-location": 29, "content-range": 30, "content-type": 31, "cookie": 32, "date": 33, "etag": 34,
	"expect": 35, "expires": 36, "from": 37, "host": 38, "if-match": 39, "if-modified-since": 40, "if-none-match": 41, "if-range": 42,
	"if-unmodified-since": 43, "last-modified": 44, "link": 45, "location": 46, "max-forwards": 47, "proxy-authenticate": 48,
	"proxy-authorization": 49, "range": 50, "referer": 51, "refresh": 52, "retry-after": 53, "server": 54, "set-cookie": 55,
	"strict-transport-security": 56, "transfer-encoding": 57, "user-agent": 58, "vary": 59, "via": 60, "www-authenticate": 61,
}

// wholeStatic are fields that are a number as a whole.
var wholeStatic = map[[2]string]byte{
	{":method", "GET"}: 2, {":method", "POST"}: 3, {":scheme", "http"}: 6, {":scheme", "https"}: 7, {":status", "200"}: 8,
	{":status", "204"}: 9, {":status", "206"}: 10, {":status", "304"}: 11, {":status", "400"}: 12, {":status", "404"}: 13,
	{":status", "500"}: 14,
}

const indexed = 0x80

// Pseudo adds a field of the message's first line, as :method.
func (e *Encoder) Pseudo(name, value string) {
	if n, ok := wholeStatic[[2]string{name, value}]; ok {
		e.Block = append(e.Block, indexed|n)
		return
	}
	e.literal(staticNames[name])
	e.text(value)
}

// Status adds :status.
func (e *Encoder) Status(n int) {
	if n == 200 {
		e.Block = append(e.Block, indexed|8)
		return
	}
	e.Pseudo(":status", strconv.Itoa(n))
}

// maxName bounds the names of which a copy in lower case is made without memory of the heap.
const maxName = 64

// Field adds a field. Its name becomes lower case.
func Field[T string | []byte](e *Encoder, name []byte, value T) {
	var small [maxName]byte
	lowered := small[:0]
	for _, b := range name {
		if b >= 'A' && b <= 'Z' {
			b += 'a' - 'A'
		}
		lowered = append(lowered, b)
	}
	if n := staticNames[string(lowered)]; n > 0 {
		e.literal(n)
	} else {
		e.literal(0)
		e.length(len(lowered))
		e.Block = append(e.Block, lowered...)
	}
	e.length(len(value))
	e.Block = append(e.Block, value...)
}

// literal begins a field without indexing (section 6.2.2) whose name is a number, 0 if it follows.
func (e *Encoder) literal(name int) {
	if name < 15 {
		e.Block = append(e.Block, byte(name)) //nolint:gosec // as it says
		return
	}
	e.Block = append(e.Block, 15)
	e.varint(name - 15)
}

func (e *Encoder) text(s string) {
	e.length(len(s))
	e.Block = append(e.Block, s...)
}

// length adds the length of a text, which is not coded by Huffman.
func (e *Encoder) length(n int) {
	if n < 127 {
		e.Block = append(e.Block, byte(n)) //nolint:gosec // as it says
		return
	}
	e.Block = append(e.Block, 127)
	e.varint(n - 127)
}

// varint adds the rest of a number: section 5.1.
func (e *Encoder) varint(n int) {
	for ; n >= 128; n >>= 7 {
		e.Block = append(e.Block, byte(n&127|128)) //nolint:gosec // as it says
	}
	e.Block = append(e.Block, byte(n)) //nolint:gosec // as it says
}
