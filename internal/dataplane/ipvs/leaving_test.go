package ipvs

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// docs/proxy.md: a connection keeps its endpoint as long as that is there, so
// also when its Service is deleted; new ones are treated as if it were gone. That is so for other
// processes, too, until the last connection ends.
func TestDeletedServiceKeepsConnections(t *testing.T) {
	e := flows.NewEnv(t, create("rr"))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	const node = 30080
	// Clients inside have their own endpoints at the node port.
	service := func(names string) *table.Table {
		p := web(e, "", names)
		eps := p.Frontends[0].Endpoints
		p.Frontends = append(p.Frontends, table.Frontend{Kind: table.NodePort, Addr: netip.AddrPortFrom(netip.IPv4Unspecified(), node),
			Endpoints: eps, LocalClients: eps})
		tab := table.New(p)
		tab.NodePortAddrs = []netip.Addr{e.Node.Addr4()}
		tab.LocalCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
		return tab
	}
	none := table.New()
	none.NodePortAddrs, none.LocalCIDRs = service("a").NodePortAddrs, service("a").LocalCIDRs
	key := []table.Key{web(e, "", "a").Key()}
	e.Apply(t, service("a"), nil)
	nodePort := netip.AddrPortFrom(e.Node.Addr4(), node)
	var open []net.Conn
	for from, at := range map[string]netip.AddrPort{"c": vip, "node": vip, "client": vip, "b": nodePort, "other": nodePort} {
		conn, err := e.Host(from).Dial(ctx, svc.TCP, at)
		if err != nil {
			t.Fatalf("%s to %s: %v", from, at, err)
		}
		defer func() { _ = conn.Close() }()
		if got, err := testbed.AskOn(conn); err != nil || got.Name != "a" {
			t.Fatalf("%s to %s: %+v, %v", from, at, got, err)
		}
		open = append(open, conn)
	}
	alive := func(when string) {
		t.Helper()
		for _, c := range open {
			word := "still there, " + when + "?"
			b := make([]byte, len(word))
			_, err := fmt.Fprint(c, word)
			if err == nil {
				_, err = c.Read(b)
			}
			if err != nil || string(b) != word {
				t.Errorf("%s, %s to %s: %q, %v", when, c.LocalAddr(), c.RemoteAddr(), b, err)
			}
		}
	}
	// As without them: an unassigned address does not answer, a closed port
	// of the node refuses.
	closed := func(when string) {
		t.Helper()
		if got, err := e.Host("b").Ask(ctx, svc.TCP, nodePort); !testbed.Refused(err) {
			t.Errorf("%s, a new connection to %s: %+v, %v; want that it is refused", when, nodePort, got, err)
		}
		for _, from := range []string{"c", "node"} {
			short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			if got, err := e.Host(from).Ask(short, svc.TCP, vip); err == nil || !testbed.Silent(err) {
				t.Errorf("%s, a new connection from %s to %s: %+v, %v; want silence", when, from, vip, got, err)
			}
			cancel()
		}
	}
	alive("before")
	e.Apply(t, none, key)
	alive("without the Service")
	closed("without the Service")
	e.Apply(t, none, nil)
	alive("after a full comparison")
	if r := e.Dataplane.(*Mode).Repaired(); len(r) > 0 {
		t.Errorf("it repaired %q", r)
	}
	if err := e.Dataplane.Close(); err != nil {
		t.Error(err)
	}
	e.Node.Do(func() { e.Dataplane = create("rr")(t, e.Node) })
	e.Apply(t, none, nil)
	alive("after a restart")
	closed("after a restart")
	// A Service that comes to the same address takes it over.
	e.Apply(t, service("d"), key)
	alive("with a new Service")
	if seen := ask(t, e, "c", 4); seen["d"] != 4 {
		t.Errorf("the new Service: %v, want d", seen)
	}
	e.Apply(t, none, key)
	alive("without the new Service")
	for _, c := range open {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	for deadline := time.Now().Add(time.Minute); ; {
		e.Apply(t, none, nil)
		d := dumpOf(t, e)
		if !strings.Contains(d, "10.96.0.10") && !strings.Contains(d, "tcp 192.168") && !strings.Contains(d, "inside of") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the last connection has ended, and there is still\n%s", d)
		}
		<-time.After(50 * time.Millisecond)
	}
}
