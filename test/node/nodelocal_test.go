package node

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// tracked are the connection tracking entries of the Service kube-dns on a host.
func tracked(t *testing.T, on *testbed.Host) string {
	t.Helper()
	var all []byte
	for _, family := range []string{"ipv4", "ipv6"} {
		out, err := on.Command(t.Context(), "conntrack", "-L", "-f", family).Output()
		if err != nil {
			t.Fatalf("conntrack -L on %s: %v", on.Name(), err)
		}
		all = append(all, out...)
	}
	var lines []string
	for line := range strings.Lines(string(all)) {
		if strings.Contains(line, "="+clusterDNS+" ") || strings.Contains(line, "="+clusterDNS6+" ") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

// nodeLocalAlone runs 'fairlead dns --node-local' on a host without an agent, as on
// the nodes of another Kubernetes: what runs there is answered at the address of
// kube-dns over UDP and TCP, IPv4 and IPv6, without connection tracking entries,
// and at the end nothing is left.
func (c *cluster) nodeLocalAlone(name, want string) {
	t := c.t
	t.Helper()
	host := c.network.Outside("plain")
	admin, err := os.ReadFile(c.path("server/admin.kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig := c.path("plain.kubeconfig")
	remote := strings.ReplaceAll(string(admin), "127.0.0.1", c.server.Addr4().String())
	if err := os.WriteFile(kubeconfig, []byte(remote), 0o600); err != nil {
		t.Fatal(err)
	}
	server := process.Start(t, c.fairlead(host, "dns", "--kubeconfig", kubeconfig,
		"--node-local", clusterDNS+","+clusterDNS6, "--upstream", "127.0.0.1:9"))
	run := func(args ...string) (string, error) {
		return process.Try(host.Command(t.Context(), args[0], args[1:]...))
	}
	rules := []string{"nft", "list", "table", "inet", "fairlead-dns"}
	testbed.Until(c.t, "the rules of dns --node-local", func() error {
		_, err := run(rules...)
		return err
	})
	for _, at := range []string{"127.0.0.1", clusterDNS, clusterDNS6} {
		for _, over := range []string{"+notcp", "+tcp"} {
			if out, err := run("dig", "+short", "+time=2", "+tries=5", name, "@"+at, over); err != nil || out != want {
				t.Errorf("dns --node-local: dig @%s %s: %q, %v", at, over, out, err)
			}
		}
	}
	if seen := tracked(t, host); seen != "" {
		t.Errorf("dns --node-local: connection tracking entries of DNS:\n%s", seen)
	}
	server.Stop()
	if out, err := run(rules...); err == nil {
		t.Errorf("left by dns --node-local:\n%s", out)
	}
	if out, err := run("ip", "route", "show", "table", "local"); err != nil || strings.Contains(out, clusterDNS) {
		t.Errorf("left by dns --node-local: %v\n%s", err, out)
	}
}

// Every mode of the proxy leaves DNS on the node alone: no connection tracking
// entry for it, from Pods and from the node itself, over UDP and TCP, IPv4 and
// IPv6. The Service kube-dns still lists the servers. When the agent ends, other
// nodes' servers answer.
func TestNodeLocalDNS(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	other := c.network.Outside("other")
	other.Sysctl("net/ipv4/ip_forward", "1")
	c.cleansUp(other, "other")
	c.agentOn(other, "other")
	testbed.Until(c.t, "both servers behind kube-dns", func() error {
		out := c.kubectl("-n", "kube-system", "get", "endpointslices", "-l", "kubernetes.io/service-name=kube-dns",
			"-o", "jsonpath={.items[*].endpoints[*].addresses[0]}")
		if len(strings.Fields(out)) != 2 {
			return errors.New(out)
		}
		return nil
	})
	service := c.backends().Addr().String()
	c.nodeLocalAlone("my-service.default.svc.cluster.local", service)
	pod := strings.Fields(c.started())[0]
	// What it sends comes to the node from outside, like a Pod's packets, but
	// needs no agent.
	client := c.network.Outside("client")
	client.Route(netip.MustParsePrefix(clusterDNS+"/32"), c.node.Addr4())
	client.Route(netip.MustParsePrefix(clusterDNS6+"/128"), c.node.Addr6())
	question := []string{"dig", "+short", "+time=2", "+tries=5", "my-service.default.svc.cluster.local"}
	ask := func(where string, servers ...string) {
		t.Helper()
		for _, at := range servers {
			for _, over := range []string{"+notcp", "+tcp"} {
				for _, from := range []*testbed.Host{c.node, client} {
					out, err := from.Command(t.Context(), question[0], append(question[1:], "@"+at, over)...).CombinedOutput()
					if err != nil || strings.TrimSpace(string(out)) != service {
						t.Errorf("%s: from %s, dig @%s %s: %q, %v", where, from.Name(), at, over, out, err)
					}
				}
			}
		}
	}
	flush := func() {
		t.Helper()
		if out, err := c.node.Command(t.Context(), "conntrack", "-F").CombinedOutput(); err != nil {
			t.Fatalf("conntrack -F: %v\n%s", err, out)
		}
	}
	installed := func() error {
		out, err := c.node.Command(t.Context(), "nft", "list", "table", "inet", "fairlead-dns").CombinedOutput()
		if err == nil && !strings.Contains(string(out), "dnat ip to "+other.Addr4().String()+":10053") {
			err = errors.New("the other server is not in it")
		}
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	for _, flags := range [][]string{
		nil, {"--mode", "iptables", "--iptables-variant", "nft"}, {"--mode", "iptables", "--iptables-variant", "legacy"},
	} {
		mode := "mode " + strings.Join(append(flags, "auto")[:min(4, len(flags)+1)], " ")
		if flags != nil {
			c.agentFlags = flags
			c.startAgent()
		}
		testbed.Until(c.t, "rules for DNS in "+mode, installed)
		c.agentUp()
		flush()
		ask(mode, clusterDNS, clusterDNS6)
		for _, over := range []string{"+notcp", "+tcp"} {
			if out := c.kubectl(slices.Concat([]string{"exec", pod, "--"}, question, []string{"@" + clusterDNS, over})...); out != service {
				t.Errorf("%s: from a Pod, dig %s: %q", mode, over, out)
			}
		}
		if seen := tracked(t, c.node); seen != "" {
			t.Errorf("%s: connection tracking entries of DNS:\n%s", mode, seen)
		}
		c.agent.Stop()
		if err := installed(); err == nil {
			t.Errorf("%s: the rules are still there after the agent's end", mode)
		}
		// The other node's server, by the proxy's rules.
		ask(mode+", agent ended", clusterDNS)
		if seen := tracked(t, c.node); !strings.Contains(seen, "src="+other.Addr4().String()) {
			t.Errorf("%s: the other server has not answered:\n%s", mode, seen)
		}
	}
}
