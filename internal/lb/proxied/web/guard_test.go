package web

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// rejected are requests on whose ends servers do not agree: RFC 9112, sections 2.2, 5, 6.1 and 7.1.1.
var rejected = map[string]string{
	"CL.TE":                       "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
	"TE.CL":                       "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\nG",
	"TE.TE":                       "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
	"TE twice":                    "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"TE with a list":              "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
	"TE unknown":                  "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
	"TE with a blank before":      "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
	"TE with a vertical tab":      "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
	"TE of HTTP/1.0":              "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"folded line":                 "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
	"folded first line":           "POST / HTTP/1.1\r\n Host: a\r\n\r\n",
	"bare LF":                     "GET / HTTP/1.1\nHost: a\n\n",
	"bare LF in a field":          "GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",
	"bare CR":                     "GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n",
	"NUL":                         "GET / HTTP/1.1\r\nHost: a\x00\r\n\r\n",
	"Content-Length twice":        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
	"Content-Length twice, alike": "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
	"Content-Length with a list":  "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 1\r\n\r\na",
	"Content-Length with a sign":  "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\na",
	"Content-Length in hex":       "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x1\r\n\r\na",
	"Content-Length too long":     "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\na",
	"Content-Length empty":        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: \r\n\r\na",
	"chunk extension":             "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\na\r\n0\r\n\r\n",
	"chunk ended by LF":           "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\na\r\n0\r\n\r\n",
	"chunk longer than it says":   "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
	"chunk size with a sign":      "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n+1\r\na\r\n0\r\n\r\n",
	"chunk size with 0x":          "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n",
	"chunk size too long":         "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n11111111111111111\r\na\r\n",
	"chunk size empty":            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n\r\na\r\n0\r\n\r\n",
	"length in trailers":          "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 1\r\n\r\na",
	"no name":                     "GET / HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n",
	"blank in a name":             "GET / HTTP/1.1\r\nHost: a\r\nX Y: b\r\n\r\n",
	"many blank lines before":     "\r\n\r\n\r\n\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
	"LF before":                   "\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
	"CR before":                   "\rGET / HTTP/1.1\r\nHost: a\r\n\r\n",
	"HTTP/2 after a blank line":   "\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	"another version":             "GET / HTTP/1.2\r\nHost: a\r\n\r\n",
	"no version":                  "GET /\r\n\r\n",
	"HTTP/2 after a request":      "GET / HTTP/1.1\r\nHost: a\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	"HTTP/2 with fields":          "PRI * HTTP/2.0\r\nHost: a\r\n\r\n",
	"HTTP/2 without its end":      "PRI * HTTP/2.0\r\n\r\n",
	"garbage":                     "\x16\x03\x01\x02\x00\x01",
}

// Each is rejected by 400, or its body is, and nothing that follows reaches a Pod.
func TestSmugglingIsRejected(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	var smuggled, whole atomic.Int32
	r.set(r.Web(func(w http.ResponseWriter, q *http.Request) {
		if _, err := io.ReadAll(q.Body); err == nil {
			whole.Add(1)
		}
		if q.URL.Path == "/smuggled" {
			smuggled.Add(1)
		}
	}))
	for name, text := range rejected {
		whole.Store(0)
		c := r.Dial()
		in := bufio.NewReader(c)
		if good, bad, ok := strings.Cut(text, "\r\n\r\nPRI"); ok {
			_, _ = io.WriteString(c, good+"\r\n\r\n")
			if answer, err := http.ReadResponse(in, nil); err != nil || answer.ContentLength != 0 {
				t.Fatalf("%v, %v", answer, err)
			}
			text = "PRI" + bad
			whole.Store(0)
		}
		_, _ = io.WriteString(c, text+"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n")
		answer, err := http.ReadResponse(in, nil)
		if err != nil || answer.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %v, %v", name, answer, err)
			continue
		}
		rest, err := io.ReadAll(in)
		if strings.Contains(string(rest), "HTTP/1.1") || err != nil && !errors.Is(err, lbtest.ErrReset) {
			t.Errorf("%s: the connection goes on: %q, %v", name, rest, err)
		}
		if whole.Load() > 0 || smuggled.Load() > 0 {
			t.Errorf("%s: a Pod has it", name)
		}
	}
	good := "POST /1 HTTP/1.1\r\nHost: a\r\nContent-Length:  3 \r\n\r\nabc" +
		"POST /2 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\nA\r\n0123456789\r\n1\r\na\r\n0\r\nX-T: 1\r\n\r\n" +
		"\r\n\r\nGET /3 HTTP/1.1\r\nHost: a\r\n\r\n"
	for _, size := range []int{1, 7, len(good)} { // in parts
		whole.Store(0)
		c := r.Dial()
		go func() {
			for rest := good; rest != ""; {
				n := min(size, len(rest))
				if _, err := io.WriteString(c, rest[:n]); err != nil {
					return
				}
				rest = rest[n:]
			}
		}()
		in := bufio.NewReader(c)
		for range 3 {
			answer, err := http.ReadResponse(in, nil)
			if err != nil || answer.StatusCode != http.StatusOK {
				t.Fatalf("%d bytes at a time: %v, %v", size, answer, err)
			}
		}
		if whole.Load() != 3 {
			t.Errorf("%d bytes at a time: %d requests", size, whole.Load())
		}
	}
}

// No request switches the guard off for the requests after it on the connection.
func TestTheGuardStays(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	var smuggled atomic.Int32
	r.set(r.Web(func(_ http.ResponseWriter, q *http.Request) {
		_, _ = io.ReadAll(q.Body)
		if q.URL.Path == "/smuggled" {
			smuggled.Add(1)
		}
	}))
	for name, text := range map[string]string{
		"an empty Upgrade":              "GET / HTTP/1.1\r\nHost: a\r\nUpgrade:\r\n\r\n",
		"an empty Upgrade, and another": "GET / HTTP/1.1\r\nHost: a\r\nUpgrade:\r\nUpgrade: websocket\r\n\r\n",
		"Upgrade in trailers":           "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nUpgrade: x\r\n\r\n",
		"Upgrade of the server itself":  "OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
		"Upgrade for a 405":             "CONNECT b:1 HTTP/1.1\r\nHost: b:1\r\nUpgrade: x\r\n\r\n",
	} {
		c := r.Dial()
		in := bufio.NewReader(c)
		_, _ = io.WriteString(c, text)
		answer, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		_, _ = io.Copy(io.Discard, answer.Body)
		_, _ = io.WriteString(c, "POST /smuggled HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG")
		rest, err := io.ReadAll(in)
		if smuggled.Swap(0) > 0 || strings.Contains(string(rest), "200 OK") || err != nil && !errors.Is(err, lbtest.ErrReset) {
			t.Errorf("%s: the next request is not guarded: %q, %v", name, rest, err)
		}
	}
}

// What passes the guard is read by net/http as the guard has read it, or not at all.
func FuzzRequests(f *testing.F) {
	for _, text := range rejected {
		f.Add([]byte(text))
	}
	f.Add([]byte("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"))
	f.Add([]byte(wholePreface))
	f.Fuzz(func(t *testing.T, b []byte) {
		var whole, parts requests
		good := whole.feed(b)
		for i := range b[:good] {
			if parts.feed(b[i:i+1]) != 1 {
				t.Fatalf("byte %d is good with others, and not alone", i)
			}
		}
		if good == len(b) && parts.state != whole.state || good < len(b) && parts.feed(b[good:good+1]) != 0 {
			t.Fatal("in parts it is read in another way")
		}
		// Requests of the guard's and of net/http's end at the same bytes.
		var g requests
		ends := map[int]bool{}
		for i := range b[:good] {
			g.feed(b[i : i+1])
			if g.state == inRequestLine && len(g.line) == 0 {
				ends[i+1] = true
			}
			if g.state == passing || g.state == inPreface {
				return
			}
		}
		under := bytes.NewReader(b[:good])
		in := bufio.NewReaderSize(under, 16)
		for {
			q, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			if _, err := io.Copy(io.Discard, q.Body); err != nil {
				return
			}
			if end := good - under.Len() - in.Buffered(); !ends[end] {
				t.Fatalf("net/http has a request end at %d of %q", end, b[:good])
			}
		}
	})
}
