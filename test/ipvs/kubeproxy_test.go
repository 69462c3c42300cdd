package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
	"github.com/fairlead/fairlead/internal/testbed/uml"
)

// kubeProxy is kube-proxy v1.37.2 in mode ipvs on the node. It calls the legacy iptables, since the guest's nf_tables has no families of
// IP, and the guest's own modprobe.
func (c *cluster) kubeProxy(more ...string) *exec.Cmd {
	c.t.Helper()
	tools := c.path("tools")
	if err := os.MkdirAll(tools, 0o700); err != nil {
		c.t.Fatal(err)
	}
	modprobe, err := os.ReadFile("/proc/sys/kernel/modprobe")
	if err != nil {
		c.t.Fatal(err)
	}
	links := map[string]string{"modprobe": strings.TrimSpace(string(modprobe))}
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			links[program+suffix] = "/usr/sbin/" + program + "-legacy" + suffix
		}
	}
	for name, to := range links {
		if err := os.Symlink(to, filepath.Join(tools, name)); err != nil && !errors.Is(err, os.ErrExist) {
			c.t.Fatal(err)
		}
	}
	args := append([]string{"--kubeconfig", c.server.Kubeconfig, "--hostname-override=node", "--proxy-mode=ipvs", "--conntrack-max-per-core=0",
		"--cluster-cidr=" + c.node.PodCIDR(svc.IPv4).String(), "--conntrack-tcp-timeout-established=0s",
		"--conntrack-tcp-timeout-close-wait=0s"}, more...)
	cmd := c.node.Command(context.Background(), uml.Shared+"/kube-proxy", args...)
	cmd.Env = append(os.Environ(), "PATH="+tools+":"+os.Getenv("PATH"))
	return cmd
}

// beside is fairlead proxy on the node, in mode iptables. Its rules are at the same hooks as the rules of mode nft.
func (c *cluster) beside() *exec.Cmd {
	return c.command("proxy", "--mode", "iptables", "--mode-strict", "--iptables-variant", "legacy", "--kubeconfig", c.server.Kubeconfig,
		"--node-name", "node", "--service-cluster-ip-range", "10.96.0.0/16", "--cluster-cidr", c.node.PodCIDR(svc.IPv4).String(),
		"--healthz-bind-address", "", "--metrics-bind-address", "127.0.0.1:10999")
}

// connections are new ones all the time, and open ones.
type connections struct {
	*testing.T
	made, failed atomic.Int64
	open         map[string]net.Conn
}

// way is from whom to where, and whether the endpoint sees the client's own address.
type way struct {
	name string
	from *testbed.Host
	to   netip.AddrPort
	seen netip.Addr
}

// connect opens connections all the time, until the test calls end.
func connect(t *testing.T, ways []way) (c *connections, end func()) {
	t.Helper()
	c = &connections{T: t, open: map[string]net.Conn{}}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() { stop(); running.Wait() })
	for _, w := range ways {
		c.keep(w.name+", from the start", w)
		running.Go(func() {
			pace := time.NewTicker(50 * time.Millisecond)
			defer pace.Stop()
			for ctx.Err() == nil {
				a, err := w.from.Ask(context.Background(), svc.TCP, w.to)
				if err == nil && w.seen.IsValid() && a.Client.Addr() != w.seen {
					err = fmt.Errorf("the client is %s, want %s", a.Client, w.seen)
				}
				if err != nil && c.failed.Add(1) < 5 {
					c.Errorf("%s: %v", w.name, err)
				}
				c.made.Add(1)
				<-pace.C
			}
		})
	}
	return c, func() { stop(); running.Wait() }
}

// keep opens a connection that stays.
func (c *connections) keep(name string, w way) {
	c.Helper()
	conn, err := w.from.Dial(c.Context(), svc.TCP, w.to)
	if err == nil {
		_, err = testbed.AskOn(conn)
	}
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err != nil {
		c.Fatal(name, err)
	}
	c.open[name] = conn
}

// alive asks on every open connection.
func (c *connections) alive(when string) {
	c.Helper()
	for name, conn := range c.open {
		if err := conn.SetDeadline(time.Now().Add(testbed.Patience)); err != nil {
			c.Error(err)
		}
		alive(c.T, conn, name+", "+when)
	}
}

// drains runs what the Pods of 'fairlead migrate' run.
func (c *cluster) drains() (text string, code int) {
	c.t.Helper()
	stdout, stderr, code := process.Result(c.t, c.command("migrate", "drain-node", "--within", "1s"))
	return stdout + stderr, code
}

// programmed waits until the proxy with metrics at an address has written all of its rules. IPVS works before kube-proxy has written the
// other ones, and the kernel tracks no connections before. With the flag --mode of kube-proxy its servers are compared, too.
func (c *cluster) programmed(metrics string, mode ...string) {
	c.t.Helper()
	testbed.Until(c.t, "the rules of the proxy at "+metrics, func() error {
		_, err := process.Try(c.command(append([]string{"migrate", "check-node", "--node", "node", "--program", "kube-proxy",
			"--metrics", metrics, "--within", "1s", "--kubeconfig", c.server.Kubeconfig}, mode...)...))
		return err
	})
}

// datagrams makes a Service of UDP.
func (c *cluster) datagrams(name, clusterIP string, endpoints ...*testbed.Host) {
	c.t.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}}
	s.Spec.ClusterIP, s.Spec.Ports = clusterIP, []corev1.ServicePort{{Protocol: corev1.ProtocolUDP, Port: 53}}
	list := slice(name, endpoints)
	*list.Ports[0].Protocol = corev1.ProtocolUDP
	_, err1 := c.server.Client.CoreV1().Services("default").Create(c.t.Context(), s, metav1.CreateOptions{})
	_, err2 := c.slices().Create(c.t.Context(), list, metav1.CreateOptions{})
	if err := errors.Join(err1, err2); err != nil {
		c.t.Fatal(err)
	}
}

// socket opens a socket of UDP, which gets an answer.
func (c *cluster) socket(from *testbed.Host, to netip.AddrPort) net.Conn {
	c.t.Helper()
	conn, err := from.Dial(c.t.Context(), svc.UDP, to)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = conn.Close() })
	c.led(conn)
	return conn
}

// led asks on a socket of UDP.
func (c *cluster) led(conn net.Conn) {
	c.t.Helper()
	err := conn.SetDeadline(time.Now().Add(testbed.Patience))
	if err == nil {
		_, err = testbed.AskOn(conn)
	}
	if err != nil {
		c.t.Errorf("a socket of UDP: %v", err)
	}
}

// undrains runs what the Pods of 'fairlead migrate rollback' run. An address that leaves kube-proxy's device then leaves no route.
func (c *cluster) undrains() {
	c.t.Helper()
	const addr, route = "10.96.0.250/32", "local 10.96.0.250 dev " + svc.KubeProxyDevice + " proto kernel scope host src "
	c.on("ip", "address", "add", addr, "dev", svc.KubeProxyDevice)
	for _, step := range []struct{ flag, source string }{{"--within=0s", c.node.Addr4().String()}, {"--undo", "10.96.0.250"}} {
		_, stderr, code := process.Result(c.t, c.command("migrate", "drain-node", step.flag))
		if routes := c.on("ip", "route", "show", "table", "local"); !strings.Contains(routes, route+step.source) || code != 0 && code != 75 {
			c.t.Errorf("after %s: exit code %d, %s; want the source %s in\n%s", step.flag, code, stderr, step.source, routes)
		}
	}
	c.on("ip", "address", "del", addr, "dev", svc.KubeProxyDevice)
	if routes := c.on("ip", "route", "show", "table", "local"); strings.Contains(routes, "10.96.0.250") {
		c.t.Errorf("the address has gone, and its route is there:\n%s", routes)
	}
}

// A node changes from the real kube-proxy in mode ipvs to fairlead proxy and back, in the order of 'fairlead migrate'. No new connection
// fails, clients keep their address, and open connections go on until they end.
func TestFromKubeProxy(t *testing.T) {
	needsSpeed(t)
	if _, err := os.Stat(uml.Shared + "/kube-proxy"); err != nil {
		t.Skip("it needs the program bench/bin/kube-proxy, which 'make test' and 'make kube-proxy' build")
	}
	c := newCluster(t)
	c.server.Start(t)
	c.server.AwaitReady(t)
	a, b, pod, outside := c.node.Pod("a"), c.node.Pod("b"), c.node.Pod("c"), c.network.Outside("outside")
	for _, h := range []*testbed.Host{a, b} {
		h.Serve(svc.TCP, port)
		h.Serve(svc.UDP, port)
	}
	self := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}
	self.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: c.node.Addr4().String()}}
	if _, err := c.server.Client.CoreV1().Nodes().Create(t.Context(), self, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	before := c.inKernel()
	c.service("web", "10.96.0.100", 30080, nil, a, b)
	c.datagrams("names", "10.96.0.101", a)
	vip, names := netip.MustParseAddrPort("10.96.0.100:80"), netip.MustParseAddrPort("10.96.0.101:53")
	theirs := process.Start(t, c.kubeProxy())
	c.programmed("127.0.0.1:10249", "--mode", "ipvs")
	c.reaches(pod, vip, a, b)
	ways := []way{
		{name: "a Pod", from: pod, to: vip, seen: pod.Addr4()}, {name: "the node", from: c.node, to: vip},
		{name: "outside", from: outside, to: netip.AddrPortFrom(c.node.Addr4(), 30080)},
	}
	all, end := connect(t, ways)
	socket := c.socket(pod, names)

	ours := process.Start(t, c.beside())
	c.programmed("127.0.0.1:10999")
	if rules := c.on("iptables-legacy-save", "-t", "nat"); strings.Contains(rules, "-d 10.96.0.100/32 -g FAIRLEAD-NODEPORTS") {
		t.Errorf("node ports are at the addresses of Services, which kube-proxy has given the machine:\n%s", rules)
	}
	theirs.Kill() // SIGTERM ends it as well, and it leaves its rules in both cases
	if text, code := c.drains(); code != 75 || !strings.HasPrefix(text, "3 connections depend on kube-proxy's rules, such as from ") {
		t.Fatalf("with open connections: exit code %d, %s", code, text)
	}
	c.led(socket)
	all.alive("beside kube-proxy's last rules")
	c.undrains()
	c.drains() // as apply does, which goes on
	for name, conn := range all.open {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		delete(all.open, name)
	}
	for _, w := range ways {
		all.keep(w.name+", through fairlead", w)
	}
	testbed.Until(t, "the connections through IPVS to end", func() error {
		text, code := c.drains()
		if code != 0 {
			return fmt.Errorf("exit code %d, %s", code, text)
		}
		return nil
	})
	if _, _, code := process.Result(t, c.kubeProxy("--cleanup")); code == 0 {
		t.Log("kube-proxy --cleanup needs no second call any more: package walk can do without it")
	}
	process.Output(t, c.kubeProxy("--cleanup"))
	// kube-proxy leaves its sets of IPv6, which no rule names.
	left := strings.ReplaceAll(c.inKernel(), "set KUBE-6-", "")
	if strings.Contains(left, "KUBE-") || strings.Contains(left, svc.KubeProxyDevice) || strings.Contains(left, " rr\n") {
		t.Errorf("left of kube-proxy:\n%s", left)
	}
	c.led(socket)
	all.alive("without kube-proxy's rules")

	theirs = process.Start(t, c.kubeProxy())
	c.programmed("127.0.0.1:10249", "--mode", "ipvs")
	ours.Stop()
	process.Output(t, c.command("proxy", "--cleanup", "--node-name", "node", "--kubeconfig", c.server.Kubeconfig))
	c.led(socket)
	all.alive("back at kube-proxy")
	end()
	theirs.Kill()
	if all.made.Load() < 100 || all.failed.Load() > 0 {
		t.Errorf("%d of %d new connections failed", all.failed.Load(), all.made.Load())
	}
	t.Logf("%d new connections, %d failed", all.made.Load(), all.failed.Load())
	if left := c.inKernel(); strings.Contains(left, "FAIRLEAD") || left == before {
		t.Errorf("back at kube-proxy the kernel has\n%s", left)
	}
}
