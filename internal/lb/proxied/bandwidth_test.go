package proxied

import (
	"context"
	"io"
	"net"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
)

// What clients of a Service are sent in all is limited (behaviour 148).
func TestBandwidth(t *testing.T) {
	const size = 250_000 // a second at 2 Mbit/s
	r := newRig(t, map[string]string{"fairlead.dev/lb-bandwidth": "2"})
	r.set(r.Pod(func(c net.Conn) { _, _ = c.Write(make([]byte, size/2)) }))
	begin := time.Now()
	got := make(chan int64)
	for range 2 {
		c := r.Dial()
		go func() {
			n, _ := io.Copy(io.Discard, c)
			got <- n
		}()
	}
	if n := <-got + <-got; n != size {
		t.Errorf("%d bytes", n)
	}
	if took := time.Since(begin); took < time.Second-2*stream.Burst {
		t.Errorf("%d bytes within %s", size, took)
	}
	// The end does not wait for what is limited.
	r.ask(map[string]string{"fairlead.dev/lb-bandwidth": "1"})
	r.set(r.Pod(func(c net.Conn) { _, _ = c.Write(make([]byte, 100*size)) }))
	c := r.Dial()
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	r.server.Close(ended)
}
