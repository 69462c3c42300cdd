package ipvs

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// A UDP flow stays with an endpoint that serves, though new ones go elsewhere, and
// goes with it.
func TestFlowsStayWithServingEndpoints(t *testing.T) {
	e := flows.NewEnv(t, create("rr"))
	at := func(names ...string) (out []table.Endpoint) {
		for _, n := range names {
			out = append(out, table.Endpoint{Addr: netip.AddrPortFrom(e.Host(n).Addr4(), 9376), Local: true})
		}
		return out
	}
	apply := func(endpoints, serving []table.Endpoint) {
		t.Helper()
		p := flows.Port("web", "", svc.IPv4, svc.UDP, table.Frontend{Addr: vip, Endpoints: endpoints})
		p.Serving = serving
		e.Apply(t, table.New(p), []table.Key{p.Key()})
	}
	reaches := func(c net.Conn, want string) {
		t.Helper()
		if got, err := testbed.AskOn(c); err != nil || got.Name != want {
			t.Errorf("%s reaches %q, %v, want %s", c.LocalAddr(), got.Name, err, want)
		}
	}
	dial := func() net.Conn {
		t.Helper()
		c, err := e.Host("c").Dial(t.Context(), svc.UDP, vip)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	e.Apply(t, table.New(), nil)
	apply(at("a"), at("a"))
	flow := dial()
	reaches(flow, "a")
	apply(at("b"), at("a", "b"))
	for range 5 {
		reaches(dial(), "b")
		reaches(flow, "a")
	}
	apply(at("b"), at("b"))
	// The kernel drops the datagram by which it notices.
	testbed.Until(t, "the flow at b", func() error {
		if err := flow.SetDeadline(time.Now().Add(time.Second)); err != nil {
			return err
		}
		_, err := testbed.AskOn(flow)
		return err
	})
	if err := flow.SetDeadline(time.Now().Add(testbed.Patience)); err != nil {
		t.Fatal(err)
	}
	reaches(flow, "b")
}

// A TCP client whose endpoint does not answer gets another one with one of its next
// tries once that endpoint is removed.
func TestConnectingClientLeavesDeadEndpoint(t *testing.T) {
	e := flows.NewEnv(t, create("rr"))
	dead := table.Endpoint{Addr: netip.MustParseAddrPort("10.244.1.99:9376")} // no pod has it
	apply := func(ep table.Endpoint) {
		t.Helper()
		p := flows.Port("web", "", svc.IPv4, svc.TCP, table.Frontend{Addr: vip, Endpoints: []table.Endpoint{ep}})
		e.Apply(t, table.New(p), []table.Key{p.Key()})
	}
	e.Apply(t, table.New(), nil)
	apply(dead)
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	type answer struct {
		testbed.Answer
		err error
	}
	answered := make(chan answer, 1)
	go func() {
		got, err := e.Host("c").Ask(ctx, svc.TCP, vip)
		answered <- answer{got, err}
	}()
	testbed.Until(t, "the client's first try", func() error { return e.Node.Tracks(svc.TCP, vip) })
	apply(table.Endpoint{Addr: netip.AddrPortFrom(e.Host("a").Addr4(), 9376), Local: true})
	if got := <-answered; got.err != nil || got.Name != "a" {
		t.Errorf("after the dead endpoint was removed: %+v, %v, want a", got.Answer, got.err)
	}
}
