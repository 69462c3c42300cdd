package web

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// attacker is a client of HTTP/2 that does as it likes.
type attacker struct {
	net.Conn
	*http2.Framer
	ended chan struct{} // the connection has

	mu     sync.Mutex
	frames map[http2.FrameType]int
	over   map[uint32]bool // streams with an answer or a reset
	stream uint32
}

func (r *rig) attacker(settings ...http2.Setting) *attacker {
	r.Helper()
	c := r.Dial()
	a := &attacker{Conn: c, Framer: http2.NewFramer(c, c), ended: make(chan struct{}),
		frames: map[http2.FrameType]int{}, over: map[uint32]bool{}}
	_, err := io.WriteString(c, http2.ClientPreface)
	r.Must(err)
	r.Must(a.WriteSettings(settings...))
	go func() {
		defer close(a.ended)
		for {
			f, err := a.ReadFrame()
			if err != nil {
				return
			}
			a.mu.Lock()
			a.frames[f.Header().Type]++
			switch f.(type) {
			case *http2.HeadersFrame, *http2.RSTStreamFrame:
				a.over[f.Header().StreamID] = true
			}
			a.mu.Unlock()
		}
	}()
	return a
}

// request returns the header of a request, and the stream that it is for.
func (a *attacker) request(method string, more ...string) (uint32, []byte) {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	e.SetMaxDynamicTableSize(0)
	for _, f := range append([]string{":method=" + method, ":scheme=http", ":authority=web", ":path=/"}, more...) {
		name, value, _ := strings.Cut(f, "=")
		_ = e.WriteField(hpack.HeaderField{Name: name, Value: value})
	}
	a.stream += 2
	return a.stream - 1, b.Bytes()
}

// ask begins a request.
func (a *attacker) ask(method string, end bool) error {
	id, block := a.request(method)
	return a.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block, EndStream: end, EndHeaders: true})
}

// count returns how many frames of a type have come.
func (a *attacker) count(t http2.FrameType) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.frames[t]
}

// many small frames are more than the sockets hold between a client and who does not read: 10 bytes each.
const many = 1e7

// left returns how many of the first streams have neither an answer nor a reset.
func (a *attacker) left(streams uint32) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range streams {
		if !a.over[2*i+1] {
			n++
		}
	}
	return n
}

// repeat calls f until the connection ends.
func (a *attacker) repeat(most int, f func() error) error {
	for range most {
		if f() != nil {
			return nil
		}
		select {
		case <-a.ended:
			return nil
		default:
		}
	}
	return fmt.Errorf("%d times, and the connection goes on", most)
}

// slowly is f every few milliseconds.
func slowly(f func() error) func() error {
	return func() error {
		<-time.After(5 * time.Millisecond)
		return f()
	}
}

func (r *rig) ends(what string, a *attacker) {
	r.Helper()
	select {
	case <-a.ended:
	case <-time.After(lbtest.Patience):
		r.Errorf("%s: the connection is still open", what)
	}
}

// served has a request of another client answered.
func (r *rig) served(what string) {
	r.Helper()
	for deadline := time.Now().Add(lbtest.Patience); ; {
		answer, err := r.Client().Get("http://web/other")
		if err == nil {
			_ = answer.Body.Close()
		}
		if err == nil && answer.StatusCode == http.StatusOK {
			return
		}
		if time.Now().After(deadline) {
			r.Errorf("%s: another client is not served: %v", what, err)
			return
		}
	}
}

// floods are what a client can send without an end, or too slowly.
var floods = map[string]func(*attacker) error{
	"PING":     func(a *attacker) error { return a.repeat(many, func() error { return a.WritePing(false, [8]byte{}) }) },
	"SETTINGS": func(a *attacker) error { return a.repeat(many, func() error { return a.WriteSettings() }) },
	"WINDOW_UPDATE": func(a *attacker) error {
		return a.repeat(many, func() error { return a.WriteWindowUpdate(0, 1) })
	},
	"PRIORITY": func(a *attacker) error {
		return a.repeat(many, func() error { return a.WritePriority(7, http2.PriorityParam{StreamDep: 5}) })
	},
	"unknown frames": func(a *attacker) error { return a.repeat(many, func() error { return a.WriteRawFrame(77, 0, 0, nil) }) },
	"empty DATA": func(a *attacker) error {
		if err := a.ask("POST", false); err != nil {
			return err
		}
		return a.repeat(many, func() error { return a.WriteData(1, false, nil) })
	},
	"rapid reset (CVE-2023-44487)": func(a *attacker) error {
		return a.repeat(many, func() error {
			return errors.Join(a.ask("GET", true), a.WriteRSTStream(a.stream-1, http2.ErrCodeCancel))
		})
	},
	"resets by the server (CVE-2025-8671)": func(a *attacker) error {
		return a.repeat(many, func() error { return errors.Join(a.ask("GET", true), a.WriteData(a.stream-1, false, []byte("x"))) })
	},
	"CONTINUATION (CVE-2023-45288)": func(a *attacker) error {
		id, block := a.request("GET")
		if err := a.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block}); err != nil {
			return err
		}
		var more bytes.Buffer
		_ = hpack.NewEncoder(&more).WriteField(hpack.HeaderField{Name: "x", Value: strings.Repeat("~", 16000), Sensitive: true})
		return a.repeat(1e5, func() error { return a.WriteContinuation(id, false, more.Bytes()) })
	},
	"empty CONTINUATION": func(a *attacker) error {
		id, block := a.request("GET")
		if err := a.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block}); err != nil {
			return err
		}
		return a.repeat(many, func() error { return a.WriteContinuation(id, false, nil) })
	},
	"a header that drips": func(a *attacker) error {
		id, block := a.request("GET", "x="+strings.Repeat("y", 8000))
		if err := a.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block[:1]}); err != nil {
			return err
		}
		return a.repeat(8000, slowly(func() error {
			block = block[1:]
			return a.WriteContinuation(id, false, block[:1])
		}))
	},
	"a frame that drips": func(a *attacker) error {
		return a.repeat(8000, slowly(func() error {
			_, err := a.Write([]byte{0})
			return err
		}))
	},
	"half the head of a frame": func(a *attacker) error {
		_, err := a.Write([]byte{0, 0, 8, 6})
		return err
	},
	"no answer to anything": func(a *attacker) error { // but for PINGs it is idle
		return a.repeat(8000, slowly(func() error { return a.WritePing(false, [8]byte{}) }))
	},
}

// Each flood and each client that dribbles costs its own connection; others are served, and Pods see few of the requests.
func TestFloodsOfHTTP2(t *testing.T) {
	for name, attack := range floods {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, map[string]string{lbProtocol: "http"})
			r.headerTimeout, r.idleGrace = 300*time.Millisecond, 300*time.Millisecond
			r.service.Spec.IdleTimeout = dialect.Duration(500 * time.Millisecond)
			var asked atomic.Int32
			r.set(r.Web(func(_ http.ResponseWriter, q *http.Request) {
				if q.URL.Path != "/other" {
					asked.Add(1)
					_, _ = io.Copy(io.Discard, q.Body)
					<-q.Context().Done()
				}
			}))
			a := r.attacker()
			attacked := make(chan error, 1)
			go func() { attacked <- attack(a) }()
			r.served(name)
			r.ends(name, a)
			if err := <-attacked; err != nil {
				t.Error(err)
			}
			if n := asked.Load(); n > 2*emptyBurst {
				t.Errorf("%d requests reach a Pod", n)
			}
			r.served(name)
		})
	}
}

// Streams whose client takes nothing, or sends nothing, end although the connection is busy; the Pod is free then.
func TestStalledStreams(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.idleGrace = 100 * time.Millisecond
	r.service.Spec.IdleTimeout = dialect.Duration(500 * time.Millisecond)
	r.service.Spec.SourceRanges = nil
	var busy atomic.Int32
	var asked atomic.Bool
	r.set(r.Web(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path == "/other" || q.Method == http.MethodHead {
			return
		}
		busy.Add(1)
		asked.Store(true)
		defer busy.Add(-1)
		chunk := make([]byte, 64<<10)
		for q.Method == http.MethodGet {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
		_, _ = io.Copy(io.Discard, q.Body)
	}))
	for method, settings := range map[string][]http2.Setting{
		"GET": {{ID: http2.SettingInitialWindowSize, Val: 0}}, "POST": nil,
	} {
		asked.Store(false)
		a := r.attacker(settings...)
		const streams = 100
		for range streams {
			r.Must(a.ask(method, method == "GET"))
		}
		for deadline := time.Now().Add(lbtest.Patience); a.left(streams) > 0 || busy.Load() > 0; {
			<-time.After(20 * time.Millisecond)
			r.Must(a.ask("HEAD", true)) // else the connection is idle, too, and may end first
			if time.Now().After(deadline) {
				t.Fatalf("%s: %d streams have no end, the Pod is busy with %d", method, a.left(streams), busy.Load())
			}
		}
		if !asked.Load() {
			t.Errorf("%s: nothing reached the Pod", method)
		}
		r.served(method)
		r.Must(a.Close())
		<-a.ended
	}
}

// A request that is rejected to a client without a window does not stay either.
func TestRejectedWithoutWindow(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.idleGrace = 100 * time.Millisecond
	r.service.Spec.IdleTimeout = dialect.Duration(300 * time.Millisecond)
	r.set()
	a := r.attacker(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	r.Must(a.ask("CONNECT", false))
	r.Must(a.ask("GET", true))
	r.ends("no window", a)
}

// A client of HTTP/2 has no more requests at a time than connections could be; others have their part.
func TestTooManyRequestsOfHTTP2(t *testing.T) {
	r := newSmallRig(t, map[string]string{lbProtocol: "http"}, 20) // 15 for a Service while nobody has others
	release := make(chan struct{})
	var asked atomic.Int32
	r.set(r.Web(func(_ http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/other" {
			asked.Add(1)
			<-release
		}
	}))
	let := sync.OnceFunc(func() { close(release) })
	r.Cleanup(let) // before the Pod ends, which waits
	a := r.attacker()
	for range 20 {
		r.Must(a.ask("GET", true))
	}
	for deadline := time.Now().Add(lbtest.Patience); a.count(http2.FrameHeaders) < 5 || asked.Load() < 15; {
		if time.Now().After(deadline) {
			t.Fatalf("%d are rejected, %d reach the Pod", a.count(http2.FrameHeaders), asked.Load())
		}
		<-time.After(time.Millisecond)
	}
	let()
	for deadline := time.Now().Add(lbtest.Patience); a.count(http2.FrameHeaders) < 20 || r.server.Usage().Requests > 0; {
		if time.Now().After(deadline) {
			t.Fatalf("%d are answered, %d go on", a.count(http2.FrameHeaders), r.server.Usage().Requests)
		}
		<-time.After(time.Millisecond)
	}
	r.Must(a.ask("GET", true)) // the connection goes on
	for deadline := time.Now().Add(lbtest.Patience); a.count(http2.FrameHeaders) < 21; {
		if time.Now().After(deadline) {
			t.Fatal("a later request is not answered")
		}
		<-time.After(time.Millisecond)
	}
	if r.server.Rejected() != 5 || asked.Load() != 16 {
		t.Errorf("%d rejected, %d at the Pod, %d left", r.server.Rejected(), asked.Load(), r.server.Usage().Requests)
	}
	r.served("afterwards")
}

// inUse returns how much memory the process uses.
func inUse() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// Many connections at once that say nothing, garbage, or half a request, of any kind of listener, have bounded memory, and end.
func TestManyIdleConnections(t *testing.T) {
	for _, protocol := range []string{"http", "https"} {
		r := newRig(t, map[string]string{lbProtocol: protocol, dialect.LBTLSSecrets: "a"})
		cert, _, _ := lbtest.Certificate(t, "a.example.com")
		r.service.Certificates = append(r.service.Certificates, cert)
		r.headerTimeout = time.Second
		r.set(r.Web(lbtest.Tell))
		before := inUse()
		const conns = 1000
		var all []net.Conn
		for i := range conns {
			c := r.Dial()
			text := []string{"", "\x16\x03\x01\x02\x00\x01", "\x00\xff\x80garbage", "GET / HTTP/1.1\r\nHost: ",
				http2.ClientPreface + "\x00\x00\x08"}[i%5]
			_, err := io.WriteString(c, text)
			r.Must(err)
			all = append(all, c)
		}
		if used := inUse() - before; used > conns*64<<10 {
			t.Errorf("%s: %d bytes for each connection", protocol, used/conns)
		}
		if protocol != "http" {
			continue // their greeting has ten seconds
		}
		r.served("meanwhile")
		ctx, cancel := context.WithTimeout(t.Context(), lbtest.Patience)
		defer cancel()
		for i, c := range all { // all end
			if deadline, ok := ctx.Deadline(); ok {
				_ = c.SetDeadline(deadline)
			}
			if _, err := io.ReadAll(c); err != nil && !errors.Is(err, lbtest.ErrReset) {
				t.Fatalf("%s: connection %d: %v", protocol, i, err)
			}
		}
	}
}

// An endless body goes no faster than the Pod reads, by HTTP/1.1, and no memory holds the rest. By HTTP/2 a client that
// ignores the window is read from for a second more, as fast as it sends: then the connection ends.
func TestEndlessBody(t *testing.T) {
	for _, version := range []int{1, 2} {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		r.service.Spec.IdleTimeout = dialect.Duration(500 * time.Millisecond)
		r.idleGrace = 100 * time.Millisecond
		release := make(chan struct{})
		r.set(r.Web(func(_ http.ResponseWriter, q *http.Request) {
			if q.URL.Path != "/other" {
				<-release
			}
		}))
		r.Cleanup(sync.OnceFunc(func() { close(release) }))
		sent, chunk := 0, make([]byte, 16<<10)
		var c io.Closer
		var send func() error
		if version == 2 {
			a := r.attacker()
			r.Must(a.ask("POST", false))
			c, send = a, func() error { return a.WriteData(1, false, chunk) } // whatever the window is
		} else {
			d := r.Dial()
			_, err := io.WriteString(d, "POST / HTTP/1.1\r\nHost: web\r\nTransfer-Encoding: chunked\r\n\r\n")
			r.Must(err)
			r.Must(d.SetWriteDeadline(time.Now().Add(time.Second))) // it is stuck then
			c, send = d, func() error {
				_, err := fmt.Fprintf(d, "%x\r\n%s\r\n", len(chunk), chunk)
				return err
			}
		}
		before, used := inUse(), int64(0)
		var err error
		for err == nil && (version == 2 || sent < 1<<30) {
			if err = send(); err == nil {
				sent += len(chunk)
			}
			if sent%(4<<20) == 0 {
				used = max(used, inUse()-before)
			}
		}
		if used > 6<<20 {
			t.Errorf("HTTP/%d: %d MiB of memory for a body that is not read", version, used>>20)
		}
		if version == 1 && sent > 128<<20 {
			t.Errorf("%d MiB of a body that is not read were taken", sent>>20)
		}
		if version == 2 && errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("the connection of a client that ignores the window goes on")
		}
		r.served("an endless body")
		_ = c.Close()
	}
}

// A client of TLS cannot negotiate again, nor hold a connection with garbage.
func TestTLSAttacks(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "https", dialect.LBTLSSecrets: "a"})
	cert, _, _ := lbtest.Certificate(t, "a.example.com")
	r.service.Certificates = append(r.service.Certificates, cert)
	r.set(r.Web(lbtest.Tell))
	for _, text := range []string{
		"GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01\xff\xff" + strings.Repeat("\xff", 1<<16),
		"\x16\x03\x01\x00\x04\x01\xff\xff\xff", "\x15\x03\x01\x00\x02\x01\x00", "\x80\x2e\x01\x00\x02",
	} {
		c := r.Dial()
		_, _ = io.WriteString(c, text)
		if got, err := io.ReadAll(c); err != nil && !errors.Is(err, lbtest.ErrReset) || bytes.Contains(got, []byte("HTTP/1")) {
			t.Errorf("%.20q: %q, %v", text, got, err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), lbtest.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "openssl", "s_client", "-connect", r.At.String(), "-tls1_2")
	in, err := cmd.StdinPipe()
	r.Must(err)
	var out lbtest.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	r.Must(cmd.Start())
	_, _ = io.WriteString(in, "GET /before HTTP/1.1\r\nHost: a\r\n\r\n")
	for ctx.Err() == nil && !strings.Contains(out.String(), "200 OK") {
		<-time.After(time.Millisecond)
	}
	_, _ = io.WriteString(in, "R\n")
	err = cmd.Wait()
	if got := out.String(); err == nil || !strings.Contains(got, "RENEGOTIATING") || !strings.Contains(got, "SSL alert number") {
		t.Errorf("renegotiation: %v\n%s", err, out.String())
	}
}
