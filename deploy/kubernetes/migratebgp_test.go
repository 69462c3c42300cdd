package kubernetes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/bird"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// metallbVersion is the version of MetalLB in test/metallb.
const metallbVersion = "v0.16.1"

// balancedByBGP are MetalLB's objects of a pool that is announced by BGP.
const balancedByBGP = `
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: default, namespace: metallb-system}
spec: {addresses: [198.51.100.10-198.51.100.20]}
---
apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata: {name: default, namespace: metallb-system}
spec: {communities: ["64513:100"]}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: router, namespace: metallb-system}
spec: {myASN: 64513, peerASN: ROUTER_AS, peerAddress: ROUTER, holdTime: 3s, passwordSecret: {name: router}}
---
apiVersion: v1
kind: Secret
metadata: {name: router, namespace: metallb-system}
type: kubernetes.io/basic-auth
stringData: {password: s3cret}
`

// bgpMigration is a cluster of two nodes with kube-proxy and MetalLB, and a router between them and a client.
type bgpMigration struct {
	*migration
	router *bird.Router
	client *testbed.Host
	to     netip.AddrPort
	// deafen says that the router is not to hear node1 from the end of MetalLB's speaker there.
	deafen atomic.Bool
}

func newBGPMigration(t *testing.T) *bgpMigration {
	t.Helper()
	kubeProxy := peer(t, "kube-proxy")
	manifest := filepath.Join(testbed.ModuleDir(t, "../../test/metallb", "go.universe.tf/metallb"), "config/manifests/metallb-native.yaml")
	n := testbed.NewNetwork(t)
	m := &bgpMigration{migration: &migration{rig: &rig{T: t, node: n.Host("node1"), node2: n.Host("node2")}}}
	var neighbors []string
	for _, h := range []*testbed.Host{m.node, m.node2} {
		// Routers wait after an error: BIRD for 60 seconds by default.
		neighbors = append(neighbors, "neighbor "+h.Addr4().String()+" as 64513; password \"s3cret\"; error wait time 4, 4;")
	}
	m.router, m.client = bird.Start(t, n.Host("router"), neighbors...), n.Outside("client")
	m.client.Route(netip.MustParsePrefix("198.51.100.0/24"), m.router.Addr4())
	m.connect()
	m.beforeRemoval = func(pod *corev1.Pod) {
		if pod.Namespace == "metallb-system" && pod.Spec.NodeName == m.node.Name() && m.deafen.CompareAndSwap(true, false) {
			m.stopHearing(m.node)
		}
	}
	fairlead := process.Program("fairlead")
	m.api.RunWorkloads(t)
	startKubelet(m.rig, map[string]string{
		"registry.k8s.io/kube-proxy:v1.37.2": kubeProxy, "fairlead/fairlead:0.1.0": fairlead,
		"quay.io/metallb/controller:" + metallbVersion: metallbProgram(t, "controller"),
		"quay.io/metallb/speaker:" + metallbVersion:    metallbProgram(t, "speaker"),
	}, m.node2)
	m.register(m.node)
	m.register(m.node2)
	m.apply(strings.NewReplacer("MODE", "nftables", "PODS", "10.244.0.0/16", "SERVER", m.gateway.URL).Replace(kubeProxyObjects))
	m.serveOnBoth()
	m.installMetalLB(manifest)
	return m
}

// metallbProgram builds one of MetalLB's programs.
func metallbProgram(t *testing.T, name string) string {
	t.Helper()
	return process.Build(t, "test/metallb", "go.universe.tf/metallb/"+name)
}

// serveOnBoth makes a Service with an endpoint on each node.
func (m *bgpMigration) serveOnBoth() {
	m.Helper()
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}}
	for name, protocol := range map[string]corev1.Protocol{"tcp": corev1.ProtocolTCP, "udp": corev1.ProtocolUDP} {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: name, Port: 80, Protocol: protocol})
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: new(name), Port: new(int32(8080)), Protocol: new(protocol)})
	}
	for _, h := range []*testbed.Host{m.node, m.node2} {
		pod := h.Pod("web-" + h.Name())
		pod.Serve(svc.TCP, 8080)
		pod.Serve(svc.UDP, 8080)
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{pod.Addr4().String()}, NodeName: new(h.Name()), Conditions: discoveryv1.EndpointConditions{Ready: new(true)},
		})
	}
	_, err1 := m.rig.client.CoreV1().Services("default").Create(m.Context(), s, metav1.CreateOptions{})
	_, err2 := m.rig.client.DiscoveryV1().EndpointSlices("default").Create(m.Context(), slice, metav1.CreateOptions{})
	if err1 != nil || err2 != nil {
		m.Fatal(err1, err2)
	}
}

// installMetalLB applies MetalLB's own manifest of the native mode, but for its webhooks, for which the rig has no certificates, and
// its objects. It waits until the client is answered over both nodes.
func (m *bgpMigration) installMetalLB(manifest string) {
	m.Helper()
	text, err := os.ReadFile(manifest)
	if err != nil {
		m.Fatal(err)
	}
	var out []string
	for _, document := range strings.Split(string(text), "\n---\n") {
		var o map[string]any
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			m.Fatal(err)
		}
		switch o["kind"] {
		case "ValidatingWebhookConfiguration":
			continue
		case "CustomResourceDefinition":
			delete(o["spec"].(map[string]any), "conversion")
		}
		one, err := yaml.Marshal(o)
		if err != nil {
			m.Fatal(err)
		}
		// A process here has no /var/run/secrets of its own.
		const env, more = "        env:\n", "        - name: METALLB_NAMESPACE\n          value: metallb-system\n"
		one = bytes.Replace(one, []byte(env), []byte(env+more), 1)
		if o["kind"] == "Deployment" {
			one = bytes.Replace(one, []byte("- --port=9120\n"), []byte("- --port=9120\n        - --webhook-mode=disabled\n"), 1)
		}
		out = append(out, string(one))
	}
	m.apply(strings.Join(out, "---\n"))
	m.kubectl("rollout", "status", "deployment/controller", "-n", "metallb-system", "--timeout=2m")
	m.kubectl("rollout", "status", "daemonset/speaker", "-n", "metallb-system", "--timeout=2m")
	m.apply(strings.NewReplacer("ROUTER_AS", fmt.Sprint(bird.AS), "ROUTER", m.router.Addr4().String()).Replace(balancedByBGP))
	testbed.Until(m.T, "an address of MetalLB", func() error {
		a, err := netip.ParseAddr(m.service("{.status.loadBalancer.ingress[*].ip}"))
		m.to = netip.AddrPortFrom(a, 80)
		return err
	})
	m.overBoth()
	testbed.Until(m.T, "an answer over the router", func() error {
		ctx, cancel := context.WithTimeout(m.Context(), 2*time.Second)
		defer cancel()
		_, err1 := m.client.Ask(ctx, svc.TCP, m.to)
		_, err2 := m.client.Ask(ctx, svc.UDP, m.to)
		return errors.Join(err1, err2)
	})
}

// overBoth waits until the router has the routes of both nodes.
func (m *bgpMigration) overBoth() {
	m.Helper()
	m.router.Routes(m.to.Addr().String()+"/32", m.node.Addr4(), m.node2.Addr4())
}

// ask asks all the time, from a new port each time, until the test calls the function that it returns. No question may fail. A TCP
// connection may be reset, since a router that changes its next hop leads its second packet to the other node; it is made again.
func (m *bgpMigration) ask() (end func()) {
	m.Helper()
	all := repeat(m.T)
	var made, failed, reset atomic.Int64
	once := func(p svc.Protocol) error {
		within, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, err := m.client.Ask(within, p, m.to)
		return err
	}
	for _, p := range []svc.Protocol{svc.TCP, svc.UDP} {
		all.every(10*time.Millisecond, func() {
			err := once(p)
			if errors.Is(err, syscall.ECONNRESET) {
				reset.Add(1)
				err = once(p)
			}
			if err != nil && failed.Add(1) < 5 {
				m.Errorf("a new connection over %s: %v", p, err)
			}
			made.Add(1)
		})
	}
	return func() {
		m.Helper()
		all.end()
		if made.Load() < 100 {
			m.Errorf("only %d connections were made", made.Load())
		}
		m.Logf("%d of %d new connections failed; %d were reset and made again", failed.Load(), made.Load(), reset.Load())
	}
}

// A cluster goes from the real MetalLB, which announces by BGP, to fairlead lb and back with the commands of docs/kubernetes.md, node
// by node. The router has a route all the time, and the address answers.
func TestMigrateBGP(t *testing.T) {
	m := newBGPMigration(t)
	objects := func() string {
		return m.kubectl("get", "daemonset/speaker", "deployment/controller", "-n", "metallb-system", "-o",
			`jsonpath={range .items[*]}{.spec}{.metadata.annotations.fairlead\.dev/lb}{end}`) + m.service("{.metadata.finalizers} {.status}") +
			m.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.labels}")
	}
	before := objects()
	end := m.ask()
	for _, command := range migrateCommands(t, "MetalLB") {
		if strings.HasPrefix(command, "apply") {
			m.interruptedBGP()
		}
		out := m.must(strings.Fields(command)...)
		t.Logf("%s:\n%s", command, out)
		m.overBoth()
		switch verb, _, _ := strings.Cut(command, " "); verb {
		case "plan":
			if !strings.Contains(out, "one by one (node1, node2)") {
				t.Errorf("the plan is\n%s", out)
			}
		case "apply":
			m.moved()
		case "status":
			if !strings.Contains(out, "fairlead") {
				t.Errorf("%s: %s", command, out)
			}
		}
	}
	end()
	if after := objects(); after != before {
		t.Errorf("MetalLB's objects are\n%s\nand were\n%s", after, before)
	}
	left := m.kubectl("get", "ipaddresses,configmaps,leases,ingressclasses,customresourcedefinitions,daemonsets", "-A", "-o", "name") +
		m.kubectl("get", "secrets", "-n", "kube-system", "-o", "name")
	for _, name := range []string{
		m.to.Addr().String(), "secret/router", "fairlead-bgp-", "fairlead-lb", "ingressclass", "bgppeers.fairlead.dev",
	} {
		if strings.Contains(left, name) {
			t.Errorf("left of fairlead lb is %s: %s", name, left)
		}
	}
}

// interruptedBGP kills 'apply' as soon as the second node's MetalLB ends; the next 'apply' goes on. Before, the router does not hear the
// first node for a time: the second one must wait for its session.
func (m *bgpMigration) interruptedBGP() {
	m.Helper()
	m.deafen.Store(true)
	p := process.Start(m.T, exec.Command(process.Program("fairlead"), "migrate", "apply", "--component", "lb",
		"--kubeconfig", m.api.Kubeconfig))
	until := func(what, node string, labels ...string) {
		testbed.Until(m.T, what, func() error {
			if p.Ended() {
				m.Fatalf("apply has ended:\n%s", p.Log())
			}
			if label := m.lbLabel(node); !slices.Contains(labels, label) {
				return fmt.Errorf("the label of %s is %q", node, label)
			}
			return nil
		})
	}
	until("the sessions of node1", "node1", "fairlead")
	for begin := time.Now(); time.Since(begin) < deaf; {
		if label := m.lbLabel("node2"); label != "" {
			m.Fatalf("the router does not hear node1, and the label of node2 is %q", label)
		}
	}
	if m.deafen.Load() {
		m.Fatal("the router hears node1")
	}
	process.Output(m.T, m.router.Command(m.Context(), "nft", "delete", "table", "ip", "deaf"))
	until("the end of MetalLB's speaker on node2", "node2", "leaving", "fairlead")
	p.Kill()
}

// stopHearing makes the router drop what a node sends to it by BGP.
func (m *bgpMigration) stopHearing(node *testbed.Host) {
	rules := fmt.Sprintf(`table ip deaf {
	chain in {
		type filter hook input priority 0
		ip saddr %s tcp dport 179 drop
		ip saddr %[1]s tcp sport 179 drop
	}
}`, node.Addr4())
	if _, err := process.Try(m.router.Command(context.Background(), "nft", rules)); err != nil {
		m.Errorf("cannot stop the router from hearing %s: %v", node.Name(), err)
	}
}

// deaf is how long the router does not hear node1: some times what a session takes to begin.
const deaf = 5 * time.Second

// lbLabel is how far a node is.
func (m *bgpMigration) lbLabel(node string) string {
	m.Helper()
	return m.kubectl("get", "node", node, "-o", `jsonpath={.metadata.labels.fairlead\.dev/lb}`)
}

// moved checks that only fairlead lb announces, with the attributes that MetalLB's objects have.
func (m *bgpMigration) moved() {
	m.Helper()
	if left := m.kubectl("get", "pods", "-n", "metallb-system", "-o", "name"); left != "" {
		m.Errorf("left of MetalLB: %s", left)
	}
	sessions := strings.Fields(m.kubectl("get", "speakers", "-o", "jsonpath={.items[*].status.peers[*].state}"))
	if len(sessions) != 2 || slices.ContainsFunc(sessions, func(s string) bool { return s != "Established" }) {
		m.Errorf("the sessions are %v", sessions)
	}
	if route := m.router.Ask("show", "route", "all", "for", m.to.Addr().String()); strings.Count(route, "(64513,100)") != 2 {
		m.Errorf("the router has\n%s", route)
	}
}
