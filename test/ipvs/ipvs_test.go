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
	typeddiscoveryv1 "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/fairlead/fairlead/internal/kernel/ipset"
	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
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
	_, err := c.server.Client.CoreV1().Services("default").Create(c.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, ClusterIP: clusterIP,
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(port), NodePort: nodePort}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	_, err = c.slices().Create(c.t.Context(), slice(name, endpoints), metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) slices() typeddiscoveryv1.EndpointSliceInterface {
	return c.server.Client.DiscoveryV1().EndpointSlices("default")
}

// endpoints replaces those of a Service.
func (c *cluster) endpoints(name string, list ...*testbed.Host) {
	c.t.Helper()
	if _, err := c.slices().Update(c.t.Context(), slice(name, list), metav1.UpdateOptions{}); err != nil {
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
	testbed.Until(c.t, fmt.Sprintf("%s to reach %d endpoints at %s", from.Name(), len(hosts), at), func() error {
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
	c.server.Start(t)
	c.server.AwaitReady(t)
	a, b, from := c.node.Pod("a"), c.node.Pod("b"), c.node.Pod("c")
	a.Serve(svc.TCP, port)
	b.Serve(svc.TCP, port)
	before := c.inKernel()
	vip := netip.MustParseAddrPort("10.96.0.100:80")
	c.service("web", "10.96.0.100", 30080, nil, a)
	c.service("few", "10.96.0.101", 30081, map[string]string{"fairlead.dev/ipvs-scheduler": "lc"}, b)

	proxy := process.Start(t, c.proxy("--ipvs-tcp-timeout", "20m", "--ipvs-udp-timeout", "77s"))
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

	ctx, cancel := context.WithTimeout(t.Context(), 5*testbed.Patience)
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

	proxy.Stop()
	alive(t, open, "without a proxy")
	c.reaches(from, vip, b)
	c.endpoints("web", a, b)
	proxy = process.Start(t, c.proxy("--ipvs-sync-period", "1s"))
	c.reaches(from, vip, a, b)
	alive(t, open, "after a restart")

	// What was removed by hand comes back.
	c.on("ip", "link", "del", "fairlead-ipvs")
	c.on("iptables-legacy", "-t", "nat", "-F", "FAIRLEADVS-POSTROUTING")
	c.reaches(from, netip.MustParseAddrPort("10.96.0.101:80"), b)
	c.reaches(b, netip.MustParseAddrPort("10.96.0.101:80"), b)
	alive(t, open, "after a repair")

	if err := c.server.Client.CoreV1().Services("default").Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	testbed.Until(t, "new connections to meet silence", func() error {
		short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if got, err := from.Ask(short, svc.TCP, vip); err == nil || !testbed.Silent(err) {
			return fmt.Errorf("%+v, %v", got, err)
		}
		return nil
	})
	alive(t, open, "without its Service")

	proxy.Stop()
	process.Output(t, c.command("cleanup", "--data-dir", c.path("agent")))
	if after := c.inKernel(); after != before {
		t.Errorf("before:\n%s\nafter cleanup:\n%s", before, after)
	}
	t.Run("fallback", func(t *testing.T) {
		c.t = t
		c.fallsBack(from, netip.MustParseAddrPort("10.96.0.101:80"), b)
	})
}

// fallsBack shows behaviour 59: where the kernel lacks a requested scheduler, mode
// iptables runs, with a log line and an Event, unless --mode-strict is given.
func (c *cluster) fallsBack(from *testbed.Host, at netip.AddrPort, to *testbed.Host) {
	t := c.t
	withoutModule(t, "ip_vs_sed")
	fails(t, c.proxy("--ipvs-scheduler", "sed", "--mode-strict"), 1, "lacks scheduler sed")
	proxy := process.Start(t, c.proxy("--ipvs-scheduler", "sed"))
	c.reaches(from, at, to)
	for _, want := range []string{"proxy mode iptables is used", "lacks scheduler sed"} {
		if log := proxy.Log(); !strings.Contains(log, want) {
			t.Errorf("it has not printed %q:\n%s", want, log)
		}
	}
	text := c.inKernel()
	if strings.Contains(text, "tcp 10.96") || strings.Contains(text, "fairlead-ipvs") || !strings.Contains(text, "FAIRLEAD-") {
		t.Errorf("the kernel has\n%s\nwant rules of mode iptables", text)
	}
	testbed.Until(t, "an Event of the Node", func() error {
		list, err := c.server.Client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for i := range list.Items {
			e := &list.Items[i]
			about := e.InvolvedObject.Kind + "/" + e.InvolvedObject.Name
			if e.Reason == "ProxyModeFallback" && e.Type == corev1.EventTypeWarning && about == "Node/node" &&
				strings.Contains(e.Message, "lacks scheduler sed") {
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

// Invalid flags, and missing privileges, are reported in one line.
func TestInvalidFlagsAndMissingPrivileges(t *testing.T) {
	c := newCluster(t)
	// Nothing listens there, and nothing is asked.
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["none"] = &clientcmdapi.Cluster{Server: "https://127.0.0.1:1"}
	cfg.Contexts["none"], cfg.CurrentContext = &clientcmdapi.Context{Cluster: "none"}, "none"
	if err := clientcmd.WriteToFile(*cfg, c.server.Kubeconfig); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct{ flag, value, want string }{
		{"--ipvs-scheduler", "random", `--ipvs-scheduler is "random"; want one of rr`},
		{"--ipvs-exclude-cidrs", "10.96.1.0/24", "10.96.1.0/24 overlaps the range of ClusterIPs 10.96.0.0/16"},
		{"--ipvs-exclude-cidrs", "192.0.2.0/24,192.0.2.128/25", "192.0.2.0/24 and 192.0.2.128/25 overlap"},
	} {
		fails(t, c.proxy(x.flag, x.value), 2, x.want)
	}
	// setpriv drops the capability for good.
	weak := func(more ...string) *exec.Cmd {
		args := append([]string{"--bounding-set=-net_admin", "--inh-caps=-all", program}, c.proxyArgs(more...)...)
		return c.node.Command(t.Context(), "setpriv", args...)
	}
	fails(t, weak("--mode-strict"), 1, "it needs CAP_NET_ADMIN", "without --mode-strict")
	// Mode iptables, which replaces it, does not work either: both reasons.
	fails(t, weak(), 1, "it needs CAP_NET_ADMIN", "iptables mode does not work here")
}
