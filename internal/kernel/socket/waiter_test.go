package socket_test

import (
	"net"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// pair returns both ends of a connection.
func pair(t *testing.T) (own *net.TCPConn, peer net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if peer, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = peer.Close(), c.Close() })
	return c.(*net.TCPConn), peer
}

func TestWaiter(t *testing.T) {
	w, err := socket.NewWaiter()
	if err != nil {
		t.Fatal(err)
	}
	ran := make(chan error, 1)
	go func() { ran <- w.Run() }()
	wait := func(c *net.TCPConn, timeout time.Duration) <-chan bool {
		t.Helper()
		done := make(chan bool, 2)
		if !w.Wait(c, timeout, func(readable bool) { done <- readable }) {
			t.Fatal("does not wait")
		}
		return done
	}
	is := func(what string, done <-chan bool, want bool) {
		t.Helper()
		select {
		case got := <-done:
			if got != want {
				t.Errorf("%s: readable: %t", what, got)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("%s: nothing is reported", what)
		}
	}
	own, peer := pair(t)
	for range 3 { // each time, also when the bytes are there before
		first := wait(own, time.Hour)
		_, _ = peer.Write([]byte("x"))
		is("bytes", first, true)
		is("bytes that are there", wait(own, time.Hour), true)
		if _, err := own.Read(make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
	}
	is("silence", wait(own, time.Millisecond), false)
	ends := wait(own, time.Hour)
	_ = peer.Close()
	is("an end", ends, true)
	closed, _ := pair(t)
	own, _ = pair(t)
	first, second := wait(own, time.Hour), wait(closed, time.Hour)
	_ = closed.Close() // which a caller should not do
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	is("Close", first, false)
	is("Close, of one that is closed", second, false)
	if err := <-ran; err != nil {
		t.Errorf("Run: %v", err)
	}
	if w.Wait(own, time.Hour, func(bool) { t.Error("called") }) {
		t.Error("waits after Close")
	}
}

// A Waiter that cannot wait any more holds no connection.
func TestBrokenWaiter(t *testing.T) {
	w, err := socket.NewWaiter()
	if err != nil {
		t.Fatal(err)
	}
	own, _ := pair(t)
	done := make(chan bool, 1)
	if !w.Wait(own, time.Hour, func(readable bool) { done <- readable }) {
		t.Fatal("does not wait")
	}
	ran := make(chan error, 1)
	go func() { ran <- w.Run() }()
	if err := w.Break(); err != nil {
		t.Fatal(err)
	}
	if err := <-ran; err == nil {
		t.Error("Run has no error")
	}
	select {
	case readable := <-done:
		if readable {
			t.Error("a connection without bytes is readable")
		}
	case <-time.After(30 * time.Second):
		t.Error("a connection waits after the end of Run")
	}
	if w.Wait(own, time.Hour, func(bool) { t.Error("called") }) {
		t.Error("waits after the end of Run")
	}
}
