package forward

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/plugin"
	"github.com/fairlead/fairlead/internal/testbed"
)

// Failed questions never mark a resolver down, since its zone's server may be the silent
// one; failed health checks do.
func TestOnlyHealthChecksMarkDown(t *testing.T) {
	closed, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := closed.LocalAddr().(*net.UDPAddr).AddrPort()
	closed.Close()
	f, err := New(&corefile.Forward{
		From: ".", To: []corefile.Upstream{{Addr: netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())}}, Policy: "sequential", MaxFails: 2,
		HealthEvery: time.Millisecond, HealthDomain: ".", ReadTimeout: time.Second,
	}, slog.New(slog.DiscardHandler), plugin.End{})
	if err != nil {
		t.Fatal(err)
	}
	u := f.Upstreams()[0]
	for i := range 5 {
		q := &plugin.Query{Msg: new(mdns.Msg).SetQuestion(fmt.Sprintf("x%d.example.", i), mdns.TypeA), Network: "udp"}
		if r := f.Answer(t.Context(), q); r.Code() != mdns.RcodeServerFailure {
			t.Fatalf("no one listens, but the answer is %v", r)
		}
	}
	if u.down(2) || !u.Healthy() {
		t.Error("failed questions mark the resolver down before a health check")
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); f.Run(ctx) }()
	testbed.Until(t, "failed health checks to mark the resolver down", func() error {
		if !u.down(2) {
			return errors.New("it is up")
		}
		return nil
	})
	cancel()
	<-ended
}
