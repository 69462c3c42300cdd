package relay

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// waitLimit bounds every wait on a machine that may be slow.
const waitLimit = 30 * time.Second

// inOrder is a Target that tries endpoints in order.
type inOrder struct {
	mu        sync.Mutex
	endpoints []netip.AddrPort
	failed    []netip.AddrPort
	answered  []netip.AddrPort
}

func (l *inOrder) Pick(_ netip.Addr, tried []netip.AddrPort) (netip.AddrPort, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(tried); n < len(l.endpoints) {
		return l.endpoints[n], n+1 < len(l.endpoints)
	}
	return netip.AddrPort{}, false
}

func (l *inOrder) Answered(ep netip.AddrPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answered = append(l.answered, ep)
}

func (l *inOrder) Failed(ep netip.AddrPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = append(l.failed, ep)
}

func (l *inOrder) Serves(ep netip.AddrPort) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.endpoints {
		if e == ep {
			return true
		}
	}
	return false
}

func (l *inOrder) set(eps ...netip.AddrPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.endpoints = eps
}

// start starts an Engine with one listener and returns its address.
func start(t testing.TB, cfg Config, p svc.Protocol, f svc.Family, target Target) (*Engine, *Listener, string) {
	t.Helper()
	e, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := e.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	l, err := e.Listen(p, f, 0, target)
	if err != nil {
		t.Fatal(err)
	}
	return e, l, net.JoinHostPort(loopback(f), strconv.Itoa(int(l.Port)))
}

func loopback(f svc.Family) string {
	if f == svc.IPv6 {
		return "::1"
	}
	return "127.0.0.1"
}

// serve has each TCP connection handled.
func serve(t testing.TB, f svc.Family, handle func(*net.TCPConn)) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(loopback(f), "0"))
	if err != nil {
		t.Fatal(err)
	}
	testbed.Serve(t, l, func(c net.Conn) { handle(c.(*net.TCPConn)) })
	return netip.MustParseAddrPort(l.Addr().String())
}

func echo(c *net.TCPConn) {
	_, _ = io.Copy(c, c)
	_ = c.CloseWrite()
}

func dial(t testing.TB, to string) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", to, waitLimit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(waitLimit))
	return c.(*net.TCPConn)
}

// ask sends a word and expects it back.
func ask(c net.Conn, word string) error {
	if _, err := io.WriteString(c, word); err != nil {
		return err
	}
	b := make([]byte, len(word))
	if _, err := io.ReadFull(c, b); err != nil {
		return err
	}
	if string(b) != word {
		return fmt.Errorf("sent %q, got %q", word, b)
	}
	return nil
}

// until waits for a condition.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(waitLimit); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", waitLimit, what)
		}
		time.Sleep(time.Millisecond)
	}
}

// Every byte arrives once and in order, in both directions at once, however
// unevenly it is written and read: copied, spliced, held in a pipe.
func TestCarriesEveryByte(t *testing.T) {
	for _, f := range []svc.Family{svc.IPv4, svc.IPv6} {
		t.Run(f.String(), func(t *testing.T) {
			const size = 24 << 20
			got := make(chan [32]byte, 1)
			ep := serve(t, f, func(c *net.TCPConn) {
				var wg sync.WaitGroup
				wg.Go(func() {
					_ = write(c, 2, size)
					_ = c.CloseWrite()
				})
				got <- read(c, 3)
				wg.Wait()
			})
			e, _, at := start(t, Config{}, svc.TCP, f, &inOrder{endpoints: []netip.AddrPort{ep}})
			c := dial(t, at)
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := write(c, 1, size); err != nil {
					t.Errorf("write: %v", err)
				}
				_ = c.CloseWrite()
			})
			if read(c, 4) != sum(2, size) {
				t.Error("the client received something else than was sent")
			}
			if <-got != sum(1, size) {
				t.Error("the endpoint received something else than was sent")
			}
			wg.Wait()
			until(t, "the connection is over", func() bool { return e.Stats().Connections == 0 })
			if s := e.Stats(); s.ToEndpoints != size || s.ToClients != size {
				t.Errorf("%d bytes to the endpoint and %d to the client are counted, want %d each", s.ToEndpoints, s.ToClients, size)
			}
		})
	}
}

// pattern is size bytes that depend on the seed.
func pattern(seed uint64, size int) io.Reader {
	return io.LimitReader(rand.NewChaCha8([32]byte{byte(seed)}), int64(size))
}

func sum(seed uint64, size int) (out [32]byte) {
	h := sha256.New()
	_, _ = io.Copy(h, pattern(seed, size))
	return [32]byte(h.Sum(nil))
}

// write sends the bytes in pieces of very different size.
func write(c net.Conn, seed uint64, size int) error {
	r := rand.New(rand.NewPCG(seed, 0))
	src := pattern(seed, size)
	b := make([]byte, 1<<20)
	for {
		n, err := io.ReadFull(src, b[:1+r.IntN(1<<(1+r.IntN(20)))])
		if n == 0 {
			return nil
		}
		if _, err := c.Write(b[:n]); err != nil {
			return err
		}
		if err != nil {
			return nil
		}
	}
}

// read receives to the end, now and then with a pause that fills all buffers.
func read(c net.Conn, seed uint64) [32]byte {
	r := rand.New(rand.NewPCG(seed, 0))
	h := sha256.New()
	b := make([]byte, 1<<20)
	for {
		n, err := c.Read(b[:1+r.IntN(len(b))])
		h.Write(b[:n])
		if err != nil {
			return [32]byte(h.Sum(nil))
		}
		if r.IntN(200) == 0 {
			<-time.After(5 * time.Millisecond)
		}
	}
}

// A client that has sent all may still wait for the answer.
func TestHalfCloseIsPassedOn(t *testing.T) {
	ep := serve(t, svc.IPv4, func(c *net.TCPConn) {
		b, err := io.ReadAll(c) // ends only with the client's half
		if err == nil {
			_, _ = fmt.Fprintf(c, "%d bytes", len(b))
		}
	})
	_, _, at := start(t, Config{}, svc.TCP, svc.IPv4, &inOrder{endpoints: []netip.AddrPort{ep}})
	c := dial(t, at)
	_, _ = c.Write(make([]byte, 100_000))
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != "100000 bytes" {
		t.Errorf("got %q, %v", got, err)
	}
	// And the other way round: the endpoint ends first.
	ep = serve(t, svc.IPv4, func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "bye")
		_ = c.CloseWrite()
		b, _ := io.ReadAll(c)
		if len(b) != 100_000 {
			t.Errorf("after its own end the endpoint got %d bytes, want 100000", len(b))
		}
	})
	e, _, at := start(t, Config{}, svc.TCP, svc.IPv4, &inOrder{endpoints: []netip.AddrPort{ep}})
	c = dial(t, at)
	if got, err := io.ReadAll(c); err != nil || string(got) != "bye" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := c.Write(make([]byte, 100_000)); err != nil {
		t.Error(err)
	}
	_ = c.CloseWrite()
	until(t, "the connection is over", func() bool { return e.Stats().Connections == 0 })
}

// A connection that breaks on one side breaks on the other: an orderly end
// would make a part look like the whole.
func TestResetIsPassedOn(t *testing.T) {
	seen := make(chan error, 1)
	ep := serve(t, svc.IPv4, func(c *net.TCPConn) {
		b := make([]byte, 1)
		_, _ = io.ReadFull(c, b)
		if b[0] == 'r' {
			_ = c.SetLinger(0) // the close resets
			return
		}
		_, err := c.Read(b)
		seen <- err
	})
	e, _, at := start(t, Config{}, svc.TCP, svc.IPv4, &inOrder{endpoints: []netip.AddrPort{ep}})
	c := dial(t, at)
	_, _ = c.Write([]byte("r"))
	if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the endpoint reset, the client got %v", err)
	}
	c = dial(t, at)
	_, _ = c.Write([]byte("c"))
	until(t, "the byte is on its way", func() bool { return e.Stats().Accepted == 2 })
	_ = c.SetLinger(0)
	_ = c.Close()
	if err := <-seen; err == nil {
		t.Error("the client reset, the endpoint still reads")
	}
	until(t, "both connections are over", func() bool { return e.Stats().Connections == 0 })
}

// Nothing is left of 100,000 connections, no goroutine, no file, no
// buffer. FAIRLEAD_CONNECTIONS sets another number.
func TestConnectionsLeaveNothingBehind(t *testing.T) {
	total := 100_000
	if s := os.Getenv("FAIRLEAD_CONNECTIONS"); s != "" {
		var err error
		if total, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	ep := serve(t, svc.IPv4, echo)
	e, _, at := start(t, Config{}, svc.TCP, svc.IPv4, &forgetful{inOrder{endpoints: []netip.AddrPort{ep}}})
	round := func(n int) {
		var wg sync.WaitGroup
		for w := range 16 {
			wg.Go(func() {
				big := bytes.Repeat([]byte("x"), 3*bufferSize)
				for i := range n / 16 {
					c, err := net.DialTimeout("tcp", at, waitLimit)
					if err != nil {
						t.Error(err)
						return
					}
					_ = c.SetDeadline(time.Now().Add(waitLimit))
					word := "hello"
					if i%50 == w {
						word = string(big) // goes through pipes
					}
					if err := ask(c, word); err != nil {
						t.Error(err)
					}
					_ = c.(*net.TCPConn).SetLinger(0) // no TIME_WAIT
					_ = c.Close()
				}
			})
		}
		wg.Wait()
		until(t, "all connections are over", func() bool { return e.Stats().Connections == 0 })
	}
	round(800) // what is kept for the next connection is there now
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	round(total)
	until(t, "the goroutines of the test are over", func() bool { return runtime.NumGoroutine() <= goroutines })
	until(t, "no more files than before", func() bool { return openFiles(t) <= files+4*maxFree })
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 4<<20 {
		t.Errorf("the heap has grown by %d bytes over %d connections", grown, total)
	}
	s := e.Stats()
	if s.Accepted < int64(total) || s.Pipes > int64(maxFree*len(e.workers)) {
		t.Errorf("%+v", s)
	}
	if n := e.count.files.Load(); n != 2*s.Pipes {
		t.Errorf("%d files counted with %d pipes and no connection", n, s.Pipes)
	}
	t.Logf("%+v", s)
}

// forgetful is an inOrder that does not note what answered.
type forgetful struct{ inOrder }

func (*forgetful) Answered(netip.AddrPort) {}

func openFiles(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// When it is closed, no new connection is accepted, and open ones may finish.
func TestCloseDrains(t *testing.T) {
	ep := serve(t, svc.IPv4, echo)
	e, _, at := start(t, Config{}, svc.TCP, svc.IPv4, &inOrder{endpoints: []netip.AddrPort{ep}})
	stays, cut := dial(t, at), dial(t, at)
	for _, c := range []net.Conn{stays, cut} {
		if err := ask(c, "hello"); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	closed := make(chan error, 1)
	go func() { closed <- e.Close(ctx) }()
	until(t, "new connections are refused", func() bool {
		c, err := net.Dial("tcp", at)
		if err == nil {
			_ = c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	if err := ask(stays, "still there?"); err != nil {
		t.Errorf("while it drains: %v", err)
	}
	_ = stays.Close()
	until(t, "one connection is left", func() bool { return e.Stats().Connections == 1 })
	cancel()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if _, err := cut.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection that was cut got %v", err)
	}
	if s := e.Stats(); s.Connections != 0 || s.Pipes != 0 {
		t.Errorf("%+v", s)
	}
}

// A listener that closes serves whoever has connected, and leaves open
// connections alone.
func TestListenerCloses(t *testing.T) {
	ep := serve(t, svc.IPv4, echo)
	e, l, at := start(t, Config{}, svc.TCP, svc.IPv4, &inOrder{endpoints: []netip.AddrPort{ep}})
	old := dial(t, at)
	if err := ask(old, "hello"); err != nil {
		t.Fatal(err)
	}
	var waiting []*net.TCPConn
	for range 20 {
		waiting = append(waiting, dial(t, at))
	}
	l.Close()
	l.Close()
	for _, c := range append(waiting, old) {
		if err := ask(c, "hello"); err != nil {
			t.Error(err)
		}
	}
	if _, err := e.Listen(svc.TCP, svc.IPv4, l.Port, &inOrder{}); err != nil {
		t.Errorf("the port is not free again: %v", err)
	}
	if _, err := e.Listen(svc.TCP, svc.IPv4, l.Port, &inOrder{}); !errors.Is(err, ErrPortTaken) {
		t.Errorf("a port that is taken: %v", err)
	}
}
