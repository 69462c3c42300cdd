package web

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/testbed"
)

// frames returns the bytes of frames.
func frames(write ...func(*http2.Framer) error) []byte {
	var b bytes.Buffer
	f := http2.NewFramer(&b, nil)
	f.AllowIllegalWrites = true
	for _, w := range write {
		if err := w(f); err != nil {
			panic(err)
		}
	}
	return b.Bytes()
}

func headersFrame(id uint32, end bool, fields ...string) func(*http2.Framer) error {
	return func(f *http2.Framer) error {
		return f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndHeaders: true, EndStream: end, BlockFragment: headBlock(fields...)})
	}
}

func dataFrame(id uint32, end bool, text string) func(*http2.Framer) error {
	return func(f *http2.Framer) error { return f.WriteData(id, end, []byte(text)) }
}

// strict is a Pod of HTTP/1.1 that takes what is no request for a failure.
type strict struct {
	at netip.AddrPort
	mu sync.Mutex
	// wrong is what was no request, and had how many there were, by the address of the client.
	wrong []string
	had   map[string]int
}

func (r *rig) strict() *strict {
	p := &strict{had: map[string]int{}}
	p.at = r.Pod(func(c net.Conn) {
		in := bufio.NewReader(c)
		for {
			q, err := http.ReadRequest(in)
			if err == nil {
				_, err = io.Copy(io.Discard, q.Body)
			}
			var cut net.Error
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &cut) {
				return
			}
			p.mu.Lock()
			if err == nil { // what a client sent itself comes first
				all := strings.Join(q.Header["X-Forwarded-For"], ",")
				p.had[strings.TrimSpace(all[strings.LastIndexByte(all, ',')+1:])]++
			}
			if err != nil {
				p.wrong = append(p.wrong, err.Error())
			} else if len(q.Header["X-Forwarded-For"]) != 1 || len(q.TransferEncoding) > 0 && len(q.Header["Content-Length"]) > 0 {
				p.wrong = append(p.wrong, fmt.Sprint(q.Header))
			}
			p.mu.Unlock()
			if err != nil {
				return
			}
			answer := "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
			if q.Method == http.MethodHead {
				answer = strings.TrimSuffix(answer, "ok")
			}
			if _, err := io.WriteString(c, answer); err != nil {
				return
			}
		}
	})
	return p
}

// of returns how many requests of a client there were, and what was none, of any client. It forgets both.
func (p *strict) of(client string) (had int, wrong []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	had, wrong = p.had[client], p.wrong
	delete(p.had, client)
	p.wrong = nil
	return had, wrong
}

// rawFrames yields the frames that are whole, without a look at what is in them, as they arrive at a peer that only knows their lengths.
func rawFrames(b []byte) iter.Seq2[http2.FrameHeader, []byte] {
	const head = 9 // RFC 9113, 4.1
	return func(yield func(http2.FrameHeader, []byte) bool) {
		for len(b) >= head {
			length := int(b[0])<<16 | int(b[1])<<8 | int(b[2])
			if len(b) < head+length {
				return
			}
			h := http2.FrameHeader{
				Type: http2.FrameType(b[3]), Flags: http2.Flags(b[4]), Length: uint32(length), //nolint:gosec // 24 bits
				StreamID: binary.BigEndian.Uint32(b[5:]) & (1<<31 - 1),
			}
			if !yield(h, b[head:head+length]) {
				return
			}
			b = b[head+length:]
		}
	}
}

// opened returns how many streams the frames of a client can open: only HEADERS with a rising odd identifier do.
func opened(b []byte) (streams int) {
	last := uint32(0)
	for h := range rawFrames(b) {
		if h.Type == http2.FrameHeaders && h.StreamID%2 == 1 && h.StreamID > last {
			last = h.StreamID
			streams++
		}
	}
	return streams
}

// checkResets reads what one side of a connection has sent: nothing of a stream follows its RST_STREAM (RFC 9113, 5.1).
func checkResets(b []byte) error {
	reset := map[uint32]bool{}
	for h := range rawFrames(b) {
		switch h.Type {
		case http2.FrameRSTStream:
			reset[h.StreamID] = true
		case http2.FrameHeaders, http2.FrameContinuation, http2.FrameData, http2.FrameWindowUpdate:
			if reset[h.StreamID] {
				return fmt.Errorf("%s of stream %d after its RST_STREAM", h.Type, h.StreamID)
			}
		}
	}
	return nil
}

// The checks of the fuzzers see what they are for.
func TestFrameChecks(t *testing.T) {
	reset := func(f *http2.Framer) error { return f.WriteRSTStream(1, http2.ErrCodeCancel) }
	window := func(id uint32) func(*http2.Framer) error {
		return func(f *http2.Framer) error { return f.WriteWindowUpdate(id, 1) }
	}
	for name, c := range map[string]struct {
		frames []byte
		opened int
		bad    bool
	}{
		"one": {frames(headersFrame(1, true)), 1, false}, "cut": {frames(headersFrame(1, true, ":method GET"))[:9], 0, false},
		"trailers, even and falling": {
			frames(headersFrame(3, false), headersFrame(3, true), headersFrame(4, true), headersFrame(1, true)), 1, false,
		},
		"window after its end":   {frames(headersFrame(1, true), window(1), reset, window(0), window(3)), 1, false},
		"window after its reset": {frames(headersFrame(1, false), reset, window(1)), 1, true},
		"data after its reset":   {frames(headersFrame(1, false), reset, dataFrame(1, true, "x")), 1, true},
		"head after its reset":   {frames(headersFrame(1, false), reset, headersFrame(1, true)), 1, true},
	} {
		if n, err := opened(c.frames), checkResets(c.frames); n != c.opened || (err != nil) != c.bad {
			t.Errorf("%s: %d streams, %v", name, n, err)
		}
	}
}

// hasty makes a Service end soon what is not whole.
func (r *rig) hasty(annotations map[string]string, pod netip.AddrPort) {
	r.ask(annotations)
	r.headerTimeout, r.idleGrace = 50*time.Millisecond, 0
	r.service.Spec.IdleTimeout = dialect.Duration(30 * time.Millisecond)
	r.service.Spec.RequestTimeout = r.service.Spec.IdleTimeout
	r.set(pod)
}

// quiet waits until nothing of a client is left.
func (r *rig) quiet(t *testing.T) {
	t.Helper()
	testbed.Until(t, "the end of everything", func() error {
		if n, kept := r.connections(), r.engine.repeats.Load(); n > 0 || kept != 0 {
			return fmt.Errorf("%d connections, %d bytes are left", n, kept)
		}
		return nil
	})
	if n := r.server.Panics(); n > 0 {
		t.Fatalf("%d panics", n)
	}
}

// readToEnd returns what there is until the end of a connection, and sends nothing more after a GOAWAY.
func readToEnd(c net.Conn) ([]byte, error) {
	var b bytes.Buffer
	f := http2.NewFramer(io.Discard, io.TeeReader(c, &b))
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			break
		}
		if frame.Header().Type == http2.FrameGoAway {
			_ = c.(*net.TCPConn).CloseWrite()
		}
	}
	_, err := io.Copy(&b, c)
	return b.Bytes(), err
}

// checkAnswers reads what a client of HTTP/2 gets: frames as the standard has them, of streams of the client's own, with one head each.
func checkAnswers(b []byte) error {
	if err := checkResets(b); err != nil {
		return err
	}
	f := http2.NewFramer(io.Discard, bytes.NewReader(b))
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	heads, ended := map[uint32]int{}, map[uint32]bool{}
	for {
		frame, err := f.ReadFrame()
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) { // the last one may be cut
			return nil
		}
		if err != nil {
			return err
		}
		id := frame.Header().StreamID
		if id%2 == 0 && id != 0 {
			return fmt.Errorf("a frame of stream %d", id)
		}
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			if ended[id] {
				return fmt.Errorf("stream %d goes on after its end", id)
			}
			status := frame.PseudoValue("status")
			if status == "" && heads[id] == 0 {
				return fmt.Errorf("stream %d begins with trailers", id)
			}
			if status != "" && status[0] != '1' {
				heads[id]++
			}
			ended[id] = frame.StreamEnded()
		case *http2.DataFrame:
			if heads[id] != 1 || ended[id] {
				return fmt.Errorf("data of stream %d, which has %d heads, ended %v", id, heads[id], ended[id])
			}
			ended[id] = frame.StreamEnded()
		case *http2.RSTStreamFrame:
			ended[id] = true
		}
		if heads[id] > 1 {
			return fmt.Errorf("stream %d has %d heads", id, heads[id])
		}
	}
}

// Whatever frames a client sends, its connection ends, it gets frames as the standard has them, a Pod gets whole requests and no more
// than there are heads, and nothing stays behind.
func FuzzFramesOfClients(f *testing.F) {
	get := []string{":method GET", ":scheme http", ":path /", ":authority a"}
	post := append([]string{":method POST"}, get[1:]...)
	settings := func(f *http2.Framer) error { return f.WriteSettings() }
	for _, seed := range [][]byte{
		frames(settings, headersFrame(1, true, get...), headersFrame(3, true, append(get, "cookie a=b", "cookie c=d")...)),
		frames(settings, headersFrame(1, false, append(post, "content-length 5")...), dataFrame(1, false, "he"), dataFrame(1, true, "llo")),
		frames(settings, headersFrame(1, false, append(post, "trailer x")...), dataFrame(1, false, "a"), headersFrame(1, true, "x y")),
		frames(settings, headersFrame(1, false, append(post, "content-length 3")...), dataFrame(1, true, "hello")),
		frames(settings, headersFrame(1, false, ":method CONNECT", ":protocol websocket", ":scheme http", ":path /", ":authority a"),
			dataFrame(1, false, "\x81\x00")),
		frames(settings, headersFrame(1, false, ":method CONNECT", ":authority a:80"), dataFrame(1, true, "x")),
		frames(settings, headersFrame(1, true, append(get, "transfer-encoding chunked", "connection x", "te gzip")...)),
		frames(settings, headersFrame(1, true, append(get, "host b")...), headersFrame(3, true, ":method GET\r\nX: y", ":path /\r\n")),
		frames(settings, headersFrame(1, true, append(get, "x a\r\nb", "x_forwarded_for 1")...), headersFrame(2, true, get...)),
		frames(settings, headersFrame(5, true, get...), headersFrame(3, true, get...)),
		frames(settings, headersFrame(1, false, post...), // which gets no answer in time, and none behind its reset
			func(f *http2.Framer) error { return f.WritePriority(1, http2.PriorityParam{StreamDep: 1}) }),
		frames(settings, headersFrame(1, false, post...), func(f *http2.Framer) error { return f.WriteRSTStream(1, http2.ErrCodeCancel) },
			dataFrame(1, true, "late")),
		frames(settings, func(f *http2.Framer) error {
			return f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndStream: true, BlockFragment: headBlock(get...)[:3]})
		}, func(f *http2.Framer) error { return f.WriteContinuation(1, true, headBlock(get...)[3:]) }),
		frames(func(f *http2.Framer) error {
			return f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1}, http2.Setting{ID: http2.SettingHeaderTableSize},
				http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1 << 14})
		}, headersFrame(1, true, get...), func(f *http2.Framer) error { return f.WriteWindowUpdate(1, 1<<31-1) },
			func(f *http2.Framer) error { return f.WriteWindowUpdate(0, 0) }),
		frames(settings, func(f *http2.Framer) error { return f.WritePing(false, [8]byte{1}) },
			func(f *http2.Framer) error { return f.WritePriority(1, http2.PriorityParam{StreamDep: 1}) },
			func(f *http2.Framer) error { return f.WriteGoAway(0, http2.ErrCodeNo, []byte("bye")) },
			func(f *http2.Framer) error {
				return f.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2, EndHeaders: true})
			},
			func(f *http2.Framer) error { return f.WriteRawFrame(0xfa, 0xff, 7, []byte("unknown")) }),
	} {
		f.Add(seed)
	}
	r := newRig(f, nil)
	pod := r.strict()
	r.hasty(map[string]string{lbProtocol: "http"}, pod.at)
	clients := uint32(0)
	f.Fuzz(func(t *testing.T, b []byte) {
		clients++ // each has an address for itself: the Pod may be late with the requests of the one before
		if had, wrong := r.feeds(t, pod, net.IPv4(127, 1, byte(clients>>8), byte(clients)), b); len(wrong) > 0 || had > opened(b) {
			t.Fatalf("%d streams were opened, and the Pod has had %d requests, of which these are wrong: %q", opened(b), had, wrong)
		}
	})
}

// The Pod of FuzzFramesOfClients counts the requests of a client, and finds ones that are wrong.
func TestPodCountsRequests(t *testing.T) {
	get := []string{":method GET", ":scheme http", ":path /", ":authority a"}
	r := newRig(t, nil)
	pod := r.strict()
	r.hasty(map[string]string{lbProtocol: "http"}, pod.at)
	b := frames(func(f *http2.Framer) error { return f.WriteSettings() }, headersFrame(1, true, get...), headersFrame(3, true, get...))
	if had, wrong := r.feeds(t, pod, net.IPv4(127, 1, 0, 1), b); had != 2 || len(wrong) > 0 {
		t.Errorf("%d requests, of which these are wrong: %q", had, wrong)
	}
}

// feeds sends the frames of a client, and returns how many requests of it the Pod had, and what was wrong with them.
func (r *rig) feeds(t *testing.T, pod *strict, client net.IP, b []byte) (had int, wrong []string) {
	t.Helper()
	pod.of(client.String())
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: client}}).DialContext(t.Context(), "tcp", r.At.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(lbtest.Patience))
	go func() { _, _ = c.Write(append([]byte(http2.ClientPreface), b...)) }()
	got, err := readToEnd(c)
	if err != nil && !errors.Is(err, lbtest.ErrReset) {
		t.Fatalf("the connection goes on: %v", err)
	}
	if err := checkAnswers(got); err != nil {
		t.Fatalf("%v in %q", err, got)
	}
	r.quiet(t)
	return pod.of(client.String())
}

// Whatever frames a Pod answers with, clients of both versions get at most one answer for each request, nothing behind it, and the
// connections end.
func FuzzFramesOfPods(f *testing.F) {
	ok := []string{":status 200", "content-type text/plain"}
	for _, seed := range [][]byte{
		frames(headersFrame(1, false, ok...), dataFrame(1, true, "hello"), headersFrame(3, true, ":status 204")),
		frames(headersFrame(1, false, append(ok, "content-length 2")...), dataFrame(1, true, "hello")),
		frames(headersFrame(1, true, ":status 103"), headersFrame(1, false, ok...), dataFrame(1, false, "a"),
			headersFrame(1, true, "grpc-status 0")),
		frames(headersFrame(1, false, ":status 304", "content-length 5"), dataFrame(1, true, "HTTP/1.1 200 OK\r\n\r\n")),
		frames(headersFrame(1, false, ":status 200\r\nX: y"), headersFrame(1, false, append(ok, "transfer-encoding chunked")...)),
		frames(headersFrame(1, false, ":status 101", "upgrade x"), dataFrame(1, true, "x")),
		frames(headersFrame(1, false, append(ok, "x a\r\n\r\nHTTP/1.1 200 OK")...), dataFrame(1, true, "x")),
		frames(dataFrame(1, true, "no head"), headersFrame(1, true, "no status")),
		frames(headersFrame(7, true, ok...), headersFrame(2, true, ok...)),
		frames(func(f *http2.Framer) error { return f.WriteRSTStream(1, http2.ErrCodeRefusedStream) },
			func(f *http2.Framer) error { return f.WriteGoAway(1, http2.ErrCodeEnhanceYourCalm, nil) }),
		frames(func(f *http2.Framer) error {
			return f.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2, EndHeaders: true, BlockFragment: headBlock(":method GET")})
		}),
		frames(func(f *http2.Framer) error {
			return f.WriteSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams},
				http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<32 - 1})
		}, headersFrame(1, true, ok...)),
		frames(headersFrame(1, false, ok...), func(f *http2.Framer) error {
			return f.WriteDataPadded(1, true, []byte("padded"), make([]byte, 200))
		}),
	} {
		f.Add(seed)
	}
	r := newRig(f, nil)
	var mu sync.Mutex
	var answer []byte
	var wrong error         // seen by the Pod
	var served atomic.Int32 // connections of the Pod
	r.hasty(map[string]string{lbProtocol: "http", lbBackend: "h2c", "fairlead.dev/lb-eject": "off"}, r.Pod(func(c net.Conn) {
		served.Add(1)
		defer served.Add(-1)
		if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil {
			return
		}
		mu.Lock()
		b := answer
		mu.Unlock()
		var sent bytes.Buffer // by us
		defer func() {
			if err := checkResets(sent.Bytes()); err != nil {
				mu.Lock()
				wrong = fmt.Errorf("to the Pod: %w in %q", err, sent.Bytes())
				mu.Unlock()
			}
		}()
		in := http2.NewFramer(c, io.TeeReader(c, &sent))
		_ = in.WriteSettings()
		for { // the answer goes out when there is a request
			frame, err := in.ReadFrame()
			if err != nil {
				return
			}
			if frame.Header().Type == http2.FrameHeaders {
				break
			}
		}
		_, _ = c.Write(b)
		_ = c.(*net.TCPConn).CloseWrite() // so that the next request has a connection for itself
		_, _ = io.Copy(&sent, c)
	}))
	f.Fuzz(func(t *testing.T, b []byte) {
		mu.Lock()
		answer = b
		mu.Unlock()
		for _, method := range []string{"GET", "HEAD"} {
			if err := r.asksByHTTP1(method); err != nil {
				t.Fatalf("%s: %v", method, err)
			}
		}
		c, err := net.Dial("tcp", r.At.String())
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(lbtest.Patience))
		_, _ = c.Write(append([]byte(http2.ClientPreface), frames(func(f *http2.Framer) error { return f.WriteSettings() },
			headersFrame(1, true, ":method GET", ":scheme http", ":path /", ":authority a"))...))
		got, err := readToEnd(c)
		_ = c.Close()
		if err != nil && !errors.Is(err, lbtest.ErrReset) {
			t.Fatalf("the connection goes on: %v", err)
		}
		if err := checkAnswers(got); err != nil {
			t.Fatalf("%v in %q", err, got)
		}
		r.quiet(t)
		testbed.Until(t, "the end of the Pod's connections", func() error {
			if n := served.Load(); n > 0 {
				return fmt.Errorf("%d are open", n)
			}
			return nil
		})
		mu.Lock()
		err, wrong = wrong, nil
		mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
	})
}

// asksByHTTP1 sends a request and reads until the end of the connection: there is one answer, which may be cut, and nothing behind it.
func (r *rig) asksByHTTP1(method string) error {
	c, err := net.Dial("tcp", r.At.String())
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(lbtest.Patience))
	_, _ = fmt.Fprintf(c, "%s / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", method)
	got, err := io.ReadAll(c)
	if err != nil && !errors.Is(err, lbtest.ErrReset) {
		return fmt.Errorf("the connection goes on: %w", err)
	}
	in := bufio.NewReader(bytes.NewReader(got))
	for {
		a, err := http.ReadResponse(in, &http.Request{Method: method})
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w in %q", err, got)
		}
		_, err = io.Copy(io.Discard, a.Body)
		if a.StatusCode < 200 && a.StatusCode != http.StatusSwitchingProtocols {
			continue
		}
		if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			return fmt.Errorf("%w in %q", err, got)
		}
		if rest, _ := io.ReadAll(in); len(rest) > 0 || a.StatusCode == http.StatusSwitchingProtocols {
			return fmt.Errorf("%d, and %q behind the answer, in %q", a.StatusCode, rest, got)
		}
		return nil
	}
}
