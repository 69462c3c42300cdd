package web

import (
	"bytes"
	"encoding/binary"
	"net"
	"strings"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// A request on a connection that is kept allocates next to nothing.
func TestKeptConnectionsAllocateLittle(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.set(r.Pod(lbtest.AnswerAll))
	if n := r.AllocsPerRequest(); n > 3 {
		t.Errorf("%.1f allocations for a request, want at most 3", n)
	}
}

// So does each of several requests on one connection of HTTP/2.
func TestStreamsAllocateLittle(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.set(r.Pod(lbtest.AnswerAll))
	const batch = 8
	c := newStreamClient(r, r.Dial(), batch)
	if n := testing.AllocsPerRun(100, c.ask) / batch; n > 0.25 {
		t.Errorf("%.1f allocations for a request, want at most 0.25", n)
	}
}

// streamClient sends several requests of HTTP/2 at once, without memory of the heap.
type streamClient struct {
	*rig
	c       net.Conn
	request []byte // HEADERS of one after the other
	size    int    // of one
	next    uint32 // the number of the next stream
	in      []byte
	r, w    int
}

func newStreamClient(r *rig, c net.Conn, batch int) *streamClient {
	var b bytes.Buffer
	b.WriteString(http2.ClientPreface)
	f := http2.NewFramer(&b, nil)
	r.Must(f.WriteSettings())
	r.Must(f.WriteWindowUpdate(0, 1<<30))
	_, err := c.Write(b.Bytes())
	r.Must(err)
	s := &streamClient{rig: r, c: c, next: 1, in: make([]byte, 64<<10)}
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	for _, n := range []int{1, batch} { // the first request fills the dynamic table, to which the others refer
		b.Reset()
		block.Reset()
		for _, field := range []string{":method GET", ":scheme http", ":path /", ":authority a.example.com", "user-agent test"} {
			name, value, _ := strings.Cut(field, " ")
			r.Must(e.WriteField(hpack.HeaderField{Name: name, Value: value}))
		}
		for range n { // ask sets the number
			r.Must(f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: true}))
		}
		s.request, s.size = b.Bytes(), b.Len()/n
		s.ask()
	}
	return s
}

// ask sends the requests, and reads until each has an end.
func (s *streamClient) ask() {
	for at := 0; at < len(s.request); at += s.size {
		binary.BigEndian.PutUint32(s.request[at+5:], s.next)
		s.next += 2
	}
	if _, err := s.c.Write(s.request); err != nil {
		s.Fatal(err)
	}
	for left := len(s.request) / s.size; left > 0; {
		if s.answered() {
			left--
		}
	}
}

// answered reads a frame, and reports whether it ends an answer.
func (s *streamClient) answered() bool {
	const head = 9
	for s.w-s.r < head || s.w-s.r < head+s.length() {
		s.w = copy(s.in, s.in[s.r:s.w])
		s.r = 0
		n, err := s.c.Read(s.in[s.w:])
		if s.w += n; err != nil {
			s.Fatal(err)
		}
	}
	kind, flags, from := http2.FrameType(s.in[s.r+3]), http2.Flags(s.in[s.r+4]), s.r+head
	s.r = from + s.length()
	if kind == http2.FrameRSTStream || kind == http2.FrameGoAway {
		s.Fatalf("%v %x", kind, s.in[from:s.r])
	}
	ends := kind == http2.FrameData && flags.Has(http2.FlagDataEndStream)
	if ends && string(s.in[from:s.r]) != "hello" {
		s.Fatalf("%q", s.in[from:s.r])
	}
	return ends
}

// length is that of the next frame's payload.
func (s *streamClient) length() int { return int(binary.BigEndian.Uint32(s.in[s.r:]) >> 8) }
