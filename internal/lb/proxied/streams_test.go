package proxied

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// clientHello returns a first message of TLS with an extension of the names for each list, in records of at most size bytes.
func clientHello(size, padding int, extensions ...[]string) []byte {
	list16 := func(b []byte) []byte { return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...) }
	var ext []byte
	for _, names := range extensions {
		var list []byte
		for _, n := range names {
			list = append(append(list, 0), list16([]byte(n))...)
		}
		ext = append(append(ext, 0, 0), list16(list16(list))...)
	}
	if padding > 0 { // RFC 7685
		ext = append(append(ext, 0, 21), list16(make([]byte, padding))...)
	}
	body := append([]byte{3, 3}, make([]byte, 32+1)...)
	body = append(append(append(body, 0, 2, 0xc0, 0x2b), 1, 0), list16(ext)...)
	message := append([]byte{1, byte(len(body) >> 16), byte(len(body) >> 8), byte(len(body))}, body...)
	var out []byte
	for len(message) > 0 {
		n := min(size, len(message))
		out = append(append(append(out, 22, 3, 1), byte(n>>8), byte(n)), message[:n]...)
		message = message[n:]
	}
	return out
}

// The name is read from a first message in any number of parts, and from no message that servers could read in two ways; what
// was read goes on as it is.
func TestReadName(t *testing.T) {
	long := strings.Repeat("a", 60) + ".example.com"
	for _, c := range []struct {
		name  string
		sent  []byte
		parts int
		want  string
		fails bool
	}{
		{"whole", clientHello(1<<14, 0, []string{"a.example.com"}), 1 << 20, "a.example.com", false},
		{"byte by byte", clientHello(1<<14, 0, []string{long}), 1, long, false},
		{"many records", clientHello(7, 0, []string{"a.example.com"}), 1 << 20, "a.example.com", false},
		{"many records, byte by byte", clientHello(7, 0, []string{"a.example.com"}), 1, "a.example.com", false},
		{"large", clientHello(1<<14, 12000, []string{"a.example.com"}), 1000, "a.example.com", false},
		{"without a name", clientHello(1<<14, 0), 1 << 20, "", false},
		{"too large", clientHello(1<<14, 20000, []string{"a.example.com"}), 1000, "", true},
		{"two names", clientHello(1<<14, 0, []string{"a.example.com", "b.example.com"}), 1 << 20, "", true},
		{"two extensions", clientHello(1<<14, 0, []string{"a.example.com"}, []string{"b.example.com"}), 1 << 20, "", true},
		{"a dot at the end", clientHello(1<<14, 0, []string{"a.example.com."}), 1 << 20, "", true},
		{"no TLS", []byte("GET / HTTP/1.1\r\nHost: a.example.com\r\n\r\n"), 1 << 20, "", true},
		{"an end", clientHello(1<<14, 0, []string{"a.example.com"})[:40], 1 << 20, "", true},
	} {
		client, server := net.Pipe()
		go func() {
			for rest := c.sent; len(rest) > 0; {
				n, err := client.Write(rest[:min(c.parts, len(rest))])
				if err != nil {
					return
				}
				rest = rest[n:]
			}
			_ = client.Close()
		}()
		_ = server.SetDeadline(time.Now().Add(lbtest.Patience))
		name, read, err := readName(server)
		if name != c.want || (err != nil) != c.fails {
			t.Errorf("%s: %q, %v", c.name, name, err)
		}
		if !c.fails && !bytes.HasPrefix(c.sent, read) {
			t.Errorf("%s: %d bytes of another text", c.name, len(read))
		}
		if len(read) > maxHello {
			t.Errorf("%s: %d bytes were read", c.name, len(read))
		}
		_ = server.Close()
	}
}

// A client that sends its first message too slowly is given up at the deadline of the connection.
func TestSlowHello(t *testing.T) {
	client, server := net.Pipe()
	defer client.Close()
	go func() { _, _ = client.Write(clientHello(1<<14, 0, []string{"a.example.com"})[:20]) }()
	_ = server.SetDeadline(time.Now().Add(50 * time.Millisecond))
	if _, _, err := readName(server); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
}

func TestReplayed(t *testing.T) {
	client, server := net.Pipe()
	go func() {
		_, _ = client.Write([]byte(" world"))
		_ = client.Close()
	}()
	r := &replayed{Conn: pipeConn{server}, first: []byte("hello")}
	if got, err := io.ReadAll(r); string(got) != "hello world" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

type pipeConn struct{ net.Conn }

func (c pipeConn) CloseWrite() error { return c.Close() }

func BenchmarkReadName(b *testing.B) {
	text := clientHello(1<<14, 0, []string{"a.example.com"})
	b.ReportAllocs()
	for b.Loop() {
		if name, _, err := readName(&fixedConn{rest: text}); name == "" || err != nil {
			b.Fatal(err)
		}
	}
}

// fixedConn is a connection of which a text is read.
type fixedConn struct {
	net.Conn
	rest []byte
}

func (c *fixedConn) Read(p []byte) (int, error) {
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}
