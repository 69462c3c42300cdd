package relay

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// behaviour 40.
func TestRefusedGoesOnToTheNext(t *testing.T) {
	gone := closedPort(t)
	target := &inOrder{endpoints: []netip.AddrPort{gone, gone, serve(t, svc.IPv4, echo)}}
	e, _, at := start(t, Config{}, svc.TCP, svc.IPv4, target)
	if err := ask(dial(t, at), "hello"); err != nil {
		t.Fatal(err)
	}
	if s := e.Stats(); s.Retried != 1 || s.Failed != 0 || s.EndpointFailures != 2 || len(target.failed) != 2 || len(target.answered) != 1 {
		t.Errorf("%+v, failed %v, answered %v", s, target.failed, target.answered)
	}
	target.set(gone)
	c, err := net.DialTimeout("tcp", at, waitLimit) // may see the reset already
	if err == nil {
		_ = c.SetDeadline(time.Now().Add(waitLimit))
		err = ask(c, "hello")
		_ = c.Close()
	}
	if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		t.Errorf("no endpoint answers, the client got %v, want a reset", err)
	}
	until(t, "the failure is counted", func() bool { return e.Stats().Failed == 1 })
}

// closedPort is an address that refuses.
func closedPort(t testing.TB) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	return netip.MustParseAddrPort(l.Addr().String())
}

// startOn starts an Engine with one listener for TCP on a host of the testbed.
func startOn(t testing.TB, h *testbed.Host, cfg Config, target Target) (*Engine, netip.AddrPort) {
	t.Helper()
	var e *Engine
	var l *Listener
	var err error
	h.Do(func() {
		if e, err = Start(cfg); err == nil {
			l, err = e.Listen(svc.TCP, svc.IPv4, 0, target)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
		defer cancel()
		if err := e.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return e, netip.AddrPortFrom(h.Addr4(), l.Port)
}

// An endpoint that cannot be reached is left at once, whether the routes of this
// machine reports it or an ICMP error of a gateway does.
func TestUnreachableGoesOnToTheNext(t *testing.T) {
	n := testbed.NewNetwork(t)
	h, gateway := n.Host("a"), n.Host("b")
	here, there := netip.MustParseAddrPort("198.51.100.1:80"), netip.MustParseAddrPort("203.0.113.1:80")
	h.Route(netip.PrefixFrom(there.Addr(), 32), gateway.Addr4())
	gateway.Sysctl("net/ipv4/ip_forward", "1")
	for host, to := range map[*testbed.Host]netip.AddrPort{h: here, gateway: there} {
		if out, err := host.Command(t.Context(), "ip", "route", "add", "unreachable", to.Addr().String()).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	h.Serve(svc.TCP, 9376)
	// Longer than the test may take: it is not the timeout that helps.
	cfg := Config{ConnectTimeout: 10 * time.Minute}
	target := &inOrder{endpoints: []netip.AddrPort{here, there, netip.AddrPortFrom(h.Addr4(), 9376)}}
	e, at := startOn(t, h, cfg, target)
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	if got, err := h.Ask(ctx, svc.TCP, at); err != nil || got.Name != "a" {
		t.Errorf("%+v, %v", got, err)
	}
	if s := e.Stats(); s.Retried != 1 || s.Failed != 0 || s.EndpointFailures != 2 {
		t.Errorf("%+v, want one connection that went on from two endpoints", s)
	}
}

// An endpoint that is silent is left after the timeout; a slow one that is the
// last has longer.
func TestSilenceGoesOnToTheNext(t *testing.T) {
	n := testbed.NewNetwork(t)
	h := n.Host("a")
	silent := netip.MustParseAddrPort("198.51.100.1:80") // the gateway swallows it
	h.Serve(svc.TCP, 9376)
	good := netip.AddrPortFrom(h.Addr4(), 9376)
	target := &inOrder{endpoints: []netip.AddrPort{silent, good}}
	_, at := startOn(t, h, Config{ConnectTimeout: 50 * time.Millisecond}, target)
	began := time.Now()
	if got, err := h.Ask(t.Context(), svc.TCP, at); err != nil || got.Name != "a" {
		t.Errorf("%+v, %v", got, err)
	}
	if took := time.Since(began); took < 50*time.Millisecond {
		t.Errorf("the endpoint was given up after %s, before its time", took)
	}
	target.set(silent)
	before := time.Now()
	if got, err := h.Ask(t.Context(), svc.TCP, at); err == nil {
		t.Errorf("%+v from no endpoint", got)
	}
	if took := time.Since(before); took < lastFactor*50*time.Millisecond {
		t.Errorf("the last endpoint was given up after %s", took)
	}
}
