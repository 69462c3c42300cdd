package lbtest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"
)

// Web is a Pod that serves HTTP.
func (r *Rig) Web(h http.HandlerFunc) netip.AddrPort {
	r.Helper()
	s := httptest.NewServer(h)
	r.Cleanup(s.Close)
	return netip.MustParseAddrPort(s.Listener.Addr().String())
}

// Tell answers with what a Pod is asked.
func Tell(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	h := r.Header
	fmt.Fprintf(w, "%s %s %s for=%s proto=%s port=%s forwarded=%q hop=%q body=%s", r.Method, r.Host, r.RequestURI, h.Get("X-Forwarded-For"),
		h.Get("X-Forwarded-Proto"), h.Get("X-Forwarded-Port"), h.Get("Forwarded"), h.Get("X-Hop"), body)
}

// Client has its own connections to the listener.
func (r *Rig) Client() *http.Client {
	t := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", r.At.String())
	}}
	r.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, Timeout: Patience}
}

// Echo is a Pod that answers datagrams with its name and what they have.
func (r *Rig) Echo(name string) netip.AddrPort {
	r.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	r.Must(err)
	r.Cleanup(func() { _ = c.Close() })
	go func() {
		buf := make([]byte, 64<<10)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(append([]byte(name+" "), buf[:n]...), from)
		}
	}()
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

// Asks sends a datagram until there is an answer, which it returns.
func (r *Rig) Asks(c net.Conn, text string) string {
	r.Helper()
	buf := make([]byte, 64<<10)
	for deadline := time.Now().Add(Patience); time.Now().Before(deadline); {
		if _, err := c.Write([]byte(text)); err != nil {
			continue // a refusal of the datagram before
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		if n, err := c.Read(buf); err == nil {
			return string(buf[:n])
		}
	}
	r.Fatal("no answer")
	return ""
}

// AnswerAll is a Pod that answers each request of HTTP/1.1 without a body with "hello", and allocates nothing for it.
func AnswerAll(c net.Conn) {
	answer := []byte("HTTP/1.1 200 OK\r\nDate: Sun, 22 Nov 2026 12:00:00 GMT\r\nContent-Length: 5\r\n\r\nhello")
	b := make([]byte, 4<<10)
	for {
		if n, err := c.Read(b); err != nil || !bytes.HasSuffix(b[:n], []byte("\r\n\r\n")) {
			return
		}
		if _, err := c.Write(answer); err != nil {
			return
		}
	}
}

// AllocsPerRequest returns what a request on a kept connection to AnswerAll allocates in this process.
func (r *Rig) AllocsPerRequest() float64 {
	r.Helper()
	request := []byte("GET / HTTP/1.1\r\nHost: a.example.com\r\nUser-Agent: test\r\nAccept: */*\r\n\r\n")
	c, b := r.Dial(), make([]byte, 4<<10)
	return testing.AllocsPerRun(300, func() {
		if _, err := c.Write(request); err != nil {
			r.Fatal(err)
		}
		if n, err := c.Read(b); err != nil || !bytes.HasSuffix(b[:n], []byte("hello")) {
			r.Fatalf("%q, %v", b[:n], err)
		}
	})
}
