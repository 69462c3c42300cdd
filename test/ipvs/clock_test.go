package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// clocked is a cluster with an agent, whose Services have an endpoint on a machine beside it.
type clocked struct {
	*cluster
	endpoint netip.Addr
}

// stepClock sets this machine's clock, which is the guest's own.
func stepClock(t *testing.T, by time.Duration) {
	t.Helper()
	tv := unix.NsecToTimeval(time.Now().Add(by).UnixNano())
	if err := unix.Settimeofday(&tv); err != nil {
		t.Fatal(err)
	}
}

// The clock of a machine with a server and an agent steps, forwards and backwards: a Service goes
// on being answered, its endpoint stays, the Node stays Ready, and what is made after a step is
// served. So it is after an hour without a server, in which the agent starts from its disk, and after
// more than a year, in which all certificates end: the server's start renews its own, and the machine
// joins again.
func TestClockSteps(t *testing.T) {
	needsSpeed(t)
	c := &clocked{cluster: newCluster(t)}
	c.server = newServer(c.node, c.path("server"), "--bind-address", "127.0.0.1,"+c.node.Addr4().String())
	backend := c.network.Outside("backend")
	backend.Serve(svc.TCP, 9376)
	c.endpoint = backend.Addr4()
	c.server.Start(t)
	c.server.AwaitReady(t)
	agent := process.Start(t, c.agent("--token-file", c.path("server/node-token")))
	agent.Says("is up")
	at := c.serviceOf("first")
	testbed.Until(t, "an answer", func() error { return c.answers(at) })
	testbed.Until(t, "a Node that is Ready", c.nodeReady)
	c.lacksInet(agent)
	before := c.state()

	for _, by := range []time.Duration{time.Hour, -90 * time.Minute, 25 * time.Hour} {
		stepClock(t, by)
		stepped := time.Now()
		if err := c.answers(at); err != nil {
			t.Errorf("right after a step of %s: %v", by, err)
		}
		next := c.serviceOf("after" + strings.ReplaceAll(by.String(), "-", "minus"))
		testbed.Until(t, "a new Service after the step", func() error { return c.answers(next) })
		testbed.Until(t, "Leases renewed after the step", func() error {
			if by > 0 { // backwards it is to be renewed when it is time, and not when the agent is asked
				c.askForLease()
			}
			return c.renewed(stepped)
		})
		if after := c.state(); after != before {
			t.Errorf("a step of %s has changed\n%s\nto\n%s", by, before, after)
		}
	}

	c.server.Kill()
	stepClock(t, time.Hour)
	agent.Kill()
	agent = process.Start(t, c.agent())
	agent.Says("is up")
	if err := c.answers(at); err != nil {
		t.Errorf("after an hour without a server, from the agent's disk: %v", err)
	}
	c.server.Start(t)
	c.server.AwaitReady(t)
	next := c.serviceOf("back")
	testbed.Until(t, "a new Service after the server's return", func() error { return c.answers(next) })
	c.yearOff(agent, at)
}

// yearOff has the server be off until all certificates have ended, and brings the cluster back.
func (c *clocked) yearOff(agent *process.Process, at netip.AddrPort) {
	t := c.t
	c.server.Kill()
	stepClock(t, 400*24*time.Hour)
	if err := c.answers(at); err != nil {
		t.Errorf("after a year without a server: %v", err)
	}
	c.server.Client = nil // its certificate has ended
	c.server.Start(t)
	testbed.Until(t, "the server to be ready, with certificates that are valid", func() error {
		c.server.Client = nil
		return c.server.Ready(t.Context())
	})
	agent.Kill()
	fails(t, c.agent(), 1, "expired", "kubectl delete node node", "fairlead token create")
	if err := c.answers(at); err != nil {
		t.Errorf("after a year, without an agent: %v", err)
	}
	if err := c.server.Client.CoreV1().Nodes().Delete(t.Context(), "node", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	process.Start(t, c.agent("--token-file", c.path("server/node-token"))).Says("is up")
	next := c.serviceOf("nextyear")
	testbed.Until(t, "a new Service for the machine that has joined again", func() error { return c.answers(next) })
}

// agent is the agent of the node.
func (c *clocked) agent(more ...string) *exec.Cmd {
	return c.command(append([]string{"agent", "--mode", "ipvs", "--iptables-variant", "legacy", "--pod-network", "hostgw",
		"--server", "https://" + c.node.Addr4().String() + ":6443", "--node-name", "node",
		"--node-ip", c.node.Addr4().String(), "--data-dir", c.path("agent"), "--dns-lameduck", "1s"}, more...)...)
}

// nodeReady returns an error unless the Node is Ready.
func (c *clocked) nodeReady() error {
	if state := c.state(); !strings.Contains(state, "node True") {
		return fmt.Errorf("it is %q", state)
	}
	return nil
}

// lacksInet shows that a kernel without family inet of nf_tables makes a Node that is Ready, that its
// conditions say what it does without, and that the agent logs that once.
func (c *clocked) lacksInet(agent *process.Process) {
	for _, kind := range []corev1.NodeConditionType{"fairlead.dev/PodsMasqueraded", "fairlead.dev/NodeLocalDNS"} {
		testbed.Until(c.t, "the condition "+string(kind), func() error {
			n, err := c.server.Client.CoreV1().Nodes().Get(c.t.Context(), "node", metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, k := range n.Status.Conditions {
				if k.Type == kind && k.Status == corev1.ConditionFalse && strings.Contains(k.Message, "CONFIG_NF_TABLES_INET") {
					return nil
				}
			}
			return fmt.Errorf("the Node has %+v", n.Status.Conditions)
		})
	}
	log := agent.Log()
	for _, words := range []string{"keep the pods' addresses", "cannot have the rules for node-local DNS"} {
		if n := strings.Count(log, words); n != 1 {
			c.t.Errorf("the agent has logged %q %d times, want once:\n%s", words, n, log)
		}
	}
}

// askForLease asks the agent to renew the Lease now, as the controllers do of a node that others do
// not reach. A request that fails is made again by whoever waits.
func (c *clocked) askForLease() {
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, svc.SuspectedAnnotation, time.Now().UTC().Format(time.RFC3339Nano))
	_, _ = c.server.Client.CoreV1().Nodes().Patch(c.t.Context(), "node", types.MergePatchType, []byte(patch), metav1.PatchOptions{})
}

// serviceOf makes a Service of the machine beside the node.
func (c *clocked) serviceOf(name string) netip.AddrPort {
	c.t.Helper()
	s, err1 := c.server.Client.CoreV1().Services("default").Create(c.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	_, err2 := c.server.Client.DiscoveryV1().EndpointSlices("default").Create(c.t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: new(int32(9376))}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{c.endpoint.String()}}},
	}, metav1.CreateOptions{})
	if err := errors.Join(err1, err2); err != nil {
		c.t.Fatal(err)
	}
	return netip.AddrPortFrom(netip.MustParseAddr(s.Spec.ClusterIP), 80)
}

// answers makes a connection to an address of a Service.
func (c *clocked) answers(at netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Second)
	defer cancel()
	conn, err := c.node.Dial(ctx, svc.TCP, at)
	if err != nil {
		return err
	}
	return conn.Close()
}

// state is what a step of the clock must not change: since when the Node is Ready, and the slice of the first Service.
func (c *clocked) state() string {
	c.t.Helper()
	var b strings.Builder
	nodes, err1 := c.server.Client.CoreV1().Nodes().List(c.t.Context(), metav1.ListOptions{})
	slices, err2 := c.server.Client.DiscoveryV1().EndpointSlices("default").List(c.t.Context(),
		metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=first"})
	if err := errors.Join(err1, err2); err != nil {
		c.t.Fatal(err)
	}
	for _, n := range nodes.Items {
		for _, k := range n.Status.Conditions {
			if k.Type == corev1.NodeReady {
				fmt.Fprintf(&b, "%s %s since %s, taints %v\n", n.Name, k.Status, k.LastTransitionTime, n.Spec.Taints)
			}
		}
	}
	for _, s := range slices.Items {
		fmt.Fprintf(&b, "%s at generation %d: %v\n", s.Name, s.Generation, s.Endpoints)
	}
	return b.String()
}

// renewed returns an error unless the Leases of the Node and of the controllers were renewed after a time of the clock that
// the machine has now.
func (c *clocked) renewed(after time.Time) error {
	return errors.Join(leaseRenewed(c.t.Context(), c.server.Client, corev1.NamespaceNodeLease, "node", after),
		leaseRenewed(c.t.Context(), c.server.Client, "kube-system", "fairlead-controllers", after))
}

func leaseRenewed(ctx context.Context, client kubernetes.Interface, namespace, name string, after time.Time) error {
	var l *coordinationv1.Lease
	l, err := client.CoordinationV1().Leases(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if d := l.Spec.RenewTime.Sub(after); d < 0 || d > testbed.Patience {
		return fmt.Errorf("%s was renewed %s after the step", name, d)
	}
	return nil
}
