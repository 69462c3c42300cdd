package lb

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/arp"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// A Service gets an address that an outside client reaches, through a server and two
// agents as users start them; and still does when the node that answers is killed, or stopped.
func TestReachedFromOutside(t *testing.T) {
	inParallel(t)
	network := testbed.NewNetwork(t)
	dir := t.TempDir()
	host := network.Outside("server")
	server := process.NewServer(host, process.Program("fairlead"), filepath.Join(dir, "server"),
		"--bind-address", "127.0.0.1,"+host.Addr4().String(), "--lb-pool", pools)
	server.Start(t)
	server.AwaitReady(t)
	wire := listenOn(t, network.Outside("client"))
	agents := map[arp.MAC]*process.Process{}
	start := map[arp.MAC]func() *process.Process{}
	for _, name := range []string{"n1", "n2"} {
		n := &node{bed: &bed{TB: t}, host: network.Outside(name), name: name}
		n.host.Sysctl("net/ipv4/ip_forward", "1")
		mac := arp.MACOf(t, n.host, "eth0")
		start[mac] = func() *process.Process {
			cmd := n.host.Command(context.Background(), process.Program("fairlead"), "agent",
				"--server", "https://"+host.Addr4().String()+":6443", "--token-file", filepath.Join(dir, "server", "node-token"),
				"--data-dir", filepath.Join(dir, name), "--node-name", name, "--node-ip", n.host.Addr4().String(), "--mode", "nft")
			cmd.Env = append(os.Environ(), "HOME="+dir)
			return process.Start(t, cmd)
		}
		agents[mac] = start[mac]()
	}
	backend := network.Outside("backend")
	backend.Serve(svc.TCP, 8080)
	vip := selectorless(t, server, backend.Addr4())
	client := wire.Host()
	reached := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := client.Ask(ctx, svc.TCP, netip.AddrPortFrom(vip, 80))
		return err
	}
	testbed.Until(t, "an answer from outside", reached)
	owner := func() (mac arp.MAC) {
		testbed.Until(t, "an owner", func() error {
			var ok bool
			if mac, ok = wire.Who(vip); !ok || agents[mac] == nil {
				return fmt.Errorf("%x answers", mac)
			}
			return nil
		})
		return mac
	}
	// The second vote and the witness are on the list when both speakers say so.
	testbed.Until(t, "the witness to be on the list", func() error {
		m, err := server.Client.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "fairlead-lb-voters", metav1.GetOptions{})
		if err != nil || !settledWitness(m) {
			return fmt.Errorf("%v: %v", m.Data, err)
		}
		return nil
	})
	// SIGTERM comes first: one that was just started votes only after a second, and
	// whoever takes over then has to wait for that.
	for _, what := range []string{"SIGTERM", "kill -9"} {
		end := (*process.Process).Stop
		if what == "kill -9" {
			end = (*process.Process).Kill
		}
		was := owner()
		p := agents[was]
		delete(agents, was)
		begin := time.Now()
		end(p)
		ended := time.Since(begin)
		next := owner()
		for _, x := range wire.Since(vip, begin) {
			if x.MAC == next {
				t.Logf("%s: the other node announces after %s; the process ended after %s", what,
					x.At.Sub(begin).Round(time.Millisecond), ended.Round(time.Millisecond))
				break
			}
		}
		if next == was {
			t.Fatalf("%s: %x still answers", what, was)
		}
		testbed.Until(t, "an answer after "+what, reached)
		agents[was] = start[was]()
		agents[was].Says(`is up; DNS answers`)
		testbed.Until(t, "an answer after the restart", reached)
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

// votersOf returns an error unless all of so many nodes vote, with the witness if they are two.
func votersOf(t *testing.T, server *process.Server, nodes int) error {
	m, err := server.Client.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "fairlead-lb-voters", metav1.GetOptions{})
	if err != nil {
		return err
	}
	var lists quorum.Lists
	if err := json.Unmarshal([]byte(m.Data[lb.VotersEntry]), &lists); err != nil {
		return err
	}
	if l := lists.Current; len(l.Voters) != nodes || l.Witness != (nodes == 2) {
		return fmt.Errorf("%+v", l)
	}
	return nil
}
