package node

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// Pods of a node behind a router are reached by VXLAN: from the other node, from its Pods,
// by address and by ClusterIP, with packets of any size; and packets of VXLAN from others
// than the nodes are dropped.
func TestNodesOnTwoNetworks(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	far := c.network.Far("far")
	far.Sysctl("net/ipv4/ip_forward", "1")
	c.cleansUp(far, "far")
	c.agentOn(far, "far")
	c.nodesReady(2)
	run := func(name, node string) netip.Addr {
		process.Output(t, c.fairlead(c.server, "run", "-d", "--name", name, "-l", "app="+name, "-p", "http=9376", "--node", node,
			"--ready", "http://:9376/healthz", "--", process.Program("backend")))
		var ip netip.Addr
		testbed.Until(t, "the Pod "+name, func() (err error) {
			out, err := c.try("get", "pods", "-l", "app="+name, "-o", "jsonpath={.items[0].status.podIP} {.items[0].metadata.name}")
			if err == nil {
				ip, err = netip.ParseAddr(strings.Fields(out + " none")[0])
			}
			return err
		})
		return ip
	}
	near, there := run("near", "node"), run("there", "far")
	c.kubectl("create", "service", "clusterip", "there", "--tcp=80:9376")
	vip := netip.MustParseAddr(c.kubectl("get", "svc", "there", "-o", "jsonpath={.spec.clusterIP}"))
	pod := func(app string) string {
		return c.kubectl("get", "pods", "-l", "app="+app, "-o", "jsonpath={.items[0].metadata.name}")
	}
	from, back := pod("near"), pod("there")
	for _, at := range []string{there.String() + ":9376", vip.String()} {
		testbed.Until(t, "an answer from "+at, func() error {
			_, err := c.try("exec", from, "--", "curl", "-sS", "--max-time", "5", "http://"+at)
			return err
		})
		testbed.Until(t, "an answer to the node from "+at, func() error {
			_, err := process.Try(c.node.Command(t.Context(), "curl", "-sS", "--max-time", "5", "http://"+at))
			return err
		})
	}
	if _, err := c.try("exec", back, "--", "curl", "-sS", "--max-time", "20", fmt.Sprintf("http://%s:9376", near)); err != nil {
		t.Error(err)
	}
	// A body that is larger than any packet, both ways.
	if _, err := c.try("exec", from, "--", "sh", "-c", "head -c 200000 /dev/zero | curl -sS --max-time 20 --data-binary @- http://"+
		there.String()+":9376"); err != nil {
		t.Error(err)
	}
	routes := process.Output(t, c.node.Command(t.Context(), "ip", "route"))
	if !strings.Contains(routes, "dev fl0vxlan4 proto 250") {
		t.Errorf("no route by VXLAN:\n%s", routes)
	}
	rules := process.Output(t, c.node.Command(t.Context(), "nft", "list", "table", "inet", "fairlead-overlay"))
	if !strings.Contains(rules, far.Addr4().String()) || strings.Contains(rules, c.server.Addr4().String()) {
		t.Errorf("the peers of VXLAN:\n%s", rules)
	}
}
