package link_test

import (
	"fmt"
	"net/netip"
	"os/exec"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/link"
)

// A restarted agent finds fl0 and the addresses of Services on this machine: none of
// them, nor those of docker and of bridges, becomes the node's.
func TestMachineAddrs(t *testing.T) {
	device := func(name, kind string, addrs ...string) {
		t.Helper()
		run(t, "", "ip", "link", "add", name, "type", kind)
		t.Cleanup(func() { _ = exec.Command("ip", "link", "del", name).Run() })
		for _, a := range addrs {
			run(t, "", "ip", "addr", "add", a, "dev", name)
		}
		run(t, "", "ip", "link", "set", name, "up")
	}
	check := func(what, peer string, want ...string) {
		t.Helper()
		var at netip.Addr
		if peer != "" {
			at = netip.MustParseAddr(peer)
		}
		if got, err := link.MachineAddrs(at); err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, %v; want %v", what, got, err, want)
		}
	}
	device("docker0", "bridge", "172.17.0.1/16")
	device("virbr0", "bridge", "192.168.122.1/24", "fd00:122::1/64")
	check("only bridges", "")
	node(t) // fl0 with addresses of both families
	check("fl0 and bridges", "192.0.2.2")
	outside(t) // up0
	run(t, "", "ip", "addr", "add", "192.0.2.77/24", "dev", "up0")
	check("a neighbour", "192.0.2.2", "192.0.2.1", "2001:db8::1")
	check("a neighbour by IPv6", "2001:db8::2", "2001:db8::1", "192.0.2.1")
	check("no route", "203.0.113.1", "192.0.2.1", "2001:db8::1")
	check("a server in docker", "172.17.0.2", "192.0.2.1", "2001:db8::1")
	check("a server here", "192.0.2.77", "192.0.2.77", "2001:db8::1")
	check("a server on loopback", "127.0.0.1", "192.0.2.1", "2001:db8::1")
	run(t, "", "ip", "link", "add", "other0", "type", "veth", "peer", "name", "other1")
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "other0").Run() })
	run(t, "", "ip", "addr", "add", "198.51.100.1/24", "dev", "other0")
	run(t, "", "ip", "link", "set", "other0", "up")
	run(t, "", "ip", "link", "set", "other1", "up")
	check("the device towards the server", "198.51.100.9", "198.51.100.1", "2001:db8::1")
	run(t, "", "ip", "route", "add", "203.0.113.0/24", "via", "192.0.2.2", "src", "192.0.2.77")
	check("the route's source", "203.0.113.1", "192.0.2.77", "2001:db8::1")
	device("br0", "bridge", "10.0.0.1/24")
	run(t, "", "ip", "route", "add", "default", "via", "10.0.0.254")
	check("a bridge that is the uplink", "8.8.8.8", "10.0.0.1", "2001:db8::1")
}
