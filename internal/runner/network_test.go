package runner_test

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/testbed"
)

func run(t *testing.T, stdin, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// Two pods of this node, and each of them with itself, through a Service.
func TestPodsReachEachOtherThroughAService(t *testing.T) {
	e := newEndpoint(t)
	e.create(server("back"))
	back := e.ready("back")
	web := server("web")
	e.create(web)
	front := e.ready("web")
	run(t, fmt.Sprintf(`table inet service {
  chain pre { type nat hook prerouting priority dstnat; policy accept;
    ip daddr 10.96.0.9 tcp dport 80 dnat ip to %s:8080
  }
  chain post { type nat hook postrouting priority srcnat; policy accept;
    ip saddr %s ip daddr %s masquerade
  }
}`, back.Status.PodIP, back.Status.PodIP, back.Status.PodIP), "nft", "-f", "-")
	t.Cleanup(func() { _ = exec.Command("nft", "delete", "table", "inet", "service").Run() })
	ask := func(from *corev1.Pod) string {
		t.Helper()
		shimPid := e.record(from, 0).Process.Pid
		return run(t, "", "nsenter", "-t", fmt.Sprint(shimPid), "-n", "/bin/bash", "-c",
			`exec 3<>/dev/tcp/10.96.0.9/80; printf 'GET / HTTP/1.0\r\n\r\n' >&3; timeout 5 cat <&3`)
	}
	if got := ask(front); !strings.Contains(got, "\n"+front.Status.PodIP+":") {
		t.Errorf("the other pod saw %q, want %s", got, front.Status.PodIP)
	}
	if got := ask(back); !strings.Contains(got, "200 OK") || strings.Contains(got, "\n"+back.Status.PodIP+":") {
		t.Errorf("the pod itself saw %q, want an address of the node", got)
	}
}

func TestRoutesToOtherNodes(t *testing.T) {
	c := newCluster(t, nil)
	run(t, "", "ip", "link", "add", "up0", "type", "bridge")
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "up0").Run() })
	run(t, "", "ip", "addr", "add", "192.0.2.1/24", "dev", "up0")
	run(t, "", "ip", "link", "set", "up0", "up")
	c.node("node-b", "192.0.2.7", "10.244.2.0/24", "fd00:10:244:2::/64")
	routes := func() string { return run(t, "", "ip", "route", "show", "proto", fmt.Sprint(link.Protocol)) }
	await(t, "the route", func() bool { return strings.Contains(routes(), "10.244.2.0/24 via 192.0.2.7") })
	if err := c.client.CoreV1().Nodes().Delete(t.Context(), "node-b", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, "the end of the route", func() bool { return !strings.Contains(routes(), "10.244.2.0/24") })
}

// A node on this network has a route, and one behind a router an overlay, whose device and
// rules exist only as long as there is one. Without the mode auto all are reached in one way.
func TestWaysToOtherNodes(t *testing.T) {
	run(t, "", "ip", "link", "add", "up0", "type", "bridge")
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "up0").Run() })
	run(t, "", "ip", "addr", "add", "192.0.2.1/24", "dev", "up0")
	run(t, "", "ip", "link", "set", "up0", "up")
	run(t, "", "ip", "route", "add", "198.51.100.0/24", "via", "192.0.2.254")
	proto := fmt.Sprint(link.Protocol)
	const near, far = "10.244.2.0/24", "10.244.3.0/24"
	overlay := func(dst, at string) string { return dst + " via " + at + " dev fl0vxlan4" }
	for _, tt := range []struct {
		mode      runner.PodNetwork
		near, far string // of routes, none if empty
		failed    string
	}{
		{runner.PodNetworkAuto, near + " via 192.0.2.7", overlay(far, "10.244.3.0"), ""},
		{runner.PodNetworkVXLAN, overlay(near, "10.244.2.0"), overlay(far, "10.244.3.0"), ""},
		{runner.PodNetworkHostGateway, near + " via 192.0.2.7", "", "one hop"},
		{runner.PodNetworkNone, "", "", ""},
	} {
		t.Run(string(tt.mode), func(t *testing.T) {
			c := newCluster(t, func(o *runner.Options) {
				o.PodNetwork, o.Overlay = tt.mode, link.OverlayOptions{VNI: 2500, Port: 4789}
			})
			ways := func() string {
				return run(t, "", "ip", "route", "show", "proto", proto) + run(t, "", "ip", "-o", "link", "show", "type", "vxlan") +
					run(t, "", "nft", "list", "tables")
			}
			has := func(wanted ...string) bool {
				now := ways()
				return !slices.ContainsFunc(wanted, func(w string) bool { return !strings.Contains(now, w) })
			}
			c.node("node-b", "192.0.2.7", near)
			await(t, "the route to the node on this network", func() bool { return c.routed().Status == corev1.ConditionTrue && has(tt.near) })
			if now := ways(); tt.mode != runner.PodNetworkVXLAN && (strings.Contains(now, "vxlan") || strings.Contains(now, "overlay")) {
				t.Errorf("an overlay with nodes of this network alone:\n%s", ways())
			}
			c.node("node-c", "198.51.100.7", far)
			await(t, "the route to the node behind a router", func() bool {
				routed := c.routed()
				return has(tt.far) && strings.Contains(routed.Message, tt.failed) && (routed.Status == corev1.ConditionFalse) == (tt.failed != "")
			})
			if tt.mode == runner.PodNetworkNone {
				for _, dst := range []string{near, far} {
					if has(dst) {
						t.Errorf("a route to %s in\n%s", dst, ways())
					}
				}
			}
			if tt.mode == runner.PodNetworkAuto {
				c.create(server("web"))
				pid := c.record(c.ready("web"), 0).Process.Pid
				if dev := run(t, "", "nsenter", "-t", fmt.Sprint(pid), "-n", "ip", "link", "show", "eth0"); !strings.Contains(dev, "mtu 1450") {
					t.Errorf("the Pod's device beside an overlay:\n%s", dev)
				}
			}
			for _, name := range []string{"node-b", "node-c"} {
				if err := c.client.CoreV1().Nodes().Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			await(t, "the end of the overlay", func() bool { return !strings.Contains(ways(), "vxlan") && !strings.Contains(ways(), "overlay") })
		})
	}
}

// Routes and masquerading that another program removes are put back long before the
// next comparison.
func TestNetworkIsPutBackAtOnce(t *testing.T) {
	c := newCluster(t, nil)
	run(t, "", "ip", "link", "add", "up0", "type", "bridge")
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "up0").Run() })
	run(t, "", "ip", "addr", "add", "192.0.2.1/24", "dev", "up0")
	run(t, "", "ip", "addr", "add", "2001:db8::1/64", "dev", "up0", "nodad")
	run(t, "", "ip", "link", "set", "up0", "up")
	c.node("node-b", "192.0.2.7", "10.244.2.0/24")
	c.node("node-c", "2001:db8::7", "fd00:10:244:2::/64")
	c.create(server("web"))
	web := c.ready("web")
	proto := fmt.Sprint(link.Protocol)
	routes := func() string {
		return run(t, "", "ip", "route", "show", "proto", proto) + run(t, "", "ip", "-6", "route", "show", "proto", proto) +
			run(t, "", "nft", "list", "ruleset")
	}
	wanted := []string{"10.244.2.0/24 via 192.0.2.7", "fd00:10:244:2::/64 via 2001:db8::7", "unreachable 10.244.1.0/24", "saddr 10.244.1.0/24"}
	for _, ip := range web.Status.PodIPs {
		wanted = append(wanted, ip.IP+" dev fl")
	}
	whole := func() bool {
		now := routes()
		return !slices.ContainsFunc(wanted, func(w string) bool { return !strings.Contains(now, w) })
	}
	await(t, "all routes", whole)
	for range 2 {
		for _, damage := range []string{"ip route flush proto " + proto, "ip -6 route flush proto " + proto, "nft flush ruleset"} {
			words := strings.Fields(damage)
			start := time.Now()
			run(t, "", words[0], words[1:]...)
			await(t, "the repair after "+damage, whole)
			t.Logf("%s: put back after %v", damage, time.Since(start).Round(time.Millisecond))
		}
	}
}

// routed returns the condition PodsRouted.
func (c *cluster) routed() corev1.NodeCondition { return c.r.Condition() }

// What a Node claims for its pods moves no packets but those to its own part of the
// cluster's range; it is reported, and heals when the Node goes.
func TestRangesOfNodesAreChecked(t *testing.T) {
	c := newCluster(t, func(o *runner.Options) {
		o.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")}
		o.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.96.0/20")}
		o.ServerAddrs = []netip.Addr{netip.MustParseAddr("10.244.40.5")}
	})
	run(t, "", "ip", "link", "add", "up0", "type", "bridge")
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "up0").Run() })
	run(t, "", "ip", "addr", "add", "192.0.2.1/24", "dev", "up0")
	run(t, "", "ip", "link", "set", "up0", "up")
	run(t, "", "ip", "route", "add", "default", "via", "192.0.2.254")
	run(t, "", "ip", "route", "add", "10.244.30.0/24", "via", "192.0.2.253")
	c.node("node-b", "192.0.2.7", "10.244.2.0/24")
	routes := func() string { return run(t, "", "ip", "route", "show", "proto", fmt.Sprint(link.Protocol)) }
	await(t, "the route to a good neighbour", func() bool { return strings.Contains(routes(), "10.244.2.0/24 via 192.0.2.7") })
	before := run(t, "", "ip", "route") + run(t, "", "ip", "-6", "route")
	// Of Nodes made in the same second the first by name has its range: node-b.
	for _, bad := range []struct{ name, ip, cidr, reason string }{
		{"z-default", "192.0.2.8", "0.0.0.0/0", "outside of the cluster's pod ranges"},
		{"z-default6", "2001:db8::8", "::/0", "outside of the cluster's pod ranges"},
		{"z-cluster", "192.0.2.8", "10.244.0.0/16", "overlaps with the range of ClusterIPs"},
		{"z-outside", "192.0.2.8", "192.0.2.0/24", "outside of the cluster's pod ranges"},
		{"z-mine", "192.0.2.8", "10.244.1.0/25", "overlaps with the range of node node-a"},
		{"z-others", "192.0.2.8", "10.244.2.128/25", "overlaps with the range of node node-b"},
		{"z-around", "192.0.2.8", "10.244.2.0/23", "overlaps with the range of node node-b"},
		{"z-services", "192.0.2.8", "10.244.100.0/24", "overlaps with the range of ClusterIPs"},
		{"z-server", "192.0.2.8", "10.244.40.0/24", "contains the API server's address"},
		{"z-far", "203.0.113.8", "10.244.3.0/24", "in one hop"},
		{"z-twin", "127.0.0.1", "10.244.4.0/24", "it has the address 127.0.0.1 of node node-a"},
		{"z-inside", "10.244.1.2", "10.244.5.0/24", "lies in the range"},
	} {
		c.node(bad.name, bad.ip, bad.cidr)
		start := time.Now()
		await(t, "the condition about "+bad.name, func() bool {
			cond := c.routed()
			return cond.Status == corev1.ConditionFalse && strings.Contains(cond.Message, "node "+bad.name+": ") &&
				strings.Contains(cond.Message, bad.reason)
		})
		seen := time.Since(start)
		await(t, "the Event about "+bad.name, func() bool {
			return strings.Contains(c.events(bad.name), "Warning RouteRejected: node node-a has no route")
		})
		if err := c.r.Healthy(); err != nil {
			t.Errorf("%s made this node unhealthy: %v", bad.name, err)
		}
		if now := run(t, "", "ip", "route") + run(t, "", "ip", "-6", "route"); now != before {
			t.Errorf("%s: the routes are\n%s\nthey were\n%s", bad.name, now, before)
		}
		if err := c.client.CoreV1().Nodes().Delete(t.Context(), bad.name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		start = time.Now()
		await(t, "the end of the condition about "+bad.name, func() bool { return c.routed().Status == corev1.ConditionTrue })
		t.Logf("%s: reported after %v, healed after %v", bad.name, seen.Round(time.Millisecond), time.Since(start).Round(time.Millisecond))
	}

	// The second of two Nodes with one range gets its route when the first goes.
	c.node("second", "192.0.2.9", "10.244.2.0/24")
	await(t, "the condition", func() bool { return c.routed().Status == corev1.ConditionFalse })
	if err := c.client.CoreV1().Nodes().Delete(t.Context(), "node-b", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, "the route by the second", func() bool { return strings.Contains(routes(), "10.244.2.0/24 via 192.0.2.9") })
	await(t, "the condition", func() bool { return c.routed().Status == corev1.ConditionTrue })
}

// The network of a pod is made again if it was lost while the agent was away.
func TestNetworkComesBack(t *testing.T) {
	c := newCluster(t, nil)
	c.create(server("web"))
	p := c.ready("web")
	c.stop()
	if err := link.Cleanup(); err != nil {
		t.Fatal(err)
	}
	c.start()
	client := &http.Client{Timeout: time.Second}
	await(t, "an answer of the pod", func() bool {
		res, err := client.Get("http://" + net.JoinHostPort(p.Status.PodIP, "8080"))
		if err != nil {
			return false
		}
		return res.Body.Close() == nil
	})
}

// Many pods at once: all run, no address twice.
func TestManyPods(t *testing.T) {
	c := newCluster(t, nil)
	const n = 40
	start := time.Now()
	for i := range n {
		c.create(pod(fmt.Sprint("p", i), "exec sleep 600"))
	}
	seen := map[string]string{}
	for i := range n {
		p := c.ready(fmt.Sprint("p", i))
		for _, ip := range p.Status.PodIPs {
			if other := seen[ip.IP]; other != "" {
				t.Errorf("%s and %s have both %s", p.Name, other, ip.IP)
			}
			seen[ip.IP] = p.Name
		}
	}
	t.Logf("%d pods ready after %v", n, time.Since(start).Round(time.Millisecond))
	start = time.Now()
	if err := c.client.CoreV1().Pods("default").DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		c.untilGone(fmt.Sprint("p", i))
	}
	t.Logf("gone after %v", time.Since(start).Round(time.Millisecond))
}

// How long it takes until the API knows that a process has died.
func TestDeathIsSeenAtOnce(t *testing.T) {
	c := newCluster(t, nil)
	c.change = nil
	c.create(pod("web", "exec sleep 600"))
	p := c.ready("web")
	watch, err := c.client.CoreV1().Pods("default").Watch(t.Context(), metav1.ListOptions{ResourceVersion: p.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	start := time.Now()
	if err := c.record(p, 0).Process.Signal(9); err != nil {
		t.Fatal(err)
	}
	timeout := time.After(testbed.Patience)
	for {
		select {
		case e := <-watch.ResultChan():
			if p, ok := e.Object.(*corev1.Pod); ok && (!isReady(p) || status(p).RestartCount > 0) {
				t.Logf("seen after %v", time.Since(start).Round(100*time.Microsecond))
				return
			}
		case <-timeout:
			t.Fatal("the API does not know of it")
		}
	}
}
