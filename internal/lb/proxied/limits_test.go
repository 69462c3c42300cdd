package proxied

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

func TestConnectionLimit(t *testing.T) {
	r := newRig(t, nil)
	r.service.Spec.ConnectionLimit = 1
	pod := r.Pod(lbtest.Named("pod"))
	r.set(pod)
	first := r.Dial()
	if _, err := lbtest.Say(first, "x"); err != nil {
		t.Fatal(err)
	}
	r.service.Addrs = []netip.Addr{r.At.Addr(), r.Free().Addr()}
	r.set(pod)
	for _, a := range r.service.Addrs { // they count together
		r.At = netip.AddrPortFrom(a, r.At.Port())
		if got, err := lbtest.Say(r.Dial(), "x"); err == nil {
			t.Errorf("a second connection at %s: %q", a, got)
		}
	}
}

// An IPv6 network of 64 bits is one client, which has as many connections as the Service lets one have.
func TestConnectionsOfAnIPv6Client(t *testing.T) {
	r := newRig(t, map[string]string{"fairlead.dev/lb-client-connections": "2"})
	r.set(r.Pod(lbtest.Named("pod")))
	a, c := &r.server.admission, r.server.listeners[r.At].Config()
	enter := func(client string) (conn net.Conn, entered bool) {
		t.Helper()
		conn, _ = net.Pipe()
		if !a.admit(conn, c) {
			t.Fatal("it is not admitted")
		}
		return conn, a.enter(conn, c, netip.MustParseAddr(client))
	}
	first, _ := enter("2001:db8::1")
	for _, client := range []struct {
		addr string
		want bool
	}{{"2001:db8::2", true}, {"2001:db8::3", false}, {"2001:db8:0:1::1", true}, {"192.0.2.1", true}} {
		if _, entered := enter(client.addr); entered != client.want {
			t.Errorf("%s enters: %t", client.addr, entered)
		}
	}
	a.forget(first, c)
	if _, entered := enter("2001:db8::3"); !entered {
		t.Error("the place of a connection that has ended stays taken")
	}
}

// There is an end to the connections of all Services, and no Service takes the places of the others.
func TestTooManyConnections(t *testing.T) {
	r := newRig(t, nil)
	if r.server.admission.most < 100 {
		t.Errorf("%d connections", r.server.admission.most)
	}
	r.server.admission.most = 4
	pod := r.Pod(lbtest.Named("pod"))
	r.set(pod)
	one := r.service
	works := func(want bool) net.Conn {
		t.Helper()
		c := r.Dial()
		if got, err := lbtest.Say(c, "x"); (err == nil) != want {
			t.Errorf("%q, %v, want an answer: %t", got, err, want)
		}
		return c
	}
	first := works(true)
	works(true)
	third := works(true) // more than half, while a quarter is free
	works(false)
	works(false)
	at := r.At
	r.At = r.Free()
	r.service.Name.Name, r.service.Addrs = "other", []netip.Addr{r.At.Addr()}
	r.ask(nil)
	r.service.Backends = map[uint16][]netip.AddrPort{r.At.Port(): {pod}}
	if failed := r.server.Set([]*Service{&one, &r.service}); len(failed) > 0 {
		t.Fatal(failed)
	}
	works(true)
	works(false)
	if n, warnings := r.server.Rejected(), strings.Count(r.Logged.String(), "rejected a connection"); n != 3 || warnings != 1 {
		t.Errorf("%d rejected, %d warnings", n, warnings)
	}
	r.At = at
	r.Must(errors.Join(first.Close(), third.Close()))
	for deadline := time.Now().Add(lbtest.Patience); ; { // there is a place of its half again
		if _, err := lbtest.Say(r.Dial(), "x"); err == nil {
			break
		} else if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// What a Pod does not acknowledge ends its connection after the time that this may be idle, or after the system's.
func TestUnacknowledgedByPods(t *testing.T) {
	for idle, want := range map[string]time.Duration{"77": 77 * time.Second, "3600": 0} {
		r := newRig(t, map[string]string{dialect.LBIdleTimeout: idle})
		r.set(r.Pod(lbtest.Named("a")))
		for _, p := range r.server.pools {
			m, err := p.Pick(r.At.Addr(), nil)
			r.Must(err)
			conn, err := r.server.dial(&Config{Spec: &r.service.Spec}, m, r.At, r.At, "")
			r.Must(err)
			if got, err := socket.UserTimeout(conn.(*net.TCPConn)); got != want || err != nil {
				t.Errorf("idle for %s: %s, %v, want %s", idle, got, err, want)
			}
			_ = conn.Close()
		}
	}
}
