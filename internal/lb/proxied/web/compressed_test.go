package web

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/fairlead/fairlead/internal/testbed"
)

// decompressed reads a body by its content coding.
func (r *rig) decompressed(coding string, body io.Reader) io.Reader {
	r.Helper()
	switch coding {
	case "gzip":
		z, err := gzip.NewReader(body)
		r.Must(err)
		return z
	case "zstd":
		z, err := zstd.NewReader(body)
		r.Must(err)
		r.Cleanup(z.Close)
		return z
	}
	return body
}

// Answers are compressed for clients that accept it, whatever protocol they and Pods speak, and are the same then. Trailers stay, and
// other media types, parts, and answers to HEAD go out as they are.
func TestCompression(t *testing.T) {
	page := bytes.Repeat([]byte("<p>A text that is long enough to be sent in several parts.</p>\n"), 20_000)
	serve := func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		w.Header().Set("Etag", `"v1"`)
		switch q.URL.Path {
		case "/chunked":
			w.Header().Set("Trailer", "X-Sum")
			for part := page; len(part) > 0; part = part[min(len(part), 100_000):] {
				_, _ = w.Write(part[:min(len(part), 100_000)])
				_ = http.NewResponseController(w).Flush()
			}
			w.Header().Set("X-Sum", fmt.Sprint(len(page)))
		case "/empty":
			_ = http.NewResponseController(w).Flush()
		case "/small":
			_, _ = io.WriteString(w, "small")
		case "/png":
			w.Header().Set("Content-Type", "image/png")
			fallthrough
		default:
			http.ServeContent(w, q, "", time.Unix(0, 0), bytes.NewReader(page))
		}
	}
	for _, backend := range []string{"http", "h2c"} {
		r := newRig(t, map[string]string{lbProtocol: "http", lbBackend: backend, "fairlead.dev/lb-compress": "zstd,gzip"})
		r.set(r.h2cPod(serve))
		for _, version := range []int{1, 2} {
			client := r.clientOf(version)
			for _, c := range []struct{ method, path, accept, more, want string }{
				{"GET", "/", "gzip", "", `200 gzip W/"v1" Accept-Encoding true`},
				{"GET", "/chunked", "gzip, zstd", "", `200 zstd W/"v1" Accept-Encoding true`},
				{"GET", "/chunked", "br", "", `200  "v1" Accept-Encoding true`},
				{"GET", "/empty", "gzip", "", `200 gzip W/"v1" Accept-Encoding false`},
				{"GET", "/small", "gzip", "", `200  "v1"  false`},
				{"GET", "/png", "gzip", "", `200  "v1"  true`},
				{"GET", "/", "gzip", "Range: bytes=0-9", `206  "v1"  false`},
				{"GET", "/", "gzip", `If-None-Match: W/"v1"`, `304  "v1" Accept-Encoding false`},
				{"HEAD", "/", "gzip", "", `200  "v1" Accept-Encoding false`},
			} {
				if c.path == "/empty" && backend == "h2c" { // there its length is known
					continue
				}
				fields := []string{"Accept-Encoding: " + c.accept}
				if c.more != "" {
					fields = append(fields, c.more)
				}
				q, err := http.NewRequestWithContext(t.Context(), c.method, "http://"+r.At.String()+c.path, nil)
				r.Must(err)
				for _, f := range fields {
					name, value, _ := strings.Cut(f, ": ")
					q.Header.Set(name, value)
				}
				answer, err := client.Do(q)
				r.Must(err)
				wire, err := io.ReadAll(answer.Body)
				r.Must(err)
				h := answer.Header
				body := wire
				if coding := h.Get("Content-Encoding"); coding != "" {
					body, err = io.ReadAll(r.decompressed(coding, bytes.NewReader(wire)))
					r.Must(err)
					if len(wire) > len(page)/10 || answer.ContentLength >= 0 && c.path != "/empty" {
						t.Errorf("%s %s: %d bytes, length %d", c.path, c.accept, len(wire), answer.ContentLength)
					}
				}
				got := fmt.Sprint(answer.StatusCode, " ", h.Get("Content-Encoding"), " ", h.Get("Etag"), " ", h.Get("Vary"), " ",
					bytes.Equal(body, page))
				if got != c.want || c.path == "/chunked" && answer.Trailer.Get("X-Sum") != fmt.Sprint(len(page)) {
					t.Errorf("HTTP/%d to %s, %s %s for %s: %q with trailers %v, want %q", version, backend, c.method, c.path, c.accept, got,
						answer.Trailer, c.want)
				}
				_ = answer.Body.Close()
			}
		}
	}
}

// Each event of a stream reaches the client before the next one is sent, and a client that leaves ends the request.
func TestCompressedEvents(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-compress": "gzip,zstd"})
	next, left := make(chan string), make(chan bool, 4)
	r.set(r.Web(func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for {
			select {
			case event := <-next:
				_, _ = io.WriteString(w, event)
				_ = http.NewResponseController(w).Flush()
			case <-q.Context().Done():
				left <- true
				return
			}
		}
	}))
	for _, version := range []int{1, 2} {
		for _, coding := range []string{"gzip", "zstd"} {
			q, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+r.At.String(), nil)
			r.Must(err)
			q.Header.Set("Accept-Encoding", coding)
			go func() { next <- "data: 0\n" }()
			answer, err := r.clientOf(version).Do(q)
			r.Must(err)
			if got := answer.Header.Get("Content-Encoding"); got != coding {
				t.Fatalf("HTTP/%d: %q, want %q", version, got, coding)
			}
			in := bufio.NewReader(r.decompressed(coding, answer.Body))
			for i := range 5 {
				if i > 0 {
					next <- fmt.Sprintf("data: %d\n", i)
				}
				lines := make(chan string, 1)
				go func() {
					line, _ := in.ReadString('\n')
					lines <- line
				}()
				if got := testbed.Receive(t, "an event", lines); got != fmt.Sprintf("data: %d\n", i) {
					t.Fatalf("HTTP/%d, %s: %q", version, coding, got)
				}
			}
			_ = answer.Body.Close()
			testbed.Receive(t, "the end of the request", left)
		}
	}
}

// The head of a request counts as it came, also when its body is read over it before the answer comes.
func TestCompressionAfterAnUpload(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-compress": "gzip"})
	began := make(chan bool, 1)
	r.set(r.Web(func(w http.ResponseWriter, q *http.Request) {
		began <- true
		_, _ = io.Copy(io.Discard, q.Body)
		w.Header().Set("Content-Type", "text/plain")
		_, _ = w.Write(make([]byte, 5000))
	}))
	const accepts, not = "Accept-Encoding: gzip", "Xccept-Encoding: gzip" // of one length
	for _, padding := range []int{0, 5000} {                              // a head of more than 4 KiB stays where it is, below the body
		for field, other := range map[string]string{accepts: not, not: accepts} {
			text := fmt.Sprintf("POST / HTTP/1.1\r\nHost: h\r\n%s\r\nX-Padding: %s\r\nContent-Length: 20000\r\n\r\n", field,
				strings.Repeat("x", padding))
			c := r.Dial()
			_, err := io.WriteString(c, text)
			r.Must(err)
			testbed.Receive(t, "the head", began)
			body := strings.Replace(text, field, other, 1)
			_, err = io.WriteString(c, body+strings.Repeat("x", 20_000-len(body)))
			r.Must(err)
			answer, err := http.ReadResponse(bufio.NewReader(c), nil)
			r.Must(err)
			if got := answer.Header.Get("Content-Encoding"); (got == "gzip") != (field == accepts) {
				t.Errorf("%s, with %d bytes of padding: %q", field, padding, got)
			}
		}
	}
}

// An Ingress has other codings than its front, or none.
func TestCompressedIngress(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-compress": "gzip"})
	r.extra = map[string]string{"zstd": "zstd", "none": "off"}
	r.ingress(map[string]string{"zstd": "", "none": "", "front": ""}, r.Web(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain")
		_, _ = w.Write(make([]byte, 5000))
	}))
	for path, want := range map[string]string{"/zstd": "zstd", "/none": "", "/front": "gzip"} {
		answer, _ := r.sends(r.clientOf(1), "GET", path, nil, "Accept-Encoding: gzip, zstd")
		if got := answer.Header.Get("Content-Encoding"); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
}
