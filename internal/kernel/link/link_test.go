package link_test

import (
	"context"
	"errors"
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

func TestRoutes(t *testing.T) {
	node(t)
	outside(t)
	run(t, "", "ip", "route", "add", "10.99.0.0/24", "via", "192.0.2.2", "proto", "static")
	route := func(dst, via string) link.Route {
		return link.Route{Dst: netip.MustParsePrefix(dst), Via: netip.MustParseAddr(via)}
	}
	list := func() string {
		out := run(t, "", "ip", "route", "show", "proto", "250") + run(t, "", "ip", "-6", "route", "show", "proto", "250")
		return strings.Join(strings.Fields(out), " ")
	}
	two := []link.Route{route("10.244.2.0/24", "192.0.2.2"), route("fd00:10:244:2::/64", "2001:db8::2")}
	moved := []link.Route{route("10.244.2.0/24", "192.0.2.3"), route("10.244.3.0/24", "192.0.2.2")}
	var routes link.Routes
	for _, c := range []struct {
		name        string
		want        []link.Route
		has, hasNot []string
	}{
		{"two", two, []string{"10.244.2.0/24 via 192.0.2.2", "fd00:10:244:2::/64 via 2001:db8::2"}, nil},
		{"again", two, []string{"10.244.2.0/24 via 192.0.2.2", "fd00:10:244:2::/64 via 2001:db8::2"}, nil},
		{"moved", moved, []string{"10.244.2.0/24 via 192.0.2.3", "10.244.3.0/24 via 192.0.2.2"}, []string{"fd00", "10.244.2.0/24 via 192.0.2.2"}},
		{"none", nil, nil, []string{"via"}},
	} {
		if failed, err := routes.Set(c.want); err != nil || len(failed) > 0 {
			t.Fatalf("%s: %v, %v", c.name, failed, err)
		}
		got := list()
		for _, h := range c.has {
			if !strings.Contains(got, h) {
				t.Errorf("%s: no %q in %q", c.name, h, got)
			}
		}
		for _, h := range c.hasNot {
			if strings.Contains(got, h) {
				t.Errorf("%s: %q still in %q", c.name, h, got)
			}
		}
	}
	failed, err := new(link.Routes).Set([]link.Route{route("10.244.9.0/24", "203.0.113.9"), route("10.244.8.0/24", "192.0.2.2")})
	if err != nil || len(failed) != 1 || failed[netip.MustParsePrefix("10.244.9.0/24")] == nil {
		t.Errorf("a neighbour out of reach gave %v, %v; want an error of its range", failed, err)
	}
	if got := list(); !strings.Contains(got, "10.244.8.0/24") {
		t.Errorf("one bad route kept the good one away: %q", got)
	}
	if got := run(t, "", "ip", "route", "show", "proto", "static"); !strings.Contains(got, "10.99.0.0/24") {
		t.Errorf("a foreign route is gone: %q", got)
	}
}

// A route costs a message to the kernel when it is new or ends, and nothing else is asked or
// told: what another program has deleted comes back when all are compared.
func TestRoutesCostWhatChanges(t *testing.T) {
	node(t)
	outside(t)
	var routes link.Routes
	var want []link.Route
	add := func(from, to int) {
		t.Helper()
		for i := from; i < to; i++ {
			want = append(want, link.Route{
				Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(i), 0}), 24), Via: netip.MustParseAddr("192.0.2.2"),
			})
		}
		if failed, err := routes.Set(want); err != nil || len(failed) > 0 {
			t.Fatalf("%v, %v", failed, err)
		}
	}
	has := func(i int) bool {
		return strings.Contains(run(t, "", "ip", "route", "show", "proto", "250"), fmt.Sprintf("10.244.%d.0/24 via", i))
	}
	add(1, 200)
	if !has(7) || !has(199) {
		t.Fatal("routes are missing")
	}
	run(t, "", "ip", "route", "delete", "10.244.7.0/24", "metric", fmt.Sprint(link.RouteMetric))
	add(200, 201)
	if has(7) || !has(200) {
		t.Errorf("one more route: all were compared (%v), or it is missing (%v)", has(7), !has(200))
	}
	routes.Forget()
	add(201, 201)
	if !has(7) {
		t.Error("a comparison leaves a route out")
	}
	run(t, "", "ip", "route", "delete", "10.244.9.0/24", "metric", fmt.Sprint(link.RouteMetric))
	want = want[:0] // one that is gone already ends without an error
	add(50, 51)
	if !has(50) || has(51) || has(9) {
		t.Errorf("the routes are\n%s", run(t, "", "ip", "route"))
	}
	if err := routes.Add([]link.Route{{Dst: cluster[0]}}); err != nil {
		t.Fatal(err)
	}
	add(51, 52)
	if strings.Contains(run(t, "", "ip", "route"), "unreachable 10.244.0.0/16") {
		t.Error("an added route outlives the next Set")
	}
}

// Routes that were added stay beside those that are there, until the next comparison.
func TestRoutesThatWereAdded(t *testing.T) {
	node(t)
	all := link.Route{Dst: cluster[0]}
	for range 2 {
		if err := new(link.Routes).Add([]link.Route{all}); err != nil {
			t.Fatal(err)
		}
	}
	if got := run(t, "", "ip", "route"); !strings.Contains(got, "unreachable 10.244.0.0/16") {
		t.Errorf("the routes are\n%s", got)
	}
	if failed, err := new(link.Routes).Set(nil); err != nil || len(failed) > 0 || strings.Contains(run(t, "", "ip", "route"), "unreachable") {
		t.Errorf("%v, %v; the routes are\n%s", failed, err, run(t, "", "ip", "route"))
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

// A route that is not ours is neither replaced nor removed, whatever its metric, and
// takes precedence where it has a lower one.
func TestForeignRoutesStay(t *testing.T) {
	node(t)
	outside(t)
	foreign := []string{
		"default via 192.0.2.2", "10.244.5.0/24 via 192.0.2.3", "10.244.6.0/24 via 192.0.2.3 metric 2500",
	}
	for _, r := range foreign {
		run(t, "", "ip", append([]string{"route", "add"}, strings.Fields(r)...)...)
	}
	route := func(dst string) link.Route {
		return link.Route{Dst: netip.MustParsePrefix(dst), Via: netip.MustParseAddr("192.0.2.2")}
	}
	failed, err := new(link.Routes).Set([]link.Route{route("0.0.0.0/0"), route("10.244.5.0/24"), route("10.244.6.0/24")})
	if err != nil || len(failed) != 1 || failed[netip.MustParsePrefix("10.244.6.0/24")] == nil {
		t.Errorf("failed %v, %v; want that of 10.244.6.0/24 alone, which collides", failed, err)
	}
	if got := run(t, "", "ip", "route", "get", "10.244.5.9"); !strings.Contains(got, "via 192.0.2.3") {
		t.Errorf("the administrator's route does not lead: %s", got)
	}
	for range 2 {
		all := run(t, "", "ip", "route")
		for _, r := range foreign {
			if !strings.Contains(strings.ReplaceAll(all, " dev up0", ""), r) {
				t.Errorf("no %q in\n%s", r, all)
			}
		}
		if _, err := new(link.Routes).Set(nil); err != nil {
			t.Fatal(err)
		}
	}
}

// Who sends to an address of the node's own range that no pod has is told so at
// once, though a default route leads out.
func TestUnusedAddressesAreUnreachable(t *testing.T) {
	node(t)
	outside(t)
	run(t, "", "ip", "route", "add", "default", "via", "192.0.2.2")
	run(t, "", "ip", "-6", "route", "add", "default", "via", "2001:db8::2")
	p := pod(t, 2)
	var own []link.Route
	for _, dst := range []string{"10.244.1.0/24", "fd00:10:244:1::/64"} {
		own = append(own, link.Route{Dst: netip.MustParsePrefix(dst)})
	}
	for range 2 {
		if failed, err := new(link.Routes).Set(own); err != nil || len(failed) > 0 {
			t.Fatal(failed, err)
		}
	}
	for i, dead := range []string{"10.244.1.77", "fd00:10:244:1::77"} {
		for _, ns := range []string{self, p.Netns} {
			start := time.Now()
			// A pod's first packet gets its answer while connect(2) still holds the
			// socket, which then fails when it sends again, after 1 s.
			err := netns.Do(ns, func() error {
				_, err := net.DialTimeout("tcp", netip.AddrPortFrom(netip.MustParseAddr(dead), 80).String(), 20*time.Second)
				return err
			})
			if !errors.Is(err, syscall.EHOSTUNREACH) && !errors.Is(err, syscall.ENETUNREACH) {
				t.Errorf("%s from %s: %v, want that there is no route to host", dead, ns, err)
			}
			t.Logf("%s from %s: %v after %v", dead, ns, err, time.Since(start).Round(time.Microsecond))
		}
		listen(t, p.Netns, netip.AddrPortFrom(p.Addrs[i], 80))
		if _, err := ask(self, netip.AddrPortFrom(p.Addrs[i], 80)); err != nil {
			t.Errorf("the pod that is there: %v", err)
		}
	}
	if err := link.Cleanup(); err != nil {
		t.Fatal(err)
	}
	if got := run(t, "", "ip", "route") + run(t, "", "ip", "-6", "route"); strings.Contains(got, "unreachable") {
		t.Errorf("left after Cleanup:\n%s", got)
	}
}

// BenchmarkOneMoreRoute is a Node that comes and goes among 5,000, when what was written is
// remembered, and when the kernel is asked for all routes as every minute.
func BenchmarkOneMoreRoute(b *testing.B) {
	const nodes = 5000
	want := make([]link.Route, nodes+1)
	for i := range want {
		want[i].Dst = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24) // unreachable
	}
	for _, remembered := range []bool{true, false} {
		b.Run(map[bool]string{true: "remembered", false: "compared"}[remembered], func(b *testing.B) {
			var routes link.Routes
			set := func(n int) {
				if failed, err := routes.Set(want[:n]); err != nil || len(failed) > 0 {
					b.Fatal(failed, err)
				}
			}
			b.Cleanup(func() { set(0) })
			set(nodes)
			for n := nodes + 1; b.Loop(); n = 2*nodes + 1 - n {
				if !remembered {
					routes.Forget()
				}
				set(n)
			}
		})
	}
}
