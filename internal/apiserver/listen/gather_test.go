package listen

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http/httptest"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

// gateConn is a connection that sends when the gate lets it, one system call for each.
type gateConn struct {
	net.Conn
	gate  chan error
	calls [][]byte
}

// Write waits for the gate.
func (c *gateConn) Write(p []byte) (int, error) {
	p = bytes.Clone(p)
	if err := <-c.gate; err != nil {
		return 0, err
	}
	c.calls = append(c.calls, p)
	return len(p), nil
}

// SetWriteDeadline does nothing.
func (c *gateConn) SetWriteDeadline(time.Time) error { return nil }

// Close does nothing.
func (c *gateConn) Close() error { return nil }

// The events that come while the connection is busy are one system call, in order.
func TestGatherSendsTogether(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		conn := &gateConn{gate: make(chan error)}
		g := gathered(conn)
		var want []byte
		for i := range 25 {
			event := bytes.Repeat([]byte{byte(i)}, 2400)
			want = append(want, event...)
			if n, err := g.Write(event); n != len(event) || err != nil {
				t.Fatal(n, err)
			}
			clear(event) // the caller may use it again
			if i == 0 {
				synctest.Wait()
			}
		}
		close(conn.gate)
		synctest.Wait()
		if len(conn.calls) != 2 {
			t.Errorf("%d system calls for 25 events", len(conn.calls))
		}
		if !bytes.Equal(bytes.Join(conn.calls, nil), want) {
			t.Error("other bytes were sent")
		}
	})
}

// What a client does not read is held up to a limit, and then writes wait; an error ends
// them, and is that of every later one.
func TestGatherWaitsAndFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		conn := &gateConn{gate: make(chan error)}
		g := gathered(conn)
		var written int
		ended := make(chan error, 1)
		go func() {
			for {
				n, err := g.Write(make([]byte, 1000))
				if written += n; err != nil {
					ended <- err
					return
				}
			}
		}()
		synctest.Wait()
		if written > 2*gatherLimit || written < gatherLimit/2 {
			t.Errorf("%d bytes are held", written)
		}
		before := written
		conn.gate <- nil
		synctest.Wait()
		if written == before {
			t.Error("no write goes on when there is room")
		}
		broken := errors.New("broken")
		conn.gate <- broken
		if err := <-ended; !errors.Is(err, broken) {
			t.Error(err)
		}
		if _, err := g.Write([]byte("x")); !errors.Is(err, broken) {
			t.Error(err)
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A peer that does not read holds up neither Close nor a deadline that is over.
func TestGatherEnds(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*gatherer) error{
		"close":    (*gatherer).Close,
		"deadline": func(g *gatherer) error { return g.SetWriteDeadline(time.Now().Add(-time.Second)) },
		"deadline after another": func(g *gatherer) error {
			return errors.Join(g.SetWriteDeadline(time.Now().Add(closeLimit)), g.SetWriteDeadline(time.Now()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				conn, peer := net.Pipe()
				defer peer.Close()
				g := gathered(conn)
				if _, err := g.Write([]byte("event")); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				begin := time.Now()
				if err := end(g); err != nil {
					t.Error(err)
				}
				if took := time.Since(begin); took > closeLimit {
					t.Errorf("it took %s", took)
				}
				synctest.Wait()
				if _, err := g.Write([]byte("event")); !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Error(err)
				}
				g.Close()
			})
		})
	}
}

// The last bytes of a connection arrive, also the message with which TLS ends.
func TestGatherCloseSends(t *testing.T) {
	t.Parallel()
	server := httptest.NewUnstartedServer(nil)
	server.StartTLS() // for its certificate
	defer server.Close()
	roots := x509.NewCertPool()
	roots.AddCert(server.Certificate())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	want := bytes.Repeat([]byte("0123456789"), 100_000)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			s := tls.Server(gathered(conn), &tls.Config{Certificates: server.TLS.Certificates})
			_, _ = s.Write(want) // the client sees what does not arrive
			s.Close()
		}
	}()
	for range 20 {
		c, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{RootCAs: roots, ServerName: "example.com"})
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c)
		c.Close()
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%d bytes of %d: %v", len(got), len(want), err)
		}
	}
}
