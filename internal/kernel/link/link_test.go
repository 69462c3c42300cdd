package link_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/kernel/sysctl"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

var (
	gateways = []netip.Addr{netip.MustParseAddr("10.244.1.1"), netip.MustParseAddr("fd00:10:244:1::1")}
	cluster  = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")}
)

// pod starts a process in its own network namespace and joins it.
func pod(t *testing.T, n int) link.Pod {
	t.Helper()
	cmd := exec.Command("sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := link.Pod{
		Device: fmt.Sprintf("fltest%d", n), Name: fmt.Sprintf("default/test-%d", n), Netns: netns.Of(cmd.Process.Pid),
		Addrs:    []netip.Addr{netip.MustParseAddr(fmt.Sprintf("10.244.1.%d", n)), netip.MustParseAddr(fmt.Sprintf("fd00:10:244:1::%d", n))},
		Gateways: gateways,
	}
	t.Cleanup(func() {
		_ = link.DelPod(p.Device)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if err := netns.Do(p.Netns, func() error { sysctl.HardenPod(); return nil }); err != nil {
		t.Fatal(err)
	}
	if err := link.AddPod(p); err != nil {
		t.Fatal(err)
	}
	return p
}

func node(t *testing.T) {
	t.Helper()
	if err := link.EnsureNode("fl0", gateways); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := link.Cleanup(); err != nil {
			t.Error(err)
		}
	})
}

// listen answers every connection inside ns with the caller's address.
func listen(t *testing.T, ns string, addr netip.AddrPort) {
	t.Helper()
	var l net.Listener
	err := netns.Do(ns, func() (err error) { l, err = net.Listen("tcp", addr.String()); return err })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(c, netip.MustParseAddrPort(c.RemoteAddr().String()).Addr().Unmap())
			c.Close()
		}
	}()
}

// ask connects from ns and returns the address the other end saw.
func ask(ns string, addr netip.AddrPort) (string, error) {
	var got []byte
	err := netns.Do(ns, func() error {
		c, err := net.DialTimeout("tcp", addr.String(), 30*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(30 * time.Second))
		got, err = io.ReadAll(c)
		return err
	})
	return string(got), err
}

func run(t *testing.T, stdin, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

const self = "/proc/self/ns/net"

func TestPodsReachEachOther(t *testing.T) {
	node(t)
	a, b := pod(t, 2), pod(t, 3)
	for i := range 2 {
		at := netip.AddrPortFrom(b.Addrs[i], 80)
		listen(t, b.Netns, at)
		if got, err := ask(a.Netns, at); err != nil || got != a.Addrs[i].String() {
			t.Errorf("pod to pod: the server saw %q, %v; want %s", got, err, a.Addrs[i])
		}
		if got, err := ask(self, at); err != nil || got != gateways[i].String() {
			t.Errorf("node to pod: the server saw %q, %v; want %s", got, err, gateways[i])
		}
		gw := netip.AddrPortFrom(gateways[i], 81)
		listen(t, self, gw)
		if got, err := ask(b.Netns, gw); err != nil || got != b.Addrs[i].String() {
			t.Errorf("pod to node: the server saw %q, %v; want %s", got, err, b.Addrs[i])
		}
	}
}

// A pod that asks a Service and gets a pod of the same node, and one that gets
// itself: the answers must come back through the node (README).
func TestServiceOnTheSameNode(t *testing.T) {
	node(t)
	a, b := pod(t, 2), pod(t, 3)
	run(t, `table inet service {
  chain pre { type nat hook prerouting priority dstnat; policy accept;
    ip daddr 10.96.0.9 tcp dport 80 dnat ip to 10.244.1.3:8080
    ip6 daddr fd00:10:96::9 tcp dport 80 dnat ip6 to [fd00:10:244:1::3]:8080
  }
  chain post { type nat hook postrouting priority srcnat; policy accept;
    ip saddr 10.244.1.3 ip daddr 10.244.1.3 masquerade
    ip6 saddr fd00:10:244:1::3 ip6 daddr fd00:10:244:1::3 masquerade
  }
}`, "nft", "-f", "-")
	t.Cleanup(func() { _ = exec.Command("nft", "delete", "table", "inet", "service").Run() })
	for i, vip := range []string{"10.96.0.9", "fd00:10:96::9"} {
		listen(t, b.Netns, netip.AddrPortFrom(b.Addrs[i], 8080))
		at := netip.AddrPortFrom(netip.MustParseAddr(vip), 80)
		if got, err := ask(a.Netns, at); err != nil || got != a.Addrs[i].String() {
			t.Errorf("pod to %s: the server saw %q, %v; want %s", at, got, err, a.Addrs[i])
		}
		if got, err := ask(b.Netns, at); err != nil || got == "" || got == b.Addrs[i].String() {
			t.Errorf("pod to itself by %s: the server saw %q, %v; want an address of the node", at, got, err)
		}
	}
}

func TestSpoofedSourceIsRefused(t *testing.T) {
	node(t)
	a, b := pod(t, 2), pod(t, 3)
	at := netip.AddrPortFrom(b.Addrs[0], 80)
	listen(t, b.Netns, at)
	run(t, "", "nsenter", "--net="+a.Netns, "ip", "addr", "add", "10.244.1.77/32", "dev", "eth0")
	err := netns.Do(a.Netns, func() error {
		d := net.Dialer{Timeout: 300 * time.Millisecond, LocalAddr: &net.TCPAddr{IP: net.IPv4(10, 244, 1, 77)}}
		c, err := d.Dial("tcp", at.String())
		if err == nil {
			c.Close()
		}
		return err
	})
	if err == nil {
		t.Error("a connection from an address that is not the pod's was accepted")
	}
}

// outside is a host on a network next to the node, without routes to pods.
func outside(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	ns := netns.Of(cmd.Process.Pid)
	run(t, "", "ip", "link", "add", "up0", "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprint(cmd.Process.Pid))
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "up0").Run() })
	run(t, "", "ip", "addr", "add", "192.0.2.1/24", "dev", "up0")
	run(t, "", "ip", "addr", "add", "2001:db8::1/64", "nodad", "dev", "up0")
	run(t, "", "ip", "link", "set", "up0", "up")
	run(t, "", "nsenter", "--net="+ns, "sh", "-e", "-c",
		"ip link set lo up; ip addr add 192.0.2.2/24 dev eth0; ip addr add 2001:db8::2/64 nodad dev eth0; ip link set eth0 up")
	return ns
}

// A device that has the name of a pod's, but is another program's, is left alone.
func TestDelPodLeavesForeignDevices(t *testing.T) {
	for _, args := range [][]string{
		{"type", "veth", "peer", "name", "fltest9p"}, {"type", "bridge"},
		{"alias", "fairleadx", "type", "veth", "peer", "name", "fltest9p"},
	} {
		run(t, "", "ip", append([]string{"link", "add", "fltest9"}, args...)...)
		if err := link.DelPod("fltest9"); err == nil || !strings.Contains(err.Error(), "in the way") {
			t.Errorf("%v: DelPod = %v, want that a device is in the way", args, err)
		}
		run(t, "", "ip", "link", "del", "fltest9") // fails if it is gone
	}
	node(t)
	p := pod(t, 2)
	if err := link.DelPod(p.Device); err != nil {
		t.Error(err)
	}
	if err := link.DelPod(p.Device); err != nil {
		t.Errorf("without the device: %v", err)
	}
}

func masquerade(t *testing.T, changed func()) *link.Masquerade {
	t.Helper()
	m, err := link.NewMasquerade(changed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return m
}

func TestMasquerade(t *testing.T) {
	node(t)
	a, out := pod(t, 2), outside(t)
	own := []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")}
	removed := make(chan struct{}, 1)
	m := masquerade(t, func() {
		select {
		case removed <- struct{}{}:
		default:
		}
	})
	if err := link.ProbeMasquerade(); err != nil {
		t.Error(err)
	}
	if left := run(t, "", "nft", "list", "ruleset"); left != "" {
		t.Errorf("the probe has left\n%s", left)
	}
	for range 2 { // a second time changes nothing
		if err := m.Set(own, cluster); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ at, want string }{{"192.0.2.2", "192.0.2.1"}, {"2001:db8::2", "2001:db8::1"}} {
		at := netip.AddrPortFrom(netip.MustParseAddr(c.at), 80)
		listen(t, out, at)
		if got, err := ask(a.Netns, at); err != nil || got != c.want {
			t.Errorf("pod to the world: the server saw %q, %v; want %s", got, err, c.want)
		}
	}
	b := pod(t, 3)
	at := netip.AddrPortFrom(b.Addrs[0], 80)
	listen(t, b.Netns, at)
	if got, err := ask(a.Netns, at); err != nil || got != a.Addrs[0].String() {
		t.Errorf("pod to pod: the server saw %q, %v; want %s", got, err, a.Addrs[0])
	}
	if err := link.Unmasquerade(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-removed:
	case <-time.After(30 * time.Second):
		t.Error("not told that the rules were removed")
	}
	if err := link.Unmasquerade(); err != nil {
		t.Errorf("removing what is not there: %v", err)
	}
}

func TestCleanupLeavesNothing(t *testing.T) {
	before := run(t, "", "ip", "-o", "link") + run(t, "", "ip", "route") + run(t, "", "nft", "list", "ruleset")
	run(t, "", "ip", "link", "add", "other", "type", "bridge")
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "other").Run() })
	node(t)
	pod(t, 2)
	if err := masquerade(t, func() {}).Set(cluster, cluster); err != nil {
		t.Fatal(err)
	}
	if d, err := link.Devices(); err != nil || len(d) != 1 || d[0] != "fltest2" {
		t.Fatalf("Devices() = %v, %v", d, err)
	}
	if err := link.EnsureNode("other", gateways); err == nil {
		t.Error("a foreign device was taken over")
	}
	outside(t)
	v := link.NewOverlay(overlayOptions)
	t.Cleanup(func() { _ = v.Close() })
	for _, peer := range []string{"192.0.2.2", "2001:db8::2"} {
		far := []link.Peer{{Addr: netip.MustParseAddr(peer), Pods: []netip.Prefix{netip.MustParsePrefix("10.244.9.0/24")}}}
		routes, err := v.Set(far, []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}, gateways, cluster)
		if err != nil {
			t.Fatal(err)
		}
		if failed, err := new(link.Routes).Set(routes); err != nil || len(failed) > 0 {
			t.Fatal(failed, err)
		}
	}
	if !strings.Contains(run(t, "", "ip", "-o", "link"), "fl0vxlan6") {
		t.Fatal("no device of the overlay")
	}
	for range 2 {
		if err := link.Cleanup(); err != nil {
			t.Fatal(err)
		}
	}
	after := run(t, "", "ip", "-o", "link", "show", "type", "veth") + run(t, "", "ip", "-o", "link", "show", "type", "vxlan") +
		run(t, "", "ip", "route") + run(t, "", "nft", "list", "ruleset")
	if strings.Contains(after, "fl") || strings.Contains(after, "10.244") {
		t.Errorf("left behind:\n%s\nbefore:\n%s", after, before)
	}
	if _, err := os.Stat("/sys/class/net/other"); err != nil && !strings.Contains(run(t, "", "ip", "link"), "other") {
		t.Error("a foreign device is gone")
	}
}
