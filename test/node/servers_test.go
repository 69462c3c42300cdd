package node

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/etcd"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// threeServers are API servers on one etcd, each on its own machine, and two nodes.
type threeServers struct {
	*cluster
	hosts   []*testbed.Host
	servers []*process.Server
	nodes   []*testbed.Host
	agents  []*process.Process
}

func newThreeServers(t *testing.T) *threeServers {
	t.Helper()
	network := testbed.NewNetwork(t)
	s := &threeServers{cluster: &cluster{t: t, dir: t.TempDir(), network: network}}
	store := network.Outside("store")
	var external *embed.Etcd
	store.Do(func() {
		external = etcd.Start(t, func(c *embed.Config) {
			c.ListenClientUrls = []url.URL{{Scheme: "http", Host: netip.AddrPortFrom(store.Addr4(), 2379).String()}}
		})
	})
	for i := range 3 {
		host := network.Outside(fmt.Sprintf("server%d", i+1))
		dir := s.path(host.Name())
		server := process.NewServer(host, process.Program("fairlead"), dir,
			"--etcd-servers", etcd.URL(external), "--bind-address", "127.0.0.1,"+host.Addr4().String())
		if i > 0 { // the servers of a cluster have one authority
			s.copyKeys(s.path("server1"), dir)
		}
		server.Start(t)
		server.AwaitReady(t)
		s.hosts, s.servers = append(s.hosts, host), append(s.servers, server)
	}
	s.server, s.api = s.hosts[0], s.servers[0]
	if err := os.Symlink(s.path("server1"), s.path("server")); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		node := network.Outside(fmt.Sprintf("node%d", i+1))
		node.Sysctl("net/ipv4/ip_forward", "1")
		s.cleansUp(node, node.Name())
		s.nodes = append(s.nodes, node)
		s.agents = append(s.agents, s.agentOn(node, node.Name()))
	}
	for _, a := range s.agents {
		a.Says("is up")
	}
	s.nodesReady(2)
	return s
}

// copyKeys copies what the servers of one cluster have in common.
func (s *threeServers) copyKeys(from, to string) {
	s.t.Helper()
	if err := os.MkdirAll(filepath.Join(to, "pki"), 0o700); err != nil {
		s.t.Fatal(err)
	}
	for _, name := range []string{"ca.crt", "ca.key", "sa.key"} {
		text, err := os.ReadFile(filepath.Join(from, "pki", name))
		if err == nil {
			err = os.WriteFile(filepath.Join(to, "pki", name), text, 0o600)
		}
		if err != nil {
			s.t.Fatal(err)
		}
	}
}

// usedBy returns the number of the server to which a node is connected.
func (s *threeServers) usedBy(node *testbed.Host) (n int) {
	s.t.Helper()
	testbed.Until(s.t, "the connection of "+node.Addr4().String(), func() error {
		out := process.Output(s.t, node.Command(s.t.Context(), "ss", "-tnH", "state", "established", "dport", "=", ":6443"))
		n = slices.IndexFunc(s.hosts, func(h *testbed.Host) bool { return strings.Contains(out, h.Addr4().String()+":6443") })
		if n < 0 {
			return fmt.Errorf("it has %q", out)
		}
		return nil
	})
	return n
}

// listener accepts connections on a host.
func listener(t *testing.T, on *testbed.Host, port uint16) {
	t.Helper()
	var l net.Listener
	var err error
	on.Do(func() { l, err = net.Listen("tcp", netip.AddrPortFrom(on.Addr4(), port).String()) })
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
			c.Close()
		}
	}()
}

// service makes a Service of hand-made endpoints, of which there are none yet.
func (s *threeServers) service(on *process.Server) (at netip.AddrPort, slice *discoveryv1.EndpointSlice) {
	s.t.Helper()
	service, err := on.Client.CoreV1().Services("default").Create(s.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "manual"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	slice, err = on.Client.DiscoveryV1().EndpointSlices("default").Create(s.t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "manual", Labels: map[string]string{discoveryv1.LabelServiceName: "manual"}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: new(int32(8080))}},
	}, metav1.CreateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return netip.AddrPortFrom(netip.MustParseAddr(service.Spec.ClusterIP), 80), slice
}

// leader returns the number of the server whose controllers work.
func (s *threeServers) leader(by *process.Server) (n int) {
	s.t.Helper()
	testbed.Until(s.t, "a leader", func() error {
		lease, err := by.Client.CoordinationV1().Leases("kube-system").Get(s.t.Context(), "fairlead-controllers", metav1.GetOptions{})
		if err != nil {
			return err
		}
		holder := ptr.Deref(lease.Spec.HolderIdentity, "")
		n = slices.IndexFunc(s.servers, func(a *process.Server) bool {
			return holder != "" && strings.Contains(a.Log(), "lease=fairlead-controllers identity="+holder+" self=true")
		})
		if n < 0 {
			return fmt.Errorf("%q is none of the servers", holder)
		}
		return nil
	})
	return n
}

// within waits for a change that a fault stands in the way of, and logs how long that took.
func (s *threeServers) within(what string, fault func() (check func() error)) {
	s.t.Helper()
	since := time.Now()
	testbed.Until(s.t, what, fault())
	took := time.Since(since).Round(10 * time.Millisecond)
	s.t.Logf("%-52s after %s", what, took)
	if took > 30*time.Second { // by timeouts of TCP and of watches it takes longer
		s.t.Errorf("%s took %s", what, took)
	}
}

// vanish has a machine send and receive nothing, without a FIN or a reset.
func (s *threeServers) vanish(h *testbed.Host) {
	process.Output(s.t, h.Command(s.t.Context(), "nft",
		"add table inet vanished; add chain inet vanished in { type filter hook input priority 0; policy drop; }; "+
			"add chain inet vanished out { type filter hook output priority 0; policy drop; }"))
}

// mirrored creates Endpoints and returns a check for the slice that the controllers make of
// them.
func (s *threeServers) mirrored(by *process.Server, name string) func() error {
	s.t.Helper()
	ctx := s.t.Context()
	_, err1 := by.Client.CoreV1().Services("default").Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	//nolint:staticcheck // Endpoints are deprecated, and still mirrored
	_, err2 := by.Client.CoreV1().Endpoints("default").Create(ctx, &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Subsets:    []corev1.EndpointSubset{{Addresses: []corev1.EndpointAddress{{IP: "192.0.2.1"}}, Ports: []corev1.EndpointPort{{Port: 80}}}},
	}, metav1.CreateOptions{})
	if err := errors.Join(err1, err2); err != nil {
		s.t.Fatal(err)
	}
	return func() error {
		of := metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + name}
		list, err := by.Client.DiscoveryV1().EndpointSlices("default").List(ctx, of)
		if err == nil && len(list.Items) == 0 {
			err = errors.New("no slice")
		}
		return err
	}
}

// A leader that is stopped, one that is killed, and a server whose machine vanishes: another
// leader writes, what changes through the server that is left reaches each node, and a leader
// that wakes up writes nothing.
func TestSeveralServers(t *testing.T) {
	t.Parallel()
	s := newThreeServers(t)
	listener(t, s.network.Outside("backend"), 8080)
	endpoints := []discoveryv1.Endpoint{{Addresses: []string{s.network.Outside("backend").Addr4().String()}}}
	at, slice := s.service(s.servers[0])
	reaches := func() error {
		for _, n := range s.nodes {
			if err := connects(n, at); err != nil {
				return fmt.Errorf("%s: %w", n.Name(), err)
			}
		}
		return nil
	}
	refuses := func() error {
		for _, n := range s.nodes {
			if err := connects(n, at); err == nil || !strings.Contains(err.Error(), "refused") {
				return fmt.Errorf("%s: %v", n.Name(), err)
			}
		}
		return nil
	}
	put := func(by *process.Server, endpoints []discoveryv1.Endpoint) {
		t.Helper()
		slice.Endpoints = endpoints
		next, err := by.Client.DiscoveryV1().EndpointSlices("default").Update(t.Context(), slice, metav1.UpdateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		slice = next
	}
	testbed.Until(t, "a Service without endpoints", refuses)

	first := s.leader(s.servers[0])
	other := (first + 1) % len(s.servers)
	s.within("another leader after a kill", func() func() error {
		s.servers[first].Process.Kill()
		return s.mirrored(s.servers[other], "one")
	})
	s.servers[first].Start(t)
	s.servers[first].AwaitReady(t)

	second := s.leader(s.servers[first])
	s.within("another leader after one was stopped", func() func() error {
		s.servers[second].Signal(syscall.SIGSTOP)
		return s.mirrored(s.servers[first], "two")
	})
	s.servers[second].Signal(syscall.SIGCONT)
	s.servers[second].Says("no longer the leader\" lease=fairlead-controllers")

	killed := s.usedBy(s.nodes[0])
	by := s.servers[(killed+1)%len(s.servers)]
	s.within("a change after a kill", func() func() error {
		s.servers[killed].Process.Kill()
		put(by, endpoints)
		return reaches
	})
	vanishes := s.usedBy(s.nodes[0])
	if vanishes == killed {
		t.Fatal("a node is connected to a server that was killed")
	}
	by = s.servers[3-killed-vanishes]
	s.within("a change after a machine vanished", func() func() error {
		s.vanish(s.hosts[vanishes])
		put(by, nil)
		return refuses
	})
	since := time.Now()
	s.servers[vanishes].Stop()
	took := time.Since(since).Round(10 * time.Millisecond)
	t.Logf("the end of a server without its store took %s", took)
	if took > time.Minute { // the storage of a custom resource that is being made waits for etcd, which takes 20 s for each try
		t.Error("the end of a server without its store took over a minute")
	}
}
