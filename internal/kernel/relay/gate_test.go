package relay

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/svc"
)

// script is a Gate whose connections go to endpoints in order.
type script struct {
	endpoints []netip.AddrPort
	first     string
	leaves    int // how many that answer are left for another one
	idle      time.Duration
	rejects   bool

	mu       sync.Mutex
	conns    []*Conn
	clients  []netip.AddrPort
	failed   []error
	ended    int
	up, down int64
}

func (g *script) Accept(c *Conn, client netip.AddrPort) (Session, time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.conns, g.clients = append(g.conns, c), append(g.clients, client)
	if g.rejects {
		return nil, 0
	}
	return &scripted{script: g}, g.idle
}

func (g *script) read(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f()
}

// has waits until so many connections have ended.
func (g *script) has(t *testing.T, ended int) {
	t.Helper()
	until(t, "connections have ended", func() (is bool) { g.read(func() { is = g.ended == ended }); return is })
}

type scripted struct {
	*script
	next int
}

func (s *scripted) Pick() netip.AddrPort {
	if s.next == len(s.endpoints) {
		return netip.AddrPort{}
	}
	s.next++
	return s.endpoints[s.next-1]
}

func (s *scripted) Failed(err error) { s.read(func() { s.failed = append(s.failed, err) }) }

func (s *scripted) Answered() ([]byte, bool) { return []byte(s.first), s.next > s.leaves }

func (s *scripted) Ended(up, down int64) {
	s.read(func() { s.ended, s.up, s.down = s.ended+1, s.up+up, s.down+down })
}

// serveGate starts an Engine with a Gate at a socket.
func serveGate(t *testing.T, g *script) (*Engine, *Listener, *net.TCPListener) {
	t.Helper()
	e, err := Start(Config{Threads: 2, KeepAlive: 15 * time.Second})
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
	socket, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	l, err := e.Serve(socket.(*net.TCPListener), g)
	if err != nil {
		t.Fatal(err)
	}
	return e, l, socket.(*net.TCPListener)
}

// A session tries one endpoint after the other, sends its own bytes first, may be closed, and has the bytes of its
// client counted.
func TestSessions(t *testing.T) {
	g := &script{first: "first,", endpoints: []netip.AddrPort{closedPort(t), serve(t, svc.IPv4, echo), serve(t, svc.IPv4, echo)}, leaves: 2}
	_, _, socket := serveGate(t, g)
	c := dial(t, socket.Addr().String())
	got := make([]byte, len("first,hello"))
	if _, err := io.WriteString(c, "hello"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, got); string(got) != "first,hello" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	_ = c.CloseWrite()
	if rest, err := io.ReadAll(c); len(rest) > 0 || err != nil {
		t.Errorf("after the end: %q, %v", rest, err)
	}
	g.has(t, 1)
	g.read(func() {
		if g.up != 5 || g.down != 11 || len(g.failed) != 1 || g.clients[0].String() != c.LocalAddr().String() {
			t.Errorf("%d bytes up, %d down, failed %v, clients %v", g.up, g.down, g.failed, g.clients)
		}
	})
	cut := dial(t, socket.Addr().String())
	if _, err := io.ReadFull(cut, got[:6]); err != nil {
		t.Fatal(err)
	}
	g.read(func() { _ = g.conns[1].Close() })
	if _, err := cut.Read(got); !errors.Is(err, io.EOF) {
		t.Errorf("a connection that was closed: %v", err)
	}
	g.has(t, 2)
	g.read(func() { _ = g.conns[1].Close() }) // again
}

// An endpoint that is left although it answers counts as an attempt, whose deadline is not that of the next one.
func TestLeftEndpointsCount(t *testing.T) {
	g := &script{endpoints: []netip.AddrPort{serve(t, svc.IPv4, echo), serve(t, svc.IPv4, echo)}, leaves: 1}
	e, _, socket := serveGate(t, g)
	if err := ask(dial(t, socket.Addr().String()), "x"); err != nil {
		t.Fatal(err)
	}
	if n := e.Stats().Retried; n != 1 {
		t.Errorf("%d connections have gone on to another endpoint, want 1", n)
	}
}

// What a Gate does not want, and what has no endpoint, is closed.
func TestSessionsWithoutEndpoints(t *testing.T) {
	for _, g := range []*script{{rejects: true}, {endpoints: []netip.AddrPort{closedPort(t)}}} {
		e, _, socket := serveGate(t, g)
		if _, err := dial(t, socket.Addr().String()).Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("%v", err)
		}
		until(t, "the connection is over", func() bool { return e.Stats().Connections == 0 })
		until(t, "no file is counted", func() bool { return e.count.files.Load() == 0 })
	}
}

// A session that carries nothing ends, one that does stays. What its endpoint does not acknowledge ends it, too.
func TestIdleSessionsEnd(t *testing.T) {
	g := &script{endpoints: []netip.AddrPort{serve(t, svc.IPv4, echo)}, idle: time.Second}
	_, _, socket := serveGate(t, g)
	began := time.Now()
	silent := dial(t, socket.Addr().String())
	until(t, "the endpoint's time to acknowledge is the one that a session may be idle", func() bool {
		var c *Conn
		g.read(func() {
			if len(g.conns) > 0 {
				c = g.conns[0]
			}
		})
		bound := make(chan int, 1)
		if c == nil || !c.worker.do(func() {
			n, _ := unix.GetsockoptInt(c.flow.server.fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
			bound <- n
		}) {
			return false
		}
		return <-bound == 1000
	})
	ended := make(chan time.Duration, 1)
	go func() {
		_, _ = silent.Read(make([]byte, 1))
		ended <- time.Since(began)
	}()
	busy, last := dial(t, socket.Addr().String()), time.Now()
	for {
		select {
		case took := <-ended:
			if took < time.Second {
				t.Errorf("closed after %s", took)
			}
			return
		case <-time.After(50 * time.Millisecond):
			if err := ask(busy, "x"); err != nil && time.Since(last) < time.Second/2 { // else the machine was stuck
				t.Fatal(err)
			} else if err != nil {
				busy = dial(t, socket.Addr().String())
			}
			last = time.Now()
		}
	}
}

// A socket passes to the Engine and back, and a client that connects meanwhile is served.
func TestSocketsPassOn(t *testing.T) {
	g := &script{endpoints: []netip.AddrPort{serve(t, svc.IPv4, echo)}}
	_, l, socket := serveGate(t, g)
	at := socket.Addr().String()
	_ = socket.Close()
	if err := ask(dial(t, at), "hello"); err != nil {
		t.Error(err)
	}
	back, err := l.Socket()
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	l.Wait()
	c := dial(t, at)
	own, err := back.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(own, "mine")
	_ = own.Close()
	if got, err := io.ReadAll(c); string(got) != "mine" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	_ = back.Close()
	if c, err := net.Dial("tcp", at); err == nil {
		_ = c.Close()
		t.Error("the address is still listened at")
	}
}
