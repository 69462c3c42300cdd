package ipvs

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/arp"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// balancers is a cluster of nodes whose proxies have mode ipvs, with a client on two networks: the underlay, and
// the VLAN 7 on it.
type balancers struct {
	*testing.T
	net        *testbed.Network
	server     *process.Server
	kubeconfig string
	// at are the listeners at the networks of the pools.
	at    map[string]*arp.Listener
	names map[arp.MAC]string
}

// tagged is the network of the VLAN.
func tagged(host int) netip.Addr { return netip.AddrFrom4([4]byte{10, 7, 7, byte(host)}) }

func newBalancers(t *testing.T) *balancers {
	t.Helper()
	b := &balancers{T: t, net: testbed.NewNetwork(t), names: map[arp.MAC]string{}}
	host := b.net.Outside("server")
	// The one of load balancers runs beside any other controller.
	b.server = newServer(host, filepath.Join(t.TempDir(), "server"), "--bind-address", "127.0.0.1,"+host.Addr4().String(),
		"--controllers", "programmed", "--lb-pool", "plain=192.168.77.100-192.168.77.110", "--lb-pool", "tagged=10.7.7.100-10.7.7.110")
	b.server.Start(t)
	b.server.AwaitReady(t)
	b.kubeconfig = b.server.KubeconfigAt(t, host.Addr4())
	client := b.net.Outside("client")
	b.tag(client, "eth0", 9)
	b.at = map[string]*arp.Listener{
		"plain": arp.Listen(t, client, "eth0", client.Addr4()), "tagged": arp.Listen(t, client, "tagged", tagged(9)),
	}
	return b
}

// ip runs ip(8) on a host.
func (b *balancers) ip(h *testbed.Host, commands ...string) {
	b.Helper()
	for _, c := range commands {
		process.Output(b, h.Command(b.Context(), "ip", strings.Fields(c)...))
	}
}

// tag makes the VLAN at an interface of a host.
func (b *balancers) tag(h *testbed.Host, device string, number int) {
	b.Helper()
	b.ip(h, "link add link "+device+" name tagged type vlan id 7", fmt.Sprintf("address add %s/24 dev tagged", tagged(number)),
		"link set tagged up")
}

// start starts proxy and speaker of a node that has the networks at an interface and at a VLAN of it.
func (b *balancers) start(name, device string, number int) {
	b.Helper()
	h := b.net.Outside(name)
	h.Sysctl("net/ipv4/ip_forward", "1")
	b.tag(h, device, number)
	b.names[arp.MACOf(b, h, device)] = name
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := b.server.Client.CoreV1().Nodes().Create(b.Context(), n, metav1.CreateOptions{}); err != nil {
		b.Fatal(err)
	}
	for _, args := range [][]string{
		{"proxy", "--mode", "ipvs", "--mode-strict", "--iptables-variant", "legacy", "--service-cluster-ip-range", "10.96.0.0/16"},
		{"lb", "--controller=false"},
	} {
		cmd := h.Command(context.Background(), program, append(args, "--kubeconfig", b.kubeconfig, "--node-name", name)...)
		cmd.Env = append(os.Environ(), "HOME="+b.TempDir())
		process.Start(b, cmd)
	}
}

// service makes a Service with an address of a pool.
func (b *balancers) service(pool string) (a netip.Addr) {
	b.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: pool, Annotations: map[string]string{"fairlead.dev/lb-pool": pool}}}
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	s.Spec.Ports = []corev1.ServicePort{{Port: 80}}
	api := b.server.Client.CoreV1().Services("default")
	if _, err := api.Create(b.Context(), s, metav1.CreateOptions{}); err != nil {
		b.Fatal(err)
	}
	testbed.Until(b, "an address of "+pool, func() error {
		s, err := api.Get(b.Context(), pool, metav1.GetOptions{})
		if err != nil || len(s.Status.LoadBalancer.Ingress) == 0 {
			return fmt.Errorf("none: %v", err)
		}
		a, err = netip.ParseAddr(s.Status.LoadBalancer.Ingress[0].IP)
		return err
	})
	return a
}

// owners returns the nodes that claim an address of a pool while they are asked for it for a time.
func (b *balancers) owners(pool string, a netip.Addr, d time.Duration) (names []string) {
	for begin := time.Now(); time.Since(begin) < d; {
		b.at[pool].Who(a)
		for _, c := range b.at[pool].Since(a, begin) {
			if name := b.names[c.MAC]; !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// owner waits until one of some nodes alone answers.
func (b *balancers) owner(pool string, a netip.Addr, of ...string) (name string) {
	b.Helper()
	testbed.Until(b, fmt.Sprintf("one of %s to answer for %s", of, a), func() error {
		got := b.owners(pool, a, 200*time.Millisecond)
		if len(got) != 1 || !slices.Contains(of, got[0]) {
			return fmt.Errorf("%q do", got)
		}
		name = got[0]
		return nil
	})
	return name
}

// In mode ipvs every node has the addresses of load balancers on a device. One node answers for each, and the
// kernels of the others do not: at an Ethernet interface and a bond, and at VLANs of both.
func TestAddressesOfLoadBalancers(t *testing.T) {
	needsSpeed(t)
	b := newBalancers(t)
	b.start("n1", "eth0", 1)
	bonded := b.net.Outside("n2")
	b.ip(bonded, "link add bond0 type bond mode active-backup", "link set eth0 down", "address flush dev eth0", "link set eth0 master bond0",
		"link set bond0 up", fmt.Sprintf("address add %s/24 dev bond0", bonded.Addr4()), "route replace default via 192.168.77.1")
	b.start("n2", "bond0", 2)
	addrs := map[string]netip.Addr{}
	for pool := range b.at {
		addrs[pool] = b.service(pool)
	}
	for _, a := range addrs {
		for _, name := range b.names {
			testbed.Until(t, fmt.Sprintf("%s to have %s on its device", name, a), func() error {
				out, err := process.Try(b.net.Outside(name).Command(t.Context(), "ip", "address", "show", "dev", "fairlead-ipvs"))
				if err != nil || !strings.Contains(out, a.String()+"/32") {
					return fmt.Errorf("%v: %s", err, out)
				}
				return nil
			})
		}
	}
	for name, other := range map[string]string{"n1": "n2", "n2": "n1"} {
		b.exclude(other, true)
		for pool, a := range addrs {
			b.owner(pool, a, name)
		}
		b.exclude(other, false)
	}
}

// exclude sets or removes a node's label that keeps addresses from it.
func (b *balancers) exclude(name string, set bool) {
	b.Helper()
	value := "null"
	if set {
		value = `""`
	}
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, corev1.LabelNodeExcludeBalancers, value)
	testbed.Until(b.T, "the label of "+name, func() error { // the guest has one processor for all of the cluster
		_, err := b.server.Client.CoreV1().Nodes().Patch(b.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	})
}
