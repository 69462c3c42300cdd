package filter_test

import (
	"context"
	"net"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/filter"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// Packets to an address that is routed to a node, and that are for no Service, are refused there at once, by TCP and UDP and both
// families, and for the node itself; an echo request is answered. Without the rules the node sends them back to where they
// came from. What is translated to an endpoint passes.
func TestUnusedPortsAreRefused(t *testing.T) {
	n := testbed.NewNetwork(t)
	node, client, backend := n.Host("node"), n.Outside("client"), n.Outside("backend")
	backend.Serve(svc.TCP, 8080)
	addrs := []netip.Addr{netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("2001:db8:113::7")}
	inside := []netip.Addr{netip.MustParseAddr("203.0.113.200"), netip.MustParseAddr("2001:db8:113::200")}
	outside := netip.MustParseAddr("203.0.114.1")
	for _, a := range append(append(addrs[:2:2], inside...), outside) {
		client.Route(netip.PrefixFrom(a, a.BitLen()), node.Addr(svc.FamilyOf(a)))
	}
	nft := func(args ...string) string {
		t.Helper()
		return process.Output(t, node.Command(t.Context(), "nft", args...))
	}
	nft("table ip proxy { chain pre { type nat hook prerouting priority dstnat; " +
		"ip daddr 203.0.113.7 tcp dport 80 dnat to " + backend.Addr4().String() + ":8080; }; " +
		"chain post { type nat hook postrouting priority srcnat; ct status dnat masquerade; }; }")
	u := filter.NewUnused(func() {})
	write := func(networks ...netip.Prefix) {
		t.Helper()
		node.Do(func() {
			if err := u.Write(networks); err != nil {
				t.Fatal(err)
			}
		})
	}
	refused := func(from *testbed.Host, a netip.Addr) bool {
		all := true
		for _, p := range []svc.Protocol{svc.TCP, svc.UDP} {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			_, err := from.Ask(ctx, p, netip.AddrPortFrom(a, 81))
			cancel()
			all = all && testbed.Refused(err)
		}
		return all
	}
	for _, a := range addrs {
		u.Add(a)
	}
	write()
	for _, a := range addrs {
		for _, from := range []*testbed.Host{client, node} {
			if !refused(from, a) {
				t.Errorf("port 81 of %s is not refused to %s", a, from.Name())
			}
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if got, err := client.Ask(ctx, svc.TCP, netip.AddrPortFrom(addrs[0], 80)); err != nil || got.Name != "backend" {
		t.Errorf("its port 80: %+v, %v", got, err)
	}
	for _, a := range addrs {
		for _, from := range []*testbed.Host{client, node} {
			if err := echo(from, a); err != nil {
				t.Errorf("ping from %s to %s: %v", from.Name(), a, err)
			}
		}
	}

	write(netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8:113::/64"))
	for _, a := range inside {
		if !refused(client, a) {
			t.Errorf("%s is not refused: its prefix is announced as a whole", a)
		}
		if err := echo(client, a); err != nil {
			t.Errorf("ping to %s, whose prefix is announced as a whole: %v", a, err)
		}
	}
	const table = "fairlead-lb-unused"
	u.Delete(addrs[0])
	u.Add(inside[0])
	write()
	text := nft("list", "table", "inet", table)
	if regexp.MustCompile(`203\.0\.113\.7\b`).MatchString(text) || !strings.Contains(text, "203.0.113.200") || strings.Contains(text, "/24") {
		t.Errorf("after a change there is\n%s", text)
	}
	if !refused(client, inside[0]) {
		t.Errorf("%s, which was added, is not refused", inside[0])
	}
	soon, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := client.Ask(soon, svc.TCP, netip.AddrPortFrom(addrs[0], 81)); err == nil || testbed.Refused(err) {
		t.Errorf("%s, which was removed: %v, want no answer", addrs[0], err)
	}
	u.Delete(inside[0])
	u.Delete(addrs[1])
	if write(); strings.Contains(nft("list", "tables"), table) {
		t.Errorf("without addresses there is\n%s", nft("list", "table", "inet", table))
	}
	node.Do(func() {
		if err := u.Close(); err != nil {
			t.Error(err)
		}
	})
}

// echo sends an echo request and waits for the reply, which comes from the address itself.
func echo(from *testbed.Host, to netip.Addr) (err error) {
	network, request, reply := "ip4:icmp", byte(8), byte(0)
	if to.Is6() {
		network, request, reply = "ip6:ipv6-icmp", 128, 129
	}
	var conn net.Conn
	if from.Do(func() { conn, err = net.Dial(network, to.String()) }); err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	// The kernel makes the checksum for IPv6.
	message := []byte{request, 0, ^request, 0xff, 0, 0, 0, 0}
	if _, err := conn.Write(message); err != nil {
		return err
	}
	for b := make([]byte, 100); ; {
		n, err := conn.Read(b)
		if err != nil {
			return err
		}
		head := 0
		if to.Is4() { // such a read does not strip it
			head = int(b[0]&0xf) * 4
		}
		if n > head && b[head] == reply {
			return nil
		}
	}
}
