package filter_test

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// What the node serves: a listener, its node port, the port of its health check, and something else.
const port, nodePort, healthPort, otherPort = 80, 30080, 30999, 22

// The three rules of a Network Load Balancer (behaviour 141): its clients reach its port and its node port, and their ICMP of
// path MTU discovery arrives; Nodes reach the node port and the health check's; all else is as without it. The rules have the
// names that AWS's have.
func TestRulesOfNetworkLoadBalancers(t *testing.T) {
	n := testbed.NewNetwork(t)
	node, client, checker, other := n.Host("node"), n.Outside("client"), n.Outside("checker"), n.Outside("other")
	for _, p := range []uint16{port, nodePort, healthPort, otherPort} {
		node.Serve(svc.TCP, p)
	}
	for _, h := range []*testbed.Host{client, checker, other} {
		for _, a := range vips {
			h.Route(netip.PrefixFrom(a, a.BitLen()), node.Addr(svc.FamilyOf(a)))
		}
	}
	exact := func(h *testbed.Host) []netip.Prefix {
		return []netip.Prefix{netip.PrefixFrom(h.Addr4(), 32), netip.PrefixFrom(h.Addr6(), 128)}
	}
	group := filter.Group{
		Name: "default/web", Clients: exact(client), Listeners: listeners(vips, port), PathMTU: vips[:1],
		NodePorts: []filter.NodePort{{Protocol: svc.TCP, Port: nodePort}}, HealthPorts: []uint16{healthPort},
	}
	f := filter.NewGroups(func() {})
	t.Cleanup(func() { _ = f.Close() })
	var raw net.PacketConn
	nodes := exact(checker)
	set := func(groups ...filter.Group) {
		t.Helper()
		node.Do(func() {
			if err := errors.Join(link.SetVIPs(vips, nil), f.Set(nodes, groups)); err != nil {
				t.Fatal(err)
			}
		})
	}
	set(group)
	node.Do(func() {
		var err error
		if raw, err = net.ListenPacket("ip4:icmp", vips[0].String()); err != nil {
			t.Fatal(err)
		}
	})
	defer raw.Close()
	check := func(when string, h *testbed.Host, want ...string) {
		t.Helper()
		tryAll(t, when, h, node, raw, want)
	}
	check("client", client, "listener", "node port", "other", "mtu")
	check("health check", checker, "node port", "health", "other")
	check("neither", other, "other")
	text := ""
	node.Do(func() {
		out, err := node.Command(t.Context(), "nft", "list", "table", "inet", "fairlead-lb-rules").CombinedOutput()
		if text = string(out); err != nil {
			t.Fatalf("%v %s", err, out)
		}
	})
	for _, rule := range []string{"client", "health", "mtu"} {
		if !strings.Contains(text, `comment "kubernetes.io/rule/nlb/`+rule+`=default/web"`) {
			t.Errorf("no rule %s in\n%s", rule, text)
		}
	}
	nodes = append(exact(other), exact(checker)[0].Masked(), netip.PrefixFrom(checker.Addr4(), 31))
	set(group)
	check("another Node", other, "node port", "health", "other")
	nodes = exact(other)
	set(group)
	check("a Node that is gone", checker, "other")
	nodes, group.Clients = nil, nil
	set(group)
	everything := []string{"listener", "node port", "health", "other", "mtu"}
	check("all clients", other, everything...)
	set()
	check("no rules", other, everything...)
	node.Do(func() {
		if out, err := node.Command(t.Context(), "nft", "list", "tables").CombinedOutput(); err != nil || strings.Contains(string(out), "rules") {
			t.Errorf("left: %v\n%s", err, out)
		}
	})
}

// tryAll tries everything from a host: what is wanted has its time, what is dropped is not waited for.
func tryAll(t *testing.T, when string, h, node *testbed.Host, raw net.PacketConn, want []string) {
	t.Helper()
	try := func(what string, do func(limit time.Duration) bool) {
		limit, wanted := 300*time.Millisecond, slices.Contains(want, what)
		if wanted {
			limit = patience
		}
		if got := do(limit); got != wanted {
			t.Errorf("%s: %s from %s: %t, want %t", when, what, h.Name(), got, wanted)
		}
	}
	connect := func(what string, a netip.Addr, port uint16) {
		try(what, func(limit time.Duration) bool {
			var c net.Conn
			var err error
			if h.Do(func() { c, err = net.DialTimeout("tcp", netip.AddrPortFrom(a, port).String(), limit) }); err == nil {
				_ = c.Close()
			}
			return err == nil
		})
	}
	for i, a := range []netip.Addr{node.Addr4(), node.Addr6()} {
		connect("listener", vips[i], port)
		connect("node port", a, nodePort)
		connect("health", a, healthPort)
		connect("other", a, otherPort)
	}
	try("mtu", func(limit time.Duration) bool { return arrives(t, h, raw, limit) })
}

// arrives reports whether a message that fragmentation is needed, by ICMP, gets from a host to a socket of the node.
func arrives(t *testing.T, from *testbed.Host, at net.PacketConn, limit time.Duration) bool {
	t.Helper()
	m := make([]byte, 8+28)
	m[0], m[1] = 3, 4
	copy(m[8:], "some packet of the connection")
	sum := 0
	for i := 0; i < len(m); i += 2 {
		sum += int(m[i])<<8 + int(m[i+1])
	}
	sum = sum&0xffff + sum>>16
	m[2], m[3] = byte(^sum>>8), byte(^sum)
	var c net.Conn
	var err error
	if from.Do(func() { c, err = net.Dial("ip4:icmp", vips[0].String()) }); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(m); err != nil {
		t.Fatal(err)
	}
	_ = at.SetReadDeadline(time.Now().Add(limit))
	for got := make([]byte, 1500); ; {
		n, peer, err := at.ReadFrom(got)
		if err != nil {
			return false
		}
		if n > 1 && got[0] == 3 && got[1] == 4 && peer.String() == from.Addr4().String() {
			return true
		}
	}
}
