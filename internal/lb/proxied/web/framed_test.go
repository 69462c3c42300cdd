package web

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// framedPod is a Pod that speaks HTTP/2 frame by frame: answer has the head of every request.
func (r *rig) framedPod(answer func(f *http2.Framer, h *http2.MetaHeadersFrame)) netip.AddrPort {
	r.Helper()
	return r.Pod(func(c net.Conn) { serveFrames(c, answer) })
}

func serveFrames(c io.ReadWriter, answer func(f *http2.Framer, h *http2.MetaHeadersFrame)) {
	if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil {
		return
	}
	f := http2.NewFramer(c, c)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	_ = f.WriteSettings()
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return
		}
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				_ = f.WriteSettingsAck()
			}
		case *http2.MetaHeadersFrame:
			answer(f, frame)
		}
	}
}

// headBlock is a header block of "name value" each.
func headBlock(fields ...string) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for _, field := range fields {
		name, value, _ := strings.Cut(field, " ")
		_ = e.WriteField(hpack.HeaderField{Name: name, Value: value})
	}
	return b.Bytes()
}

// What a Pod of HTTP/2 sends behind the head of an answer that has no body never reaches a client: on a kept connection of HTTP/1.1
// it would be the next answer.
func TestNoBodyBehindAnswersWithout(t *testing.T) {
	const forged = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
	r := newRig(t, map[string]string{lbProtocol: "http", lbBackend: "h2c"})
	r.set(r.framedPod(func(f *http2.Framer, h *http2.MetaHeadersFrame) {
		status, last := strings.TrimPrefix(h.PseudoValue("path"), "/"), "x y"
		if strings.HasSuffix(status, "t") { // with the news of trailers
			last = "trailer x"
		}
		_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: h.StreamID, EndHeaders: true,
			BlockFragment: headBlock(":status "+status[:3], last)})
		_ = f.WriteData(h.StreamID, true, []byte(forged))
	}))
	for _, version := range []string{"1.0", "1.1"} {
		for _, request := range []string{"HEAD /200", "HEAD /200t", "GET /204", "GET /304", "GET /304t", "HEAD /404"} {
			c := r.Dial()
			in := bufio.NewReader(c)
			method, _, _ := strings.Cut(request, " ")
			for _, ask := range []string{request, "GET /418"} {
				_, err := io.WriteString(c, ask+" HTTP/"+version+"\r\nHost: web\r\nConnection: keep-alive\r\n\r\n")
				r.Must(err)
				answer, err := http.ReadResponse(in, &http.Request{Method: method})
				if err != nil {
					t.Fatalf("%s, %s: %v", request, ask, err)
				}
				text, _ := io.ReadAll(answer.Body)
				want := ""
				if method = "GET"; ask == "GET /418" {
					want = forged
				}
				if !strings.Contains(ask, answer.Status[:3]) || string(text) != want {
					t.Errorf("%s, %s: %s %q", request, ask, answer.Status, text)
				}
			}
		}
	}
}
