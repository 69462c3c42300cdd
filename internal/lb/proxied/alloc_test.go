package proxied

import (
	"bytes"
	"net"
	"testing"
)

// What is carried on a connection that is kept allocates next to nothing, for TCP and for HTTP.
func TestKeptConnectionsAllocateLittle(t *testing.T) {
	request := []byte("GET / HTTP/1.1\r\nHost: a.example.com\r\nUser-Agent: test\r\nAccept: */*\r\n\r\n")
	answer := []byte("HTTP/1.1 200 OK\r\nDate: Sun, 22 Nov 2026 12:00:00 GMT\r\nContent-Length: 5\r\n\r\nhello")
	for protocol, most := range map[string]float64{"tcp": 0, "http": 3} {
		r := newRig(t, map[string]string{lbProtocol: protocol})
		r.set(r.pod(func(c net.Conn) {
			b := make([]byte, 4<<10)
			for {
				if n, err := c.Read(b); err != nil || !bytes.HasSuffix(b[:n], []byte("\r\n\r\n")) {
					return
				}
				if _, err := c.Write(answer); err != nil {
					return
				}
			}
		}))
		c, b := r.dial(), make([]byte, 4<<10)
		if n := testing.AllocsPerRun(300, func() {
			if _, err := c.Write(request); err != nil {
				t.Fatal(err)
			}
			if n, err := c.Read(b); err != nil || !bytes.HasSuffix(b[:n], []byte("hello")) {
				t.Fatalf("%q, %v", b[:n], err)
			}
		}); n > most {
			t.Errorf("%s: %.1f allocations for a request, want at most %.0f", protocol, n, most)
		}
	}
}
