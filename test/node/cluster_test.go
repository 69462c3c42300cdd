package node

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// Agents take ranges and domain from their server, and reject flags that differ. One that
// starts again, by itself or after a crash, keeps its address, though the machine has
// addresses of bridges, docker and Pods by then, and the other node stays Ready. Agents warn of
// what is wrong with the machine, and not of an address in the ranges of other clusters.
func TestAgentsOfAServerWithItsOwnRanges(t *testing.T) {
	t.Parallel()
	network := testbed.NewNetwork(t)
	c := &cluster{t: t, dir: t.TempDir(), network: network, server: network.Outside("server"), node: network.Outside("node")}
	other := network.Outside("other")
	c.api = process.NewServer(
		c.server,
		process.Program("fairlead"),
		c.path("server"),
		"--bind-address",
		"127.0.0.1,"+c.server.Addr4().String(),
		"--service-cluster-ip-range",
		"10.112.0.0/16",
		"--cluster-cidr",
		"10.111.0.0/16",
		"--cluster-domain",
		"corp.test",
	)
	c.api.Start(t)
	c.api.AwaitReady(t)
	start := func(on *testbed.Host, flags ...string) *process.Process {
		args := c.agentArgs(on, on.Name(), flags...)
		i := slices.Index(args, "--node-ip")
		return process.Start(t, c.fairlead(on, slices.Delete(args, i, i+2)...))
	}
	for _, host := range []*testbed.Host{c.node, other} {
		host.Sysctl("net/ipv4/ip_forward", "1")
		for _, args := range [][]string{
			{"link", "add", "docker0", "type", "bridge"}, {"addr", "add", "172.17.0.1/16", "dev", "docker0"}, {"link", "set", "docker0", "up"},
			{"link", "add", "br-1", "type", "bridge"}, {"addr", "add", "10.244.77.1/24", "dev", "br-1"}, {"link", "set", "br-1", "up"},
		} {
			process.Output(t, host.Command(t.Context(), "ip", args...))
		}
		c.cleansUp(host, host.Name())
	}
	agent := start(c.node)
	start(other).Says("is up")
	agent.Says("is up")
	defer func() {
		for line := range strings.Lines(agent.Log()) {
			// A machine of tests may have no control groups, and a clock that nothing keeps right.
			if strings.Contains(line, "check=") && !strings.Contains(line, "check=cgroups") && !strings.Contains(line, "check=clock") ||
				strings.Contains(line, "level=ERROR") {
				t.Errorf("an agent that starts again logs %s", line)
			}
		}
	}()
	c.nodesReady(2)
	for _, host := range []*testbed.Host{c.node, other} {
		c.kubectl("run", "on-"+host.Name(), "--image=host", "--overrides", `{"spec":{"nodeName":"`+host.Name()+`"}}`,
			"--command", "--", "sleep", "600")
	}
	testbed.Until(t, "a Pod with an address of the range on each node", func() error {
		if out := c.kubectl("get", "pods", "-o", "jsonpath={.items[*].status.podIP}"); strings.Count(out, "10.111.") != 2 {
			return errors.New(out)
		}
		return nil
	})
	testbed.Until(t, "the cluster's domain at the tenth address", func() error {
		out, err := process.Try(c.node.Command(t.Context(), "dig", "+short", "+time=2", "@10.112.0.10", "kubernetes.default.svc.corp.test"))
		if err == nil && out != "10.112.0.1" {
			err = fmt.Errorf("the answer is %q", out)
		}
		return err
	})

	// Name, addresses, and since when it is Ready.
	const state = `{range .items[*]}{.metadata.name} {.status.addresses[?(@.type=="InternalIP")].address} ` +
		`{.status.conditions[?(@.type=="Ready")].status} {.status.conditions[?(@.type=="Ready")].lastTransitionTime}{"\n"}{end}`
	before := c.kubectl("get", "nodes", "-o", "jsonpath="+state)
	for _, host := range []*testbed.Host{c.node, other} {
		if !strings.Contains(before, host.Name()+" "+host.Addr4().String()+" ") {
			t.Errorf("node %s is not at %s:\n%s", host.Name(), host.Addr4(), before)
		}
	}
	for _, end := range []func(*process.Process){(*process.Process).Stop, (*process.Process).Kill} {
		end(agent)
		agent = start(c.node)
		agent.Says("is up")
		c.nodesReady(2)
		// The other one has never been anything else, and this one is where it was.
		now := strings.Split(c.kubectl("get", "nodes", "-o", "jsonpath="+state), "\n")
		was := strings.Split(before, "\n")
		if now[1] != was[1] || strings.SplitAfter(now[0], "True")[0] != strings.SplitAfter(was[0], "True")[0] {
			t.Errorf("after the agent's restart: %q, before: %q", now, was)
		}
	}

	third := network.Outside("third")
	for flag, want := range map[string]string{
		"--cluster-cidr=10.9.0.0/16":             "--cluster-cidr is 10.9.0.0/16, but the server has 10.111.0.0/16",
		"--service-cluster-ip-range=10.9.0.0/16": "--service-cluster-ip-range is 10.9.0.0/16, but the server has 10.112.0.0/16",
		"--cluster-domain=cluster.local":         "--cluster-domain is cluster.local, but the server has corp.test",
	} {
		out, err := process.Try(c.fairlead(third, c.agentArgs(third, "third", flag)...))
		if err == nil || !strings.Contains(out, want) || strings.Contains(out, "level=ERROR") {
			t.Errorf("%s: %v, %q", flag, err, out)
		}
	}
	if out := c.kubectl("get", "nodes", "-o", "name"); strings.Contains(out, "third") {
		t.Errorf("a rejected agent has registered: %s", out)
	}
}
