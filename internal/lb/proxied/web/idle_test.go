package web

import (
	"bufio"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// A client that waits for its next request costs some kilobytes and no goroutine, and is served when it asks.
func TestIdleClientsCostLittle(t *testing.T) {
	const conns = 300
	for scheme, most := range map[string]int{"http": 4 << 10, "https": 12 << 10} {
		r := newRig(t, map[string]string{dialect.LBTLSSecrets: "a", lbProtocol: scheme})
		cert, _, _ := lbtest.Certificate(t, "a.example.com")
		r.service.Certificates = []tls.Certificate{cert}
		r.set(r.Web(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "here") }))
		before := runtime.NumGoroutine()
		clients := make([]net.Conn, conns)
		for i := range clients {
			clients[i] = r.Dial()
			if scheme == "https" {
				clients[i] = tls.Client(clients[i], &tls.Config{InsecureSkipVerify: true})
			}
			r.get(clients[i])
		}
		more := func() int { return runtime.NumGoroutine() - before }
		for deadline := time.Now().Add(lbtest.Patience); r.carrying() > 0 || more() > conns/20; <-time.After(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %d sessions, %d more goroutines without a request", scheme, r.carrying(), more())
			}
		}
		r.get(clients[0])
		held := memory()
		r.Must(r.engine.waiter.Close()) // the clients stay, whose memory is in the same process
		for deadline := time.Now().Add(lbtest.Patience); r.connections() > 0; <-time.After(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %d connections are left", scheme, r.connections())
			}
		}
		each := (held - memory()) / conns
		t.Logf("%s: %d bytes for each", scheme, each)
		if each > most {
			t.Errorf("%s: %d bytes for each of %d idle clients, want at most %d", scheme, each, conns, most)
		}
		runtime.KeepAlive(clients)
	}
}

// get sends a request on a kept connection.
func (r *rig) get(c net.Conn) {
	r.Helper()
	_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: a.example.com\r\n\r\n")
	r.Must(err)
	answer, err := http.ReadResponse(bufio.NewReaderSize(c, 512), nil)
	r.Must(err)
	body, err := io.ReadAll(answer.Body)
	if string(body) != "here" || err != nil {
		r.Fatalf("%q, %v", body, err)
	}
}

// carrying is how many connections are not parked.
func (r *rig) carrying() int {
	s := &r.engine.sessions
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.all)
}

// memory is what is live, and what stacks take.
func memory() int {
	runtime.GC()
	runtime.GC() // pools are empty after the second one
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc + m.StackInuse)
}

// A client without a request has the idle time-out, also if it sends a record of TLS byte by byte.
func TestIdleClientsEnd(t *testing.T) {
	r := newRig(t, map[string]string{dialect.LBTLSSecrets: "a", lbProtocol: "https"})
	r.idleGrace = 0
	cert, _, _ := lbtest.Certificate(t, "a.example.com")
	r.service.Certificates = []tls.Certificate{cert}
	r.service.Spec.IdleTimeout = dialect.Duration(time.Second)
	r.set(r.Web(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "here") }))
	record := []byte{23, 3, 3, 0x40, 0} // of 16 KiB
	for what, text := range map[string][]byte{"silent": nil, "slow": append(record, make([]byte, 16<<10)...)} {
		raw := r.Dial()
		began := time.Now()
		r.get(tls.Client(raw, &tls.Config{InsecureSkipVerify: true}))
		ended := make(chan error, 1)
		go func() {
			_, err := io.Copy(io.Discard, raw)
			ended <- err
		}()
		for over := false; !over; {
			select {
			case err := <-ended:
				over = true
				if took := time.Since(began); took < time.Second || errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("%s: %v after %s", what, err, took)
				}
			case <-time.After(20 * time.Millisecond):
				if len(text) > 0 {
					_, _ = raw.Write(text[:1])
					text = text[1:]
				}
			}
		}
	}
}

// A kept connection that waits ends with the idle time-out of its Service, whatever the grace is for an answer.
func TestEndOfAKeptConnection(t *testing.T) {
	wait := func(idle time.Duration) (ended chan struct{}) {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		r.idleGrace = 2 * lbtest.Patience
		r.service.Spec.IdleTimeout = dialect.Duration(idle)
		r.set(r.Web(func(http.ResponseWriter, *http.Request) {}))
		c := r.Dial()
		_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: web\r\n\r\n")
		r.Must(err)
		_, err = c.Read(make([]byte, 4096))
		r.Must(err)
		ended = make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = io.Copy(io.Discard, c)
		}()
		return ended
	}
	long, short := wait(2*lbtest.Patience), wait(200*time.Millisecond) // in this order
	<-short
	select {
	case <-long:
		t.Error("a connection with a long time-out ends before one with a short one")
	default:
	}
}
