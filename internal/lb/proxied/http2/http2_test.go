package http2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2/hpack"

	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
)

// Every header block is read as it was meant, whatever the lengths, and without another block.
func TestEncoder(t *testing.T) {
	var want []string
	var e Encoder
	for _, status := range []int{200, 204, 404, 418, 599} {
		e.Status(status)
	}
	want = append(want, ":status 200", ":status 204", ":status 404", ":status 418", ":status 599")
	for _, p := range [][2]string{{":method", "GET"}, {":method", "200"}, {":method", "PATCH"}, {":scheme", "https"}, {":scheme", "POST"}} {
		e.Pseudo(p[0], p[1])
		want = append(want, p[0]+" "+p[1])
	}
	for name := range staticNames {
		if name[0] != ':' {
			Field(&e, []byte(strings.ToUpper(name)), name+"?")
			want = append(want, name+" "+name+"?")
		}
	}
	for _, n := range []int{0, 1, 126, 127, 128, 254, 255, 256, 16383, 16384, 70000} {
		Field(&e, []byte("X-"+strings.Repeat("N", n%300)), []byte(strings.Repeat("v", n)))
		want = append(want, "x-"+strings.Repeat("n", n%300)+" "+strings.Repeat("v", n))
	}
	got, err := hpack.NewDecoder(0, nil).DecodeFull(e.Block)
	if err != nil || len(got) != len(want) {
		t.Fatalf("%d fields of %d, %v", len(got), len(want), err)
	}
	for i, f := range got {
		if f.Name+" "+f.Value != want[i] {
			t.Errorf("%.80q, want %.80q", f.Name+" "+f.Value, want[i])
		}
	}
}

// fed is a connection on which bytes have come, and then the end.
type fed struct {
	net.Conn
	*bytes.Reader
	mu    sync.Mutex
	wrote int
}

func (f *fed) Read(p []byte) (int, error) { return f.Reader.Read(p) }

func (f *fed) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wrote += len(p)
	return len(p), nil
}

func (f *fed) Close() error                     { return nil }
func (f *fed) CloseWrite() error                { return nil }
func (f *fed) SetReadDeadline(time.Time) error  { return nil }
func (f *fed) SetWriteDeadline(time.Time) error { return nil }

// FuzzConn has a connection of either end read any bytes: it ends, all streams with it, and what it has written is bounded by what
// has come.
func FuzzConn(f *testing.F) {
	var e Encoder
	e.Pseudo(":method", "POST")
	e.Pseudo(":scheme", "http")
	Field(&e, []byte(":authority"), "a")
	Field(&e, []byte(":path"), "/")
	settings := appendHeader(nil, 0, frameSettings, 0, 0)
	request := appendBlock(nil, e.Block, 1, false, maxFrame)
	data := append(appendHeader(nil, 3, frameData, flagEndStream, 1), "abc"...)
	f.Add(bytes.Join([][]byte{settings, request, data}, nil))
	f.Add(bytes.Join([][]byte{settings, request, appendReset(nil, 1, Cancel), appendWindowUpdate(nil, 0, 5), appendGoAway(nil, 0, 0)}, nil))
	var answer Encoder
	answer.Status(200)
	f.Add(bytes.Join([][]byte{settings, appendBlock(nil, answer.Block, 1, false, 1), data}, nil))
	f.Add(bytes.Join([][]byte{settings, request, appendHeader(nil, 1<<20, frameData, 0, 1)}, nil)) // ends before it is accepted
	f.Add(append(settings, appendHeader(nil, 5, framePriority, 0, 1)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, client := range []bool{false, true} {
			var wg sync.WaitGroup
			o := Options{Go: func(f func()) { wg.Go(f) }, MaxHead: 4096, MaxStreams: 10, HeadTimeout: time.Second, IdleTimeout: time.Second,
				WriteTimeout: time.Second}
			o.Accept = func(s *Stream) {
				wg.Go(func() {
					var e Encoder
					e.Status(200)
					_ = s.Head(&e, false)
					for !s.Ended() && s.Fill(time.Second) == nil {
						p, _ := s.Peek()
						_ = s.Write(p, false, time.Millisecond)
						s.Take(len(p))
					}
					_ = s.End(nil)
					s.Close(InternalError)
				})
			}
			in := &fed{Reader: bytes.NewReader(b)}
			var c *Conn
			if client {
				c = NewClient(in, o)
				s := c.Open(false)
				wg.Go(func() {
					var e Encoder
					e.Pseudo(":method", "GET")
					_ = s.Head(&e, true)
					s.Flush()
					var r http1.Response
					_ = s.Answer(&r, time.Second)
					s.Close(Cancel)
				})
			} else {
				c = NewServer(in, []byte(Preface), o)
			}
			if err := c.Run(); err == nil {
				t.Error("the connection has no end")
			}
			wg.Wait()
			if len(c.streams) > 0 || c.reserved != 0 {
				t.Errorf("%d streams are left", len(c.streams))
			}
			if in.wrote > 300+40*len(b) {
				t.Errorf("%d bytes for %d", in.wrote, len(b))
			}
		}
	})
}

// stuck is a connection of a client that sends a text, and never reads: a write waits for the end.
type stuck struct {
	fed
	closed chan struct{}
	once   sync.Once
}

func (s *stuck) Write([]byte) (int, error) {
	<-s.closed
	return 0, net.ErrClosed
}

func (s *stuck) Close() error {
	s.once.Do(func() { close(s.closed) })
	return nil
}

// A client that asks and never reads costs no more memory than mostOut, though each request has its answer.
func TestAnswersThatAreNotRead(t *testing.T) {
	const requests, size = 3000, 2 << 10
	var e, answer Encoder
	e.Pseudo(":method", "HEAD")
	e.Pseudo(":scheme", "http")
	e.Pseudo(":path", "/")
	answer.Status(308)
	Field(&answer, []byte("location"), strings.Repeat("l", size))
	b := appendHeader([]byte(Preface), 0, frameSettings, 0, 0)
	for i := range uint32(requests) {
		b = appendBlock(b, e.Block, 2*i+1, true, maxFrame)
	}
	var wg sync.WaitGroup
	o := Options{Go: func(f func()) { wg.Go(f) }, MaxHead: 64 << 10, MaxStreams: 100, HeadTimeout: time.Second, IdleTimeout: time.Second,
		WriteTimeout: time.Second}
	most := 0
	o.Accept = func(s *Stream) {
		_ = s.Head(&Encoder{Block: answer.Block}, true)
		s.c.mu.Lock()
		most = max(most, len(s.c.out))
		s.c.mu.Unlock()
		s.Close(NoError)
	}
	in := &stuck{fed: fed{Reader: bytes.NewReader(b)}, closed: make(chan struct{})}
	if err := NewServer(in, nil, o).Run(); !errors.Is(err, errFlood) {
		t.Error(err)
	}
	wg.Wait()
	if most < mostOut || most > mostOut+600*size { // what one read can ask for is answered
		t.Errorf("%d bytes wait", most)
	}
}

// parts is a connection on which texts have come, one by one.
type parts struct {
	fed
	texts [][]byte
}

func (p *parts) Read(b []byte) (int, error) {
	if len(p.texts) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.texts[0])
	p.texts = p.texts[1:]
	return n, nil
}

func requestBlock() []byte {
	var e Encoder
	e.Pseudo(":method", "GET")
	e.Pseudo(":scheme", "http")
	e.Pseudo(":path", "/")
	return e.Block
}

func testOptions(wg *sync.WaitGroup, accept func(*Stream)) Options {
	return Options{Go: func(f func()) { wg.Go(f) }, MaxHead: 64 << 10, MaxStreams: 100, HeadTimeout: time.Second, IdleTimeout: time.Second,
		WriteTimeout: time.Second, Accept: accept}
}

// A request that was on its way when the connection began to leave is refused, and nothing that follows on its stream ends the others.
func TestRequestsAfterGoAway(t *testing.T) {
	settings := appendHeader([]byte(Preface), 0, frameSettings, 0, 0)
	late := appendBlock(nil, requestBlock(), 3, false, maxFrame)
	late = append(appendHeader(late, 3, frameData, 0, 3), "abc"...)
	late = appendReset(appendWindowUpdate(late, 3, 5), 3, Cancel)
	in := &parts{texts: [][]byte{appendBlock(settings, requestBlock(), 1, true, maxFrame), late}}
	var wg sync.WaitGroup
	var c *Conn
	var first *Stream
	c = NewServer(in, nil, testOptions(&wg, func(s *Stream) {
		first = s
		c.Leave()
	}))
	if err := c.Run(); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	if c.last != 1 || !c.was(3) {
		t.Errorf("the last stream is %d, the late one was refused: %t", c.last, c.was(3))
	}
	first.Close(Cancel)
	wg.Wait()
}

// A PRIORITY of a wrong length resets its stream once, also one that has ended (RFC 9113, section 6.3), and nothing follows the reset. Of
// a stream that has not begun it ends the connection of a client, but not the one to a Pod, which others use.
func TestWrongPriorities(t *testing.T) {
	var answer Encoder
	answer.Status(200)
	for _, client := range []bool{false, true} {
		var wg sync.WaitGroup
		c := newConn(&fed{Reader: bytes.NewReader(nil)}, nil, testOptions(&wg, nil), client)
		r := c.reader()
		gets := func(kind, flags byte, id uint32, p []byte) (resets string, err error) {
			before := len(c.out)
			err = r.frame(header{len(p), kind, flags, id}, p)
			for b := c.out[before:]; len(b) >= headSize; b = b[headSize+headerOf(b).length:] {
				if h := headerOf(b); h.kind == frameReset {
					resets += fmt.Sprintf("%d by %d;", h.stream, binary.BigEndian.Uint32(b[headSize:]))
				}
			}
			return resets, err
		}
		begin := func(flags byte, id uint32) (s *Stream) {
			block := requestBlock()
			if client {
				s, block = c.Open(false), answer.Block
				_ = s.Head(&Encoder{Block: requestBlock()}, true)
			}
			if resets, err := gets(frameHeaders, flags|flagEndHeaders, id, block); err != nil || resets != "" {
				t.Fatal(err, resets)
			}
			if !client {
				s = c.streams[id]
				_ = s.Head(&Encoder{Block: answer.Block}, true)
			}
			return s
		}
		_ = begin(0, 1)
		begin(flagEndStream, 3).Close(NoError)
		for _, step := range []struct {
			kind   byte
			id     uint32
			length int
			want   string
		}{
			{framePriority, 1, 5, ""}, {framePriority, 1, 4, "1 by 6;"}, {framePriority, 1, 4, ""}, {frameWindowUpdate, 1, 4, ""},
			{framePriority, 3, 5, ""}, {framePriority, 3, 6, "3 by 6;"}, {framePriority, 3, 6, ""}, {framePriority, 5, 5, ""},
		} {
			if got, err := gets(step.kind, 0, step.id, make([]byte, step.length)); err != nil || got != step.want {
				t.Errorf("client %t: %+v: resets %q, %v", client, step, got, err)
			}
		}
		for _, idle := range []uint32{2, 5} {
			got, err := gets(framePriority, 0, idle, make([]byte, 4))
			var ends connError
			if errors.As(err, &ends) == client || !client && ends.code != FrameSize || got != "" {
				t.Errorf("client %t: stream %d, which has not begun: resets %q, %v", client, idle, got, err)
			}
		}
	}
}

// A Pod that sends large interim heads has no more memory than two heads may have.
func TestInterimHeadsAreBounded(t *testing.T) {
	var e Encoder
	e.Status(103)
	Field(&e, []byte("link"), strings.Repeat("l", 30<<10))
	b := appendHeader(nil, 0, frameSettings, 0, 0)
	for range maxAnswers {
		b = appendBlock(b, e.Block, 1, false, maxFrame)
	}
	var wg sync.WaitGroup
	c := NewClient(&fed{Reader: bytes.NewReader(b)}, testOptions(&wg, nil))
	s := c.Open(false)
	_ = s.Head(&Encoder{Block: requestBlock()}, true)
	_ = c.Run()
	var r http1.Response
	n := 0
	for ; s.Answer(&r, time.Second) == nil; n++ {
	}
	if n == 0 || n > 4 {
		t.Errorf("%d heads are in memory", n)
	}
	s.Close(Cancel)
	wg.Wait()
}

// Nothing of a large head is kept with a connection.
func TestLargeHeadsAreNotKept(t *testing.T) {
	e := Encoder{Block: requestBlock()}
	for range 500 {
		Field(&e, []byte("x-large"), strings.Repeat("l", 60))
	}
	var wg sync.WaitGroup
	c := NewServer(&fed{Reader: bytes.NewReader(nil)}, appendBlock(nil, e.Block, 1, true, maxFrame), testOptions(&wg, nil))
	r := c.reader()
	r.greeted = true
	if _, err := r.consume(); err != nil || len(r.fresh) != 1 || len(r.fresh[0].Request.Fields) != 500 {
		t.Fatal(err, len(r.fresh))
	}
	if text, fields := cap(r.block.text), cap(r.block.fields); text > keptText || fields > keptFields {
		t.Errorf("%d bytes and %d fields are kept", text, fields)
	}
	s := r.fresh[0]
	if s.Close(NoError); cap(s.arena) > 4*keptText || cap(s.Request.Fields) > 4*keptFields {
		t.Errorf("%d bytes and %d fields are kept for another stream", cap(s.arena), cap(s.Request.Fields))
	}
}

// While a connection has streams it is not idle, however long they wait for a Pod.
func TestStreamsAreNotIdle(t *testing.T) {
	var wg sync.WaitGroup
	r := NewServer(&fed{Reader: bytes.NewReader(nil)}, nil, testOptions(&wg, nil)).reader()
	r.idleSince = time.Now().Add(-time.Hour)
	r.streams[1] = newStream(r.Conn, 1)
	if by, err := r.deadline(); err != nil || time.Until(by) > r.o.IdleTimeout/4 {
		t.Error(by, err)
	}
	delete(r.streams, 1)
	if by, err := r.deadline(); err == nil {
		t.Error("an idle connection stays until", by)
	}
	r.since = time.Now().Add(-r.o.HeadTimeout)
	if by, err := r.deadline(); err == nil {
		t.Error("a head may take until", by)
	}
}

// ending is a connection that tells when its end was sent.
type ending struct {
	*net.TCPConn
	sent chan struct{}
	once sync.Once
}

func (e *ending) CloseWrite() error {
	err := e.TCPConn.CloseWrite()
	e.once.Do(func() { close(e.sent) })
	return err
}

// A client that still sends has the last answer as a whole: a connection that is closed with bytes unread is reset.
func TestLastAnswerIsWhole(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	slow := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error { // the answer waits to be sent
		return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4<<10) })
	}}
	client, err := slow.DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	const size = 60_000
	in := &ending{TCPConn: conn.(*net.TCPConn), sent: make(chan struct{})}
	var wg sync.WaitGroup
	var c *Conn
	o := testOptions(&wg, func(s *Stream) {
		c.Leave()
		wg.Go(func() {
			var e Encoder
			e.Status(200)
			_ = s.Head(&e, false)
			_ = s.Write(make([]byte, size), true, time.Second)
			s.Close(NoError)
		})
	})
	o.IdleTimeout, o.WriteTimeout = time.Minute, time.Minute
	c = NewServer(in, nil, o)
	wg.Go(func() { _ = c.Run() })
	_, _ = client.Write(appendBlock(appendHeader([]byte(Preface), 0, frameSettings, 0, 0), requestBlock(), 1, false, maxFrame))
	<-in.sent
	for range 4 {
		_, _ = client.Write(append(appendHeader(nil, 8<<10, frameData, 0, 1), make([]byte, 8<<10)...))
	}
	_ = client.SetReadDeadline(time.Now().Add(10 * time.Second))
	if all, err := io.ReadAll(client); err != nil || len(all) < size {
		t.Errorf("%d bytes of an answer of %d: %v", len(all), size, err)
	}
	_ = client.Close()
	wg.Wait()
}

// Clients that read nothing of long answers stop no others: one that reads has its short ones on the same connection to the Pod, which
// holds no more of each than its window, and has no more streams than MaxStreams.
func TestSlowReadersStopNobody(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	pod := &http.Server{ReadHeaderTimeout: time.Minute, Protocols: new(http.Protocols), Handler: http.HandlerFunc(
		func(w http.ResponseWriter, q *http.Request) {
			text := make([]byte, 10)
			if q.URL.Path == "/long" {
				text = make([]byte, 4*streamWindow)
			}
			_, _ = w.Write(text)
		})}
	pod.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	wg.Go(func() { _ = pod.Serve(l) })
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	o := testOptions(&wg, nil)
	o.MaxStreams, o.IdleTimeout, o.WriteTimeout = 2*connWindow/streamWindow, time.Minute, time.Minute
	c := NewClient(conn.(*net.TCPConn), o)
	wg.Go(func() { _ = c.Run() })
	defer func() {
		_ = pod.Close()
		_ = conn.Close()
		wg.Wait()
	}()
	open := func(path string) *Stream {
		s := c.Open(false)
		var e Encoder
		e.Pseudo(":method", "GET")
		e.Pseudo(":scheme", "http")
		e.Pseudo(":authority", "pod")
		e.Pseudo(":path", path)
		_ = s.Head(&e, true)
		s.Flush()
		return s
	}
	var slow []*Stream
	for len(slow) < o.MaxStreams-1 {
		slow = append(slow, open("/long"))
	}
	held := func(s *Stream) int {
		p, _ := s.Peek()
		return len(p)
	}
	deadline := time.Now().Add(10 * time.Second)
	for _, s := range slow {
		for ; held(s) < streamWindow; <-time.After(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("a stream has %d bytes of its window", held(s))
			}
		}
	}
	for range 3 {
		s := open("/short")
		if c.Open(false) != nil {
			t.Error("there is a stream more than there may be")
		}
		var r http1.Response
		if err := errors.Join(s.Answer(&r, time.Second), s.Fill(time.Second)); err != nil || r.Status != 200 {
			t.Fatalf("who reads has %v, %d", err, r.Status)
		}
		s.Close(Cancel)
	}
	for _, s := range slow {
		if n := held(s); n != streamWindow {
			t.Errorf("%d bytes wait of a stream, whose window is %d", n, streamWindow)
		}
		s.Close(Cancel)
	}
}
