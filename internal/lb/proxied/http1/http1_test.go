package http1

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// requests are read as net/http reads them.
var requests = []string{
	"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET /a%2fb?q=%zz;x HTTP/1.1\r\nHost: a:80\r\nX:\r\n\r\n",
	"GET http://b/c?d HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET /\"<>\x80 HTTP/1.1\r\nHost: a\r\n\r\n",
	"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
	"GET / HTTP/1.0\r\n\r\n",
	"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: a\r\nConnection: close, x\r\nX: 1\r\nContent-Length: 3\r\n\r\nabc",
	"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\nA\r\n0123456789\r\n1\r\na\r\n0\r\nX-T: 1\r\n\r\n",
	"PUT / HTTP/1.1\r\nHost:a\r\nExpect: 100-Continue\r\nContent-Length: 1\r\n\r\na",
	"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
}

// rejectedRequests are none, or such on whose end servers do not agree. Those of guard_test.go are others.
var rejectedRequests = []string{
	"GET / HTTP/1.1\r\n\r\n",                                                                        // no Host
	"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",                                                  // two
	"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",                                                           // no host
	"GET a HTTP/1.1\r\nHost: a\r\n\r\n",                                                             // no path
	"GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n",                                                          // no escape
	"G(T / HTTP/1.1\r\nHost: a\r\n\r\n",                                                             // no method
	"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",                                                            // two blanks
	"GET / HTTP/1.1 \r\nHost: a\r\n\r\n",                                                            // a blank at the end
	"GET / HTTP/2.0\r\nHost: a\r\n\r\n",                                                             // another version
	"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n",                                                       // a folded line
	"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",                                                       // a bare LF
	"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n",                              // another coding
	"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",                  // a length, and again
	"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", // both
}

func TestRequests(t *testing.T) {
	for _, text := range requests {
		var r Request
		r.Reset()
		n, err := r.Parse([]byte(text))
		want, wantErr := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
		if n == 0 || err != nil || wantErr != nil {
			t.Errorf("%q: %d, %v, %v", text, n, err, wantErr)
			continue
		}
		if string(r.Method) != want.Method || string(r.Host) != want.Host || string(r.Target) != want.URL.RequestURI() ||
			r.Minor != want.ProtoMinor || r.Persists() == want.Close {
			t.Errorf("%q: %s %s %s %d %t", text, r.Method, r.Host, r.Target, r.Minor, r.Persists())
		}
	}
	for _, text := range rejectedRequests {
		var r Request
		r.Reset()
		if n, err := r.Parse([]byte(text)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%q: %d, %v", text, n, err)
		}
	}
}

// A line that comes byte by byte is looked at once: what was is not, whatever it is by now.
func TestLongLineByteByByte(t *testing.T) {
	for _, r := range []interface {
		Reset()
		Parse(b []byte) (int, error)
	}{&Request{}, &Response{}} {
		text := []byte("GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("x", 1000) + "\r\n\r\n")
		r.Reset()
		for i := 1; i < len(text); i++ {
			if n, err := r.Parse(text[:i]); n > 0 || err != nil {
				t.Fatalf("%d bytes: %d, %v", i, n, err)
			}
			if i > 40 && i < 1000 {
				text[i-2] = '\n'
			}
		}
	}
}

// Fields that Connection names are of the connection, but for those that frame the message.
func TestNamedFields(t *testing.T) {
	var r Request
	r.Reset()
	_, err := r.Parse([]byte("GET / HTTP/1.1\r\nHost: a\r\nX-Hop: 1\r\nx-forwarded-for: b\r\nContent-Length: 0\r\n" +
		"Connection: x-hop, X-Forwarded-For, content-length, host\r\nX: 1\r\n\r\n"))
	if err != nil {
		t.Fatal(err)
	}
	var got []Kind
	for _, f := range r.Fields {
		got = append(got, f.Kind)
	}
	if want := []Kind{Host, Named, Named, ContentLength, Connection, Other}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// answers are those of servers, with the bodies that they have.
var answers = map[string]string{
	"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcX":                                                      "abc",
	"HTTP/1.1 200\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc":                                     "abc",
	"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc":                                                             "abc",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2 \r\nab\r\n1;x=\"y\"\r\nc\r\n0\r\nT: 1\r\n\r\nX": "abc",
	"HTTP/1.1 200 OK\r\n\r\nabc":                                                                            "abc",
	"HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\nabc":                                               "",
	"HTTP/1.0 304 \r\n\r\nabc":                                                                              "",
}

var rejectedAnswers = []string{
	"HTTP/1.1 abc\r\n\r\n", "HTTP/1.1 20\r\n\r\n", "HTTP/2.0 200 OK\r\n\r\n", "HTTP/1.1 099 X\r\n\r\n", "\r\nHTTP/1.1 200 OK\r\n\r\n",
	"HTTP/1.1 200 OK\r\nA b: c\r\n\r\n", "HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n", "HTTP/1.1 200 OK\r\nA: \x00\r\n\r\n",
	"HTTP/1.1 2000\r\n\r\n",
	"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc", "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nabc",
	"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 1\r\n\r\n",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1111111111111111\r\n",
}

// readAll reads what a body has in b, in parts of so many bytes.
func readAll(body Body, b []byte, size int) (data []byte, taken int, fields []Field, err error) {
	for have := 0; !body.Done(); {
		part, n, f, err := body.Next(b[taken:have], nil)
		data, taken, fields = append(data, part...), taken+n, f
		if err != nil {
			return data, taken, fields, err
		}
		if n == 0 {
			if have == len(b) {
				return data, taken, fields, io.ErrUnexpectedEOF
			}
			have = min(have+size, len(b))
		}
	}
	return data, taken, fields, nil
}

func TestAnswers(t *testing.T) {
	for text, want := range answers {
		for _, size := range []int{1, 7, len(text)} {
			var r Response
			r.Reset()
			n, err := r.Parse([]byte(text))
			if n == 0 || err != nil {
				t.Fatalf("%q: %d, %v", text, n, err)
			}
			got, _, _, err := readAll(r.Body(false), []byte(text)[n:], size)
			if b := r.Body(false); b.Endless() && errors.Is(err, io.ErrUnexpectedEOF) {
				err = nil
			}
			if string(got) != want || err != nil {
				t.Errorf("%q, %d bytes at a time: %q, %v", text, size, got, err)
			}
		}
	}
	for _, text := range rejectedAnswers {
		var r Response
		r.Reset()
		n, err := r.Parse([]byte(text))
		if err == nil && n > 0 {
			_, _, _, err = readAll(r.Body(false), []byte(text)[n:], len(text))
		}
		if !errors.Is(err, ErrMalformed) {
			t.Errorf("%q: %d, %v", text, n, err)
		}
	}
}

// inParts has a parser read more and more bytes.
func inParts(parse func([]byte) (int, error), b []byte, size int) (n int, err error) {
	for have := 0; n == 0 && err == nil && have < len(b); {
		have = min(have+size, len(b))
		n, err = parse(b[:have])
	}
	return n, err
}

// A request is read in the same way in parts, and as net/http reads it, which reads more.
func FuzzRequest(f *testing.F) {
	for _, text := range append(requests, rejectedRequests...) {
		f.Add([]byte(text), 3)
	}
	f.Add([]byte("\x03a\r\n"), 3)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		size = max(1, size)
		var whole, parts Request
		whole.Reset()
		parts.Reset()
		n, err := whole.Parse(b)
		m, partErr := inParts(parts.Parse, b, size)
		if n == 0 && err == nil && partErr != nil { // a line was rejected before its end: it is no part of a request
			whole.Reset()
			if n, err = whole.Parse(append(bytes.Clone(bytes.TrimSuffix(b, cr)), "\r\nHost: a\r\n\r\n"...)); n == 0 && err == nil {
				t.Fatal("a head without an end")
			}
			m = n
		}
		if m != n || (err == nil) != (partErr == nil) {
			t.Fatalf("whole %d, %v; in parts %d, %v", n, err, m, partErr)
		}
		if n == 0 || err != nil {
			return
		}
		data, taken, _, err := readAll(whole.Body(), b[n:], len(b))
		again, takenAgain, _, errAgain := readAll(whole.Body(), b[n:], size)
		if !bytes.Equal(data, again) || taken != takenAgain && err == nil || (err == nil) != (errAgain == nil) {
			t.Fatalf("body %q, %d, %v; in parts %q, %d, %v", data, taken, err, again, takenAgain, errAgain)
		}
		under := bytes.NewReader(b)
		in := bufio.NewReader(under)
		want, wantErr := http.ReadRequest(in)
		if wantErr != nil {
			if bytes.HasPrefix(whole.Method, []byte("CONNECT")) || whole.Announced {
				return // of these it reads more than is read here
			}
			t.Fatalf("net/http does not read it: %v", wantErr)
		}
		if string(whole.Method) != want.Method {
			t.Fatalf("%q, want %q", whole.Method, want.Method)
		}
		wantData, wantErr := io.ReadAll(want.Body)
		if err == nil && (wantErr != nil || !bytes.Equal(data, wantData) || len(b)-under.Len()-in.Buffered() != n+taken) {
			t.Fatalf("body %q; of net/http %q, %v; it ends at %d, and here at %d", data, wantData, wantErr,
				len(b)-under.Len()-in.Buffered(), n+taken)
		}
	})
}

// An answer is read in the same way in parts, and its body is that which net/http reads.
func FuzzResponse(f *testing.F) {
	for text := range answers {
		f.Add([]byte(text), 3, false)
	}
	for _, text := range rejectedAnswers {
		f.Add([]byte(text), 1, true)
	}
	f.Fuzz(func(t *testing.T, b []byte, size int, isHead bool) {
		size = max(1, size)
		var whole, parts Response
		whole.Reset()
		parts.Reset()
		n, err := whole.Parse(b)
		m, partErr := inParts(parts.Parse, b, size)
		if m != n || (err == nil) != (partErr == nil) {
			t.Fatalf("whole %d, %v; in parts %d, %v", n, err, m, partErr)
		}
		if n == 0 || err != nil || whole.Status < 200 {
			return
		}
		data, taken, _, err := readAll(whole.Body(isHead), b[n:], len(b))
		again, _, _, errAgain := readAll(whole.Body(isHead), b[n:], size)
		if !bytes.Equal(data, again) || (err == nil) != (errAgain == nil) {
			t.Fatalf("body %q, %v; in parts %q, %v", data, err, again, errAgain)
		}
		if err != nil {
			return
		}
		method := http.MethodGet
		if isHead {
			method = http.MethodHead
		}
		want, wantErr := http.ReadResponse(bufio.NewReader(bytes.NewReader(b)), &http.Request{Method: method})
		if wantErr != nil {
			return // it knows less of fields
		}
		if wantData, wantErr := io.ReadAll(want.Body); want.StatusCode != whole.Status || wantErr == nil && !bytes.Equal(data, wantData) {
			t.Fatalf("body %q, %d; of net/http %q; taken %d", data, whole.Status, wantData, taken)
		}
	})
}

// A request may be sent again if its method, or a field of the client, says that it does the same each time (RFC 9110, section 9.2.2).
func TestIdempotent(t *testing.T) {
	for method, want := range map[string]bool{
		"GET": true, "HEAD": true, "OPTIONS": true, "TRACE": true, "PUT": true, "DELETE": true,
		"POST": false, "PATCH": false, "CONNECT": false, "delete": false,
	} {
		r := &Request{Method: []byte(method)}
		if got := r.Idempotent(); got != want {
			t.Errorf("%s: %t, want %t", method, got, want)
		}
		for _, name := range []string{"Idempotency-Key", "X-Idempotency-Key"} {
			r.Fields = []Field{{Name: []byte(name), Value: []byte("k")}}
			if !r.Idempotent() {
				t.Errorf("%s with %s may not be sent again", method, name)
			}
		}
	}
}
