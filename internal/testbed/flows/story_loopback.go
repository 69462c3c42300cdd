package flows

import (
	"context"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Other machines do not reach what listens on 127.0.0.1 of the node: neither while a
// frontend there has it routed, nor when the last one is gone, for then it still is
// (kubernetes/kubernetes#90259).
func loopbackStaysClosed(t *testing.T, e *Env) {
	at := AP("127.0.0.1:9376")
	e.Client.Sysctl("net/ipv4/conf/all/route_localnet", "1")
	for _, local := range []string{"127.0.0.0/8", "127.0.0.1"} {
		cmd := e.Client.Command(t.Context(), "ip", "route", "del", "local", local, "dev", "lo", "table", "local")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	e.Client.Route(netip.PrefixFrom(at.Addr(), 32), e.Node.Addr4())
	closed := func(when string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), silence)
		defer cancel()
		// The answer would be lost on the client's side; that the node knows the connection is enough.
		if got, err := e.Client.Ask(ctx, svc.TCP, at); err == nil || e.Node.Tracks(svc.TCP, at) == nil {
			t.Errorf("%s: the node let a client in at 127.0.0.1 (%+v, %v)", when, got, err)
		}
	}
	tab := e.Table(svc.IPv4, svc.TCP, &Row{API: hostPort("a", "")})
	e.Apply(t, tab, nil)
	closed("with a host port")
	e.Apply(t, table.New(), Changes(tab, table.New()))
	closed("without")
	e.Apply(t, table.New(), nil)
	closed("after a comparison")
}
