package ipvs

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// readKernel writes the virtual servers and the sets of this namespace, as
// ipvsadm and ipset list them.
func readKernel(t *testing.T, w io.Writer) {
	t.Helper()
	vs, err := ipvs.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer vs.Close()
	var list []ipvs.Service
	if err := vs.Services(func(s ipvs.Service) { list = append(list, s) }); err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		fmt.Fprintf(w, "%s %s\n", s.Key, s.Scheduler)
		err := vs.Dests(s.Key, func(d ipvs.Dest) { fmt.Fprintf(w, "%s -> %s weight %d\n", s.Key, d.Addr, d.Weight) })
		if err != nil {
			t.Fatal(err)
		}
	}
	sets, err := ipset.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer sets.Close()
	names, err := sets.Names()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		fmt.Fprintln(w, "set", n)
	}
}

// service makes a Service with a ClusterIP and a node port, and the slice of its
// endpoints.
func (c *cluster) service(name, clusterIP string, nodePort int32, annotations map[string]string, endpoints ...*testbed.Host) {
	c.t.Helper()
	_, err := c.client.CoreV1().Services("default").Create(c.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, ClusterIP: clusterIP,
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(port), NodePort: nodePort}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	if _, err := c.client.DiscoveryV1().EndpointSlices("default").Create(c.t.Context(), slice(name, endpoints), metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

// endpoints replaces those of a Service.
func (c *cluster) endpoints(name string, list ...*testbed.Host) {
	c.t.Helper()
	if _, err := c.client.DiscoveryV1().EndpointSlices("default").Update(c.t.Context(), slice(name, list), metav1.UpdateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

const port = 9376

func slice(name string, endpoints []*testbed.Host) *discoveryv1.EndpointSlice {
	tcp, n, node := corev1.ProtocolTCP, int32(port), "node"
	out := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: &n, Protocol: &tcp}},
	}
	for _, h := range endpoints {
		out.Endpoints = append(out.Endpoints, discoveryv1.Endpoint{Addresses: []string{h.Addr4().String()}, NodeName: &node})
	}
	return out
}

// reaches waits until connections of from arrive at each of the hosts, and
// nowhere else.
func (c *cluster) reaches(from *testbed.Host, at netip.AddrPort, hosts ...*testbed.Host) {
	c.t.Helper()
	until(c.t, fmt.Sprintf("%s to reach %d endpoints at %s", from.Name(), len(hosts), at), func() error {
		seen := map[string]int{}
		for range 2 * len(hosts) {
			got, err := from.Ask(c.t.Context(), svc.TCP, at)
			if err != nil {
				return err
			}
			seen[got.Name]++
		}
		for _, h := range hosts {
			if seen[h.Name()] != 2 {
				return fmt.Errorf("reached %v", seen)
			}
		}
		return nil
	})
}

// alive asks on an open connection.
func alive(t *testing.T, conn net.Conn, when string) {
	t.Helper()
	word := "still there, " + when + "?"
	b := make([]byte, len(word))
	_, err := io.WriteString(conn, word)
	if err == nil {
		_, err = io.ReadFull(conn, b)
	}
	if err != nil || string(b) != word {
		t.Errorf("%s the open connection answers %q, %v", when, b, err)
	}
}

// behaviours 55 to 60: the whole proxy beside a real API server and a real IPVS. A
// connection that is open stays so, whatever happens to the proxy and to its
// endpoint, and cleanup leaves nothing.
func TestProxy(t *testing.T) {
	c := newCluster(t)
	a, b, from := c.node.Pod("a"), c.node.Pod("b"), c.node.Pod("c")
	a.Serve(svc.TCP, port)
	b.Serve(svc.TCP, port)
	before := c.inKernel()
	vip := netip.MustParseAddrPort("10.96.0.100:80")
	c.service("web", "10.96.0.100", 30080, nil, a)
	c.service("few", "10.96.0.101", 30081, map[string]string{"fairlead.dev/ipvs-scheduler": "lc"}, b)

	_, stop := c.start(c.proxy("--ipvs-tcp-timeout", "20m", "--ipvs-udp-timeout", "77s")...)
	defer func() { stop() }()
	c.reaches(from, vip, a)
	c.reaches(from, netip.AddrPortFrom(c.node.Addr4(), 30080), a)
	c.reaches(from, netip.MustParseAddrPort("10.96.0.101:80"), b)
	text := c.inKernel()
	for _, want := range []string{"tcp 10.96.0.100:80 rr\n", "tcp 10.96.0.101:80 lc\n", "inet 10.96.0.101/32 scope host fairlead-ipvs"} {
		if !strings.Contains(text, want) {
			t.Errorf("the kernel lacks %q, it has\n%s", want, text)
		}
	}
	// Node ports are on the node's addresses, not on the virtual IPs, which the
	// machine has now, too.
	if strings.Contains(text, "tcp 10.96.0.101:30080") || !strings.Contains(text, "tcp 192.168.77.11:30080") {
		t.Errorf("node ports are elsewhere than on the node's address:\n%s", text)
	}
	c.node.Do(func() { hasTimeouts(t, ipvs.Timeouts{TCP: 20 * time.Minute, UDP: 77 * time.Second}) })

	ctx, cancel := context.WithTimeout(t.Context(), 5*patience)
	defer cancel()
	open, err := from.Dial(ctx, svc.TCP, vip)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	if got, err := testbed.AskOn(open); err != nil || got.Name != "a" {
		t.Fatalf("%+v, %v", got, err)
	}
	c.endpoints("web", b)
	c.reaches(from, vip, b)
	alive(t, open, "when its endpoint has left")

	stop()
	alive(t, open, "without a proxy")
	c.reaches(from, vip, b)
	c.endpoints("web", a, b)
	_, stop = c.start(c.proxy("--ipvs-sync-period", "1s")...)
	c.reaches(from, vip, a, b)
	alive(t, open, "after a restart")

	// What somebody removes comes back.
	c.on("ip", "link", "del", "fairlead-ipvs")
	c.on("iptables-legacy", "-t", "nat", "-F", "FAIRLEADVS-POSTROUTING")
	c.reaches(from, netip.MustParseAddrPort("10.96.0.101:80"), b)
	c.reaches(b, netip.MustParseAddrPort("10.96.0.101:80"), b)
	alive(t, open, "after a repair")

	if err := c.client.CoreV1().Services("default").Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, "new connections to meet silence", func() error {
		short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if got, err := from.Ask(short, svc.TCP, vip); err == nil || !testbed.Silent(err) {
			return fmt.Errorf("%+v, %v", got, err)
		}
		return nil
	})
	alive(t, open, "without its Service")

	stop()
	if code, said := c.run(c.command("cleanup", "--data-dir", c.path("agent"))); code != 0 {
		t.Fatalf("fairlead cleanup: exit code %d\n%s", code, said)
	}
	if after := c.inKernel(); after != before {
		t.Errorf("before:\n%s\nafter cleanup:\n%s", before, after)
	}
	t.Run("fallback", func(t *testing.T) {
		c.t = t
		c.fallsBack(from, netip.MustParseAddrPort("10.96.0.101:80"), b)
	})
}

// fallsBack shows behaviour 59: where the kernel lacks a scheduler that is asked for, mode
// iptables runs, which a log line and an Event tell, unless that is not wanted.
func (c *cluster) fallsBack(from *testbed.Host, at netip.AddrPort, to *testbed.Host) {
	t := c.t
	withoutModule(t, "ip_vs_sed")
	args := c.proxy("--ipvs-scheduler", "sed")
	if code, said := c.run(c.command(append(args, "--mode-strict")...)); code != 1 || !strings.Contains(complaint(said), "lacks scheduler sed") {
		t.Errorf("with --mode-strict: exit code %d\n%s", code, said)
	}
	said, stop := c.start(args...)
	defer stop()
	c.reaches(from, at, to)
	if !strings.Contains(said.String(), "proxy mode iptables is taken") || !strings.Contains(said.String(), "lacks scheduler sed") {
		t.Errorf("it said\n%s", said)
	}
	if text := c.inKernel(); strings.Contains(text, "tcp 10.96") || strings.Contains(text, "fairlead-ipvs") || !strings.Contains(text, "FAIRLEAD-") {
		t.Errorf("the kernel has\n%s\nwant rules of mode iptables", text)
	}
	until(t, "an Event of the Node", func() error {
		list, err := c.client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for i := range list.Items {
			e := &list.Items[i]
			if e.Reason == "ProxyModeFallback" && e.Type == corev1.EventTypeWarning && e.InvolvedObject.Kind == "Node" && e.InvolvedObject.Name == "node" && strings.Contains(e.Message, "lacks scheduler sed") {
				return nil
			}
		}
		return fmt.Errorf("there are %d others", len(list.Items))
	})
}

// withoutModule takes a module out of the kernel, and keeps it from being loaded
// until the test ends.
func withoutModule(t *testing.T, name string) {
	t.Helper()
	const loader = "/proc/sys/kernel/modprobe"
	was, err := os.ReadFile(loader)
	if err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(t.TempDir(), "modprobe")
	text := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in *%s*) exit 1;; esac\nexec %s \"$@\"\n", name, strings.TrimSpace(string(was)))
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(loader, []byte(script), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(loader, was, 0); err != nil {
			t.Error(err)
		}
	})
	if _, err := os.Stat("/sys/module/" + name); err == nil {
		if out, err := exec.CommandContext(t.Context(), "rmmod", name).CombinedOutput(); err != nil {
			t.Fatalf("rmmod %s: %v\n%s", name, err, out)
		}
	}
}

func hasTimeouts(t *testing.T, want ipvs.Timeouts) {
	t.Helper()
	vs, err := ipvs.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer vs.Close()
	got, err := vs.Timeouts()
	want.TCPFin = got.TCPFin
	if err != nil || got != want {
		t.Errorf("timeouts %+v, %v, want %+v", got, err, want)
	}
}

// complaint is the line in which fairlead says why it ends.
func complaint(said string) string {
	_, line, _ := strings.Cut("\n"+said, "\nfairlead: ")
	line, _, _ = strings.Cut(line, "\n")
	return line
}

// What is asked for wrongly, and what is not allowed, is told in one line.
func TestWhatCannotBe(t *testing.T) {
	c := &cluster{t: t, dir: t.TempDir(), node: testbed.NewNetwork(t).Host("node")}
	// Nobody listens there, and nobody is asked.
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["none"], cfg.Contexts["none"], cfg.CurrentContext = &clientcmdapi.Cluster{Server: "https://127.0.0.1:1"}, &clientcmdapi.Context{Cluster: "none"}, "none"
	if err := clientcmd.WriteToFile(*cfg, c.kubeconfig()); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		args []string
		code int
		say  string
	}{
		{c.proxy("--ipvs-scheduler", "random"), 2, `--ipvs-scheduler is "random"; want one of rr`},
		{c.proxy("--ipvs-exclude-cidrs", "10.96.1.0/24"), 2, "10.96.1.0/24 overlaps the range of ClusterIPs 10.96.0.0/16"},
		{c.proxy("--ipvs-exclude-cidrs", "192.0.2.0/24,192.0.2.128/25"), 2, "192.0.2.0/24 and 192.0.2.128/25 overlap"},
	} {
		code, said := c.run(c.command(x.args...))
		if code != x.code || !strings.Contains(complaint(said), x.say) {
			t.Errorf("%q: exit code %d, want %d and %q; it said\n%s", x.args, code, x.code, x.say, said)
		}
	}
	// setpriv takes the capability away for good.
	weak := func(more ...string) (int, string) {
		args := append([]string{"--bounding-set=-net_admin", "--inh-caps=-all", program}, c.proxy(more...)...)
		return c.run(c.node.Command(t.Context(), "setpriv", args...))
	}
	if code, said := weak("--mode-strict"); code != 1 || !strings.Contains(complaint(said), "it needs CAP_NET_ADMIN") || !strings.Contains(complaint(said), "without --mode-strict") {
		t.Errorf("without CAP_NET_ADMIN, --mode-strict: exit code %d\n%s", code, said)
	}
	// The mode that is taken instead cannot work either, and the reason is told of
	// both.
	if code, said := weak(); code != 1 || !strings.Contains(complaint(said), "it needs CAP_NET_ADMIN") || !strings.Contains(complaint(said), "iptables mode does not work here") {
		t.Errorf("without CAP_NET_ADMIN: exit code %d\n%s", code, said)
	}
}
