package lb

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/arp"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// cluster is a server and agents on hosts that have Pods, with a client outside.
type cluster struct {
	*bed
	server *process.Server
	host   *testbed.Host // of the server
	dir    string        // has a data directory for each node, of its name
}

// clusterOptions are what a cluster has beyond the defaults.
type clusterOptions struct {
	server, agent []string // further flags
	// before returns still more flags of the server, whose host there is by then.
	before func(*testbed.Host) []string
	modes  map[string]string // of agents by name; nft if there is none
	tools  string            // a directory with programs for Pods
}

// newCluster starts a server and an agent for each name.
func newCluster(t *testing.T, o clusterOptions, names ...string) *cluster {
	t.Helper()
	c := &cluster{bed: &bed{TB: t, net: testbed.NewNetwork(t)}}
	dir := t.TempDir()
	host := c.net.Outside("server")
	c.host, c.dir = host, dir
	if o.before != nil {
		o.server = append(slices.Clone(o.server), o.before(host)...)
	}
	c.server = process.NewServer(host, process.Program("fairlead"), filepath.Join(dir, "server"),
		append([]string{"--bind-address", "127.0.0.1," + host.Addr4().String(), "--lb-pool", pools}, o.server...)...)
	c.server.Start(t)
	c.server.AwaitReady(t)
	c.client = c.server.Client
	var err error
	c.lb, err = v1.NewClient(c.server.Config)
	c.must(err)
	c.wire = listenOn(t, c.net.Outside("client"))
	for _, name := range names {
		n := &node{bed: c.bed, host: c.net.Host(name), name: name, upWhen: `is up; DNS answers`}
		n.mac = arp.MACOf(t, n.host, "eth0")
		// Its Pods have the addresses that the network routes to it.
		_, err := c.client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{
			PodCIDR:  n.host.PodCIDR(svc.IPv4).String(),
			PodCIDRs: []string{n.host.PodCIDR(svc.IPv4).String(), n.host.PodCIDR(svc.IPv6).String()},
		}}, metav1.CreateOptions{})
		c.must(err)
		n.command = func() *exec.Cmd {
			args := []string{process.Program("fairlead"), "agent",
				"--server", "https://" + host.Addr4().String() + ":6443", "--token-file", filepath.Join(dir, "server", "node-token"),
				"--data-dir", filepath.Join(dir, name), "--node-name", name, "--node-ip", n.host.Addr4().String(),
				"--mode", cmp.Or(o.modes[name], "nft")}
			if !n.lameduck {
				args = append(args, "--dns-lameduck", "0s") // in which nothing here would ask it
			}
			if args = append(args, o.agent...); o.tools != "" {
				over := `mount --bind "$0" /usr/local/sbin && exec "$@"`
				args = append([]string{"unshare", "--mount", "sh", "-c", over, o.tools}, args...)
			}
			cmd := n.host.Command(context.Background(), args[0], args[1:]...)
			cmd.Env = append(os.Environ(), "HOME="+dir)
			return cmd
		}
		n.Process = process.Start(t, n.command())
		c.nodes = append(c.nodes, n)
	}
	for _, n := range c.nodes {
		n.Says(n.upWhen)
	}
	return c
}

// A Service gets an address that an outside client reaches, through a server and two
// agents as users start them; and still does when the node that answers is killed, or stopped.
func TestReachedFromOutside(t *testing.T) {
	inParallel(t)
	c := newCluster(t, clusterOptions{}, "n1", "n2")
	backend := c.net.Outside("backend")
	backend.Serve(svc.TCP, 8080)
	vip := selectorless(t, c.server, backend.Addr4())
	c.voters(3)
	c.ask(c.wire.Host(), vip)
	// After SIGTERM its addresses are kept for it for some seconds, and it does not return. That comes first: one that was
	// just started votes only after a second, and the one that takes over then has to wait for that.
	for _, what := range []string{"SIGTERM", "kill -9"} {
		end, within := (*process.Process).Stop, awayWithin
		if what == "kill -9" {
			end, within = (*process.Process).Kill, expireWithin
		}
		was := c.owner(vip, c.nodes...)
		begin := time.Now()
		end(was.Process)
		ended := time.Since(begin)
		t.Logf("%s: the process ended after %s", what, ended.Round(time.Millisecond))
		c.tookOver(what, vip, was, begin, within)
		c.ask(c.wire.Host(), vip)
		was.start()
		c.ask(c.wire.Host(), vip)
	}
}

// selectorless makes a Service for one endpoint and returns its address.
func selectorless(t *testing.T, server *process.Server, endpoint netip.Addr) (vip netip.Addr) {
	t.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	s.Spec.Ports = []corev1.ServicePort{{Port: 80}}
	if _, err := server.Client.CoreV1().Services("default").Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err := server.Client.DiscoveryV1().EndpointSlices("default").Create(t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{endpoint.String()}}},
		Ports:       []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	testbed.Until(t, "an address", func() error {
		s, err := server.Client.CoreV1().Services("default").Get(t.Context(), "web", metav1.GetOptions{})
		if err != nil || len(s.Status.LoadBalancer.Ingress) == 0 {
			return fmt.Errorf("none: %v", err)
		}
		vip = netip.MustParseAddr(s.Status.LoadBalancer.Ingress[0].IP)
		return nil
	})
	return vip
}
