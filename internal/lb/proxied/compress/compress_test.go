package compress

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
)

// choose returns the coding of an answer to a request, and the fields of the answer, one a line.
func choose(t *testing.T, request, answer string) (coding, fields string) {
	t.Helper()
	lines := func(text string) []byte { return []byte(strings.ReplaceAll(text, "\n", "\r\n") + "\r\n\r\n") }
	q, r := &http1.Request{}, &http1.Response{}
	q.Reset()
	r.Reset()
	if n, err := q.Parse(lines(request)); err != nil || n == 0 {
		t.Fatalf("%q: %d, %v", request, n, err)
	}
	if n, err := r.Parse(lines(answer)); err != nil || n == 0 {
		t.Fatalf("%q: %d, %v", answer, n, err)
	}
	takes := Accepts(0)
	if string(q.Method) != "HEAD" && q.Minor > 0 { // as callers have it
		takes = Accepted(q.Fields)
	}
	for i := range q.Fields { // the bytes of its connection are used again
		copy(q.Fields[i].Value, "##########")
	}
	if e := Choose([]string{"zstd", "gzip"}, takes, r); e != nil {
		coding = e.coding
		e.Release()
		if r.Length != -1 || r.Chunked {
			t.Errorf("%q: length %d, chunked %t", answer, r.Length, r.Chunked)
		}
	}
	var out []string
	for _, f := range r.Fields {
		out = append(out, fmt.Sprintf("%s: %s", f.Name, f.Value))
	}
	return coding, strings.Join(out, "\n")
}

// The coding follows from what a client accepts, in the order of the load balancer (RFC 9110, section 12.5.3).
func TestAcceptEncoding(t *testing.T) {
	for accept, want := range map[string]string{
		"": "", "gzip": "gzip", "GZip , deflate": "gzip", "gzip, zstd": "zstd", "gzip;q=1.0, zstd;q=0": "gzip", "zstd;q=0.001": "zstd",
		"*": "zstd", "*;q=0": "", "zstd;q=0, *": "gzip", "gzip;q=0": "", "identity": "", "br, deflate": "", "x-gzip": "", "gzip;q=x": "",
		"gzip;q=2": "", "gzip;q=-1": "", "gzip;level=1": "", ";": "",
		",,gzip,": "gzip", "gzip;q=0.5;q=0": "", "gzip\nAccept-Encoding: zstd": "zstd",
	} {
		request := "GET / HTTP/1.1\nHost: h"
		if accept != "" {
			request += "\nAccept-Encoding: " + accept
		}
		got, fields := choose(t, request, "HTTP/1.1 200 OK\nContent-Type: text/html")
		if got != want || !strings.Contains(fields, "Vary: Accept-Encoding") {
			t.Errorf("%q: %q, want %q; %s", accept, got, want, fields)
		}
	}
}

// What a client accepts is read for each request, so it takes no memory.
func TestAcceptedAllocatesNothing(t *testing.T) {
	fields := []http1.Field{{Name: []byte("Accept-Encoding"), Value: []byte("gzip, deflate, br;q=1.0, zstd;q=0.5")}}
	if n := testing.AllocsPerRun(100, func() { _ = Accepted(fields) }); n > 0 {
		t.Errorf("%.0f allocations", n)
	}
}

// Answers that gain nothing by it, that are no whole ones, or whose bytes something is about, go out as they are. The fields of the
// others are of their new form.
func TestAnswers(t *testing.T) {
	const get, head = "GET / HTTP/1.1\nHost: h\nAccept-Encoding: gzip", "HEAD / HTTP/1.1\nHost: h\nAccept-Encoding: gzip"
	const encoded = "\nVary: Accept-Encoding\nContent-Encoding: gzip"
	for _, c := range []struct{ request, answer, coding, fields string }{
		{get, "200 OK\nContent-Type: text/html; charset=utf-8\nContent-Length: 1024", "gzip", "Content-Type: text/html; charset=utf-8" + encoded},
		{get, "200 OK\nContent-Type: text/html\nContent-Length: 1023", "", "Content-Type: text/html\nContent-Length: 1023"},
		{get, "200 OK\nContent-Type: text/html\nContent-Length: 0", "", "Content-Type: text/html\nContent-Length: 0"},
		{get, "200 OK\nContent-Type: application/problem+json\nETag: \"a\"\nAccept-Ranges: bytes", "gzip",
			"Content-Type: application/problem+json\nETag: W/\"a\"" + encoded},
		{get, "404 Not Found\nContent-Type: Application/JSON\nETag: W/\"a\"\nVary: Origin", "gzip",
			"Content-Type: Application/JSON\nETag: W/\"a\"\nVary: Origin" + encoded},
		{get, "200 OK\nContent-Type: text/css\nVary: Origin, accept-encoding", "gzip",
			"Content-Type: text/css\nVary: Origin, accept-encoding\nContent-Encoding: gzip"},
		{get, "200 OK\nContent-Type: text/css\nVary: *", "gzip", "Content-Type: text/css\nVary: *\nContent-Encoding: gzip"},
		{get, "200 OK\nContent-Type: text/event-stream", "gzip", "Content-Type: text/event-stream" + encoded},
		{get, "200 OK\nContent-Type: image/svg+xml\nTransfer-Encoding: chunked", "gzip",
			"Content-Type: image/svg+xml\nTransfer-Encoding: chunked" + encoded},
		{head, "200 OK\nContent-Type: text/html\nContent-Length: 5000", "",
			"Content-Type: text/html\nContent-Length: 5000\nVary: Accept-Encoding"},
		{"GET / HTTP/1.0\nAccept-Encoding: gzip", "200 OK\nContent-Type: text/html", "", "Content-Type: text/html\nVary: Accept-Encoding"},
		{get, "304 Not Modified\nETag: \"a\"", "", "ETag: \"a\"\nVary: Accept-Encoding"},
		{get, "204 No Content", "", ""}, {get, "301 Moved\nContent-Type: text/html", "", "Content-Type: text/html"},
		{get, "500 Error\nContent-Type: text/html", "", "Content-Type: text/html"}, {get, "200 OK", "", ""},
		{get, "206 Partial\nContent-Type: text/html\nContent-Range: bytes 0-9/99", "", "Content-Type: text/html\nContent-Range: bytes 0-9/99"},
		{get, "200 OK\nContent-Type: text/html\nContent-Encoding: br", "", "Content-Type: text/html\nContent-Encoding: br"},
		{get, "200 OK\nContent-Encoding: identity\nContent-Type: text/html", "", "Content-Encoding: identity\nContent-Type: text/html"},
		{get, "200 OK\nContent-Type: text/html\nCache-Control: private, No-Transform", "",
			"Content-Type: text/html\nCache-Control: private, No-Transform"},
		{get, "200 OK\nContent-Type: text/html\nRepr-Digest: x", "", "Content-Type: text/html\nRepr-Digest: x"},
		{get, "200 OK\nContent-Type: application/grpc+json", "", "Content-Type: application/grpc+json"},
		{get, "200 OK\nContent-Type: application/grpc", "", "Content-Type: application/grpc"},
		{get, "200 OK\nContent-Type: image/png", "", "Content-Type: image/png"},
		{get, "200 OK\nContent-Type: video/mp4", "", "Content-Type: video/mp4"},
		{get, "200 OK\nContent-Type: application/octet-stream", "", "Content-Type: application/octet-stream"},
		{get, "200 OK\nContent-Type: text/html\nContent-Type: image/png", "", "Content-Type: text/html\nContent-Type: image/png"},
	} {
		if coding, fields := choose(t, c.request, "HTTP/1.1 "+c.answer); coding != c.coding || fields != c.fields {
			t.Errorf("%s: %q with\n%s\nwant %q with\n%s", c.answer, coding, fields, c.coding, c.fields)
		}
	}
}

func decoded(t testing.TB, coding string, from io.Reader) io.Reader {
	t.Helper()
	if coding == "gzip" {
		r, err := gzip.NewReader(from)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r, err := zstd.NewReader(from)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

// What was flushed can be read before the rest comes, and all of it is what was written, also by an Encoder that had another answer.
func TestEncoder(t *testing.T) {
	for coding := range pools {
		for round := range 3 {
			e := New(coding)
			var want, wire bytes.Buffer
			reader, writer := io.Pipe()
			got := make(chan []byte)
			go func() {
				r := decoded(t, coding, reader)
				for {
					buf := make([]byte, 64<<10)
					n, err := r.Read(buf)
					if n > 0 {
						got <- buf[:n]
					}
					if err != nil {
						close(got)
						return
					}
				}
			}()
			for i := range 20 {
				part := []byte(strings.Repeat(fmt.Sprint("part ", i, " of ", round, "\n"), 1+rand.IntN(200)))
				want.Write(part)
				if err := e.Write(part); err != nil {
					t.Fatal(err)
				}
				if some, err := e.Flush(); !some || err != nil {
					t.Fatalf("%s: %t, %v", coding, some, err)
				}
				if some, _ := e.Flush(); some {
					t.Errorf("%s: there is something without a write", coding)
				}
				all := bytes.Clone(e.Bytes())
				e.Take(len(all))
				wire.Write(all)
				go func() { _, _ = writer.Write(all) }()
				for have := 0; have < len(part); {
					data, ok := <-got
					if !ok || !bytes.HasPrefix(part[have:], data) {
						t.Fatalf("%s: %q is not what was written", coding, data)
					}
					have += len(data)
				}
			}
			if err := e.Close(); err != nil || !e.Closed() {
				t.Fatal(err)
			}
			wire.Write(e.Bytes())
			_ = writer.Close()
			for range got {
			}
			all, err := io.ReadAll(decoded(t, coding, &wire))
			if err != nil || !bytes.Equal(all, want.Bytes()) {
				t.Errorf("%s: %d bytes, want %d: %v", coding, len(all), want.Len(), err)
			}
			e.Release()
		}
	}
}

// A process has so many Encoders and no more.
func TestEncodersAreBounded(t *testing.T) {
	var all []*Encoder
	for range maxEncoders {
		all = append(all, New("zstd"))
	}
	if e := New("gzip"); e != nil {
		t.Error("there is one too many")
	}
	for _, e := range all {
		e.Release()
	}
	if e := New("gzip"); e == nil {
		t.Error("there is none after others have been released")
	} else {
		e.Release()
	}
}

func BenchmarkEncoder(b *testing.B) {
	page := []byte(strings.Repeat(`{"id": 12345, "name": "a book", "tags": ["new", "cheap"], "price": 17.5},`+"\n", 1000))
	for coding := range pools {
		b.Run(coding, func(b *testing.B) {
			b.SetBytes(int64(len(page)))
			n := 0
			for b.Loop() {
				e := New(coding)
				for part := page; len(part) > 0; part = part[min(len(part), 16<<10):] {
					_ = e.Write(part[:min(len(part), 16<<10)])
					_, _ = e.Flush()
				}
				_ = e.Close()
				n = len(e.Bytes())
				e.Release()
			}
			b.ReportMetric(float64(len(page))/float64(n), "ratio")
		})
	}
}
