package web

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// A request on a kept connection, with its counters.
func BenchmarkRequest(b *testing.B) {
	b.ReportAllocs()
	request := []byte("GET / HTTP/1.1\r\nHost: a.example.com\r\nUser-Agent: test\r\nAccept: */*\r\n\r\n")
	r := newRig(b, map[string]string{lbProtocol: "http"})
	r.set(r.Pod(lbtest.AnswerAll))
	c, answer := r.Forever(), make([]byte, 4<<10)
	for b.Loop() {
		if _, err := c.Write(request); err != nil {
			b.Fatal(err)
		}
		if n, err := c.Read(answer); err != nil || !bytes.HasSuffix(answer[:n], []byte("hello")) {
			b.Fatalf("%q, %v", answer[:n], err)
		}
	}
}

// Requests of HTTP/2 on a connection, of which 16 are on their way at a time.
func BenchmarkStreams(b *testing.B) {
	b.ReportAllocs()
	const batch = 16
	r := newRig(b, map[string]string{lbProtocol: "http"})
	r.set(r.Pod(lbtest.AnswerAll))
	c := newStreamClient(r, r.Forever(), batch)
	for n := 0; n < b.N; n += batch {
		c.ask()
	}
}

// A new connection with one request, from dial to close. The client is in the same process.
func BenchmarkConnection(b *testing.B) {
	b.ReportAllocs()
	request := []byte("GET / HTTP/1.1\r\nHost: a.example.com\r\nConnection: close\r\n\r\n")
	r := newRig(b, map[string]string{lbProtocol: "http"})
	r.set(r.Pod(lbtest.AnswerAll))
	answer := make([]byte, 4<<10)
	for b.Loop() {
		c, err := net.Dial("tcp", r.At.String())
		if err != nil {
			b.Fatal(err)
		}
		if _, err := c.Write(request); err != nil {
			b.Fatal(err)
		}
		n, err := io.ReadFull(c, answer)
		if !errors.Is(err, io.ErrUnexpectedEOF) || !bytes.HasSuffix(answer[:n], []byte("hello")) {
			b.Fatalf("%q, %v", answer[:n], err)
		}
		_ = c.Close()
	}
}
