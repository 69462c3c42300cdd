package lb

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// A machine whose link goes down leaves the endpoints long before the 40 s of its Lease are over, and then
// no request fails; it returns with its link. Meanwhile a node whose agent was killed keeps its endpoint, as its machine answers,
// and with its certificate, when that was stolen, no other node is condemned.
func (c *cluster) deadNode() {
	t := c.TB
	t.Helper()
	for _, n := range c.nodes {
		t.Cleanup(func() {
			n.Kill() // its Pods live on
			n.run(process.Program("fairlead"), "cleanup", "--data-dir", filepath.Join(c.dir, n.name))
		})
	}
	on := func(program string, args ...string) *exec.Cmd {
		cmd := c.host.Command(context.Background(), process.Program(program), args...)
		cmd.Env = append(os.Environ(), "HOME="+c.dir, "KUBECONFIG="+c.server.Kubeconfig)
		return cmd
	}
	for _, n := range c.nodes {
		process.Output(t, on("fairlead", "run", "-d", "-l", "app=MyApp", "-p", "http=9376", "--node", n.name,
			"--ready", "http://:9376/healthz", "--", process.Program("backend")))
	}
	process.Output(t, on("kubectl", "apply", "-f", "../../examples/my-service.yaml"))
	vip := netip.AddrPortFrom(netip.MustParseAddr(
		process.Output(t, on("kubectl", "get", "service", "my-service", "-o", "jsonpath={.spec.clusterIP}"))), 80)
	c.wantServing("n0", "n1", "n2", "n3", "n4")
	killed, dead, asker := c.nodes[0], c.nodes[1], c.nodes[2]
	began := echoes(dead)
	testbed.Until(t, "others to watch a machine", func() error {
		if now := echoes(dead); now < began+9 {
			return fmt.Errorf("it has answered %d requests", now-began)
		}
		return nil
	})

	killed.kill9()
	dead.run("ip", "link", "set", "eth0", "down")
	begin := time.Now()
	c.steal(killed)
	c.wantServing("n0", "n2", "n3", "n4")
	took := time.Since(begin)
	t.Logf("the endpoint of a dead machine left after %s", took.Round(10*time.Millisecond))
	if took > 35*time.Second {
		t.Error("that is what the grace period of 40 s alone would do")
	}
	asked := 0
	testbed.Until(t, "20 answers one after the other", func() error {
		for i := range 20 {
			asked++
			ctx, cancel := context.WithTimeout(c.Context(), 2*time.Second)
			conn, err := asker.host.Dial(ctx, svc.TCP, vip)
			cancel()
			if err != nil {
				return fmt.Errorf("request %d: %w", i, err)
			}
			c.must(conn.Close())
		}
		return nil
	})
	t.Logf("%d requests until 20 were answered one after the other", asked)
	dead.run("ip", "link", "set", "eth0", "up")
	begin = time.Now()
	c.wantServing("n0", "n1", "n2", "n3", "n4")
	t.Logf("it is back %s after its link", time.Since(begin).Round(10*time.Millisecond))
}

// wantServing waits until the ready endpoints of my-service are on these nodes.
func (c *cluster) wantServing(nodes ...string) {
	c.Helper()
	testbed.Until(c, "endpoints on "+strings.Join(nodes, ", "), func() error {
		list, err := c.client.DiscoveryV1().EndpointSlices("default").List(c.Context(),
			metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=my-service"})
		if err != nil {
			return err
		}
		var got []string
		for i := range list.Items {
			for _, e := range list.Items[i].Endpoints {
				if *e.Conditions.Ready {
					got = append(got, *e.NodeName)
				}
			}
		}
		if slices.Sort(got); !slices.Equal(got, nodes) {
			return fmt.Errorf("they are on %v", got)
		}
		return nil
	})
}

// steal lets a thief with the certificate of a node report all others as unreachable, in that node's Lease and theirs.
func (c *cluster) steal(n *node) {
	c.Helper()
	file := func(name string) string { return filepath.Join(c.dir, n.name, "node-pki", name) }
	config := rest.AnonymousClientConfig(c.server.Config)
	config.CertFile, config.KeyFile = file("node.crt"), file("node.key")
	thief, err := kubernetes.NewForConfig(config)
	c.must(err)
	var victims []string
	for _, o := range c.others(n) {
		victims = append(victims, o.name)
	}
	for _, lease := range append(victims, n.name) {
		// Those at the end of the list, as no more than three count: the dead one is not among them.
		patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, svc.UnreachableAnnotation, strings.Join(victims[1:], ","))
		_, err := thief.CoordinationV1().Leases(corev1.NamespaceNodeLease).Patch(c.Context(), lease, types.MergePatchType, []byte(patch),
			metav1.PatchOptions{})
		if lease == n.name {
			c.must(err)
		} else if !apierrors.IsForbidden(err) {
			c.Errorf("a node may report in the Lease of %s: %v", lease, err)
		}
	}
}

// echoes returns how many ICMP echo replies a node has sent.
func echoes(n *node) int {
	n.bed.Helper()
	text := process.Output(n.bed, n.host.Command(n.bed.Context(), "cat", "/proc/net/snmp"))
	var names []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		switch {
		case fields[0] != "Icmp:":
		case names == nil:
			names = fields
		default:
			var sent int
			_, err := fmt.Sscan(fields[slices.Index(names, "OutEchoReps")], &sent)
			n.bed.must(err)
			return sent
		}
	}
	n.bed.must(errors.New("no counters of ICMP"))
	return 0
}
