package proxied

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
)

func TestConnectionLimit(t *testing.T) {
	r := newRig(t, nil)
	r.service.Spec.ConnectionLimit = 1
	pod := r.pod(named("pod"))
	r.set(pod)
	first := r.dial()
	if _, err := say(first, "x"); err != nil {
		t.Fatal(err)
	}
	r.service.Addrs = []netip.Addr{r.at.Addr(), r.free().Addr()}
	r.set(pod)
	for _, a := range r.service.Addrs { // they count together
		r.at = netip.AddrPortFrom(a, r.at.Port())
		if got, err := say(r.dial(), "x"); err == nil {
			t.Errorf("a second connection at %s: %q", a, got)
		}
	}
}

// There is an end to the connections of all Services, and no Service takes the places of the others.
func TestTooManyConnections(t *testing.T) {
	r := newRig(t, nil)
	if r.server.most < 100 {
		t.Errorf("%d connections", r.server.most)
	}
	r.server.most = 4
	pod := r.pod(named("pod"))
	r.set(pod)
	one := r.service
	works := func(want bool) net.Conn {
		t.Helper()
		c := r.dial()
		if got, err := say(c, "x"); (err == nil) != want {
			t.Errorf("%q, %v, want an answer: %t", got, err, want)
		}
		return c
	}
	first := works(true)
	works(true)
	works(false)
	works(false)
	at := r.at
	r.at = r.free()
	r.service.Name.Name, r.service.Addrs = "other", []netip.Addr{r.at.Addr()}
	r.ask(nil)
	r.service.Backends = map[uint16][]netip.AddrPort{r.at.Port(): {pod}}
	if failed := r.server.Set([]*Service{&one, &r.service}); len(failed) > 0 {
		t.Fatal(failed)
	}
	works(true)
	works(true)
	works(false)
	if n, warnings := r.server.Rejected(), strings.Count(r.log.String(), "rejected a connection"); n != 3 || warnings != 1 {
		t.Errorf("%d rejected, %d warnings", n, warnings)
	}
	r.at = at
	r.must(first.Close())
	for deadline := time.Now().Add(patience); ; { // its place is free
		if _, err := say(r.dial(), "x"); err == nil {
			break
		} else if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// The end of a kept connection that waits comes with the grace of its server.
func TestGraceOfAKeptConnection(t *testing.T) {
	wait := func(grace time.Duration) (ended chan struct{}) {
		r := newRig(t, map[string]string{lbProtocol: "http"})
		r.server.idleGrace = grace
		r.service.Spec.IdleTimeout = dialect.Duration(200 * time.Millisecond)
		r.set(r.web(func(http.ResponseWriter, *http.Request) {}))
		c := r.dial()
		_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: web\r\n\r\n")
		r.must(err)
		_, err = c.Read(make([]byte, 4096))
		r.must(err)
		ended = make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = io.Copy(io.Discard, c)
		}()
		return ended
	}
	long, short := wait(2*patience), wait(time.Millisecond) // in this order
	<-short
	select {
	case <-long:
		t.Error("a connection with a long grace ends before one with a short one")
	default:
	}
}
