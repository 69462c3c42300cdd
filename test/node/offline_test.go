package node

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// reboot ends what runs on the node and empties its kernel, as a power cycle does. Its disk
// stays.
func (c *cluster) reboot() {
	c.t.Helper()
	c.agent.Kill()
	all := process.OfPods(c.path("agent/agent"))
	if len(all) < 2 {
		c.t.Fatalf("the Pods' processes are %v", all)
	}
	for _, pid := range all {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	process.Output(c.t, c.on(c.node, "sh", "-c",
		`nft flush ruleset
		ip -o link show | sed 's/^[0-9]*: \([^:@]*\).*/\1/' | grep -v -e '^lo$' -e '^eth0$' |
			while read l; do ip link del "$l" || :; done # some are gone with others`))
}

// A node that starts without any server has the Services, names and Pods that it knew, after a
// restart of its agent and of the machine, and follows the server when that is back.
func TestWithoutServer(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	at := c.backends()
	before := process.OfPods(c.path("agent/agent"))
	named := func() error {
		dig := c.node.Command(t.Context(), "dig", "+short", "+time=2", "+tries=1", "@10.96.0.10", "my-service.default.svc.cluster.local")
		out, err := process.Try(dig)
		if err == nil && out != at.Addr().String() {
			err = fmt.Errorf("the answer is %q", out)
		}
		return err
	}
	testbed.Until(t, "the name", named)
	c.api.Process.Kill()

	c.agent.Kill()
	c.startAgent()
	c.agentUp()
	if err := errors.Join(c.ask(at), named()); err != nil {
		t.Errorf("after the agent's restart: %v", err)
	}
	for _, pid := range before {
		if syscall.Kill(pid, 0) != nil {
			t.Errorf("a process of a Pod has ended: %d of %v", pid, before)
		}
	}

	c.reboot()
	c.startAgent()
	c.agentUp()
	testbed.Until(t, "the Services after the machine's restart", func() error { return errors.Join(c.ask(at), named()) })

	c.api.Start(t)
	c.api.AwaitReady(t)
	c.kubectl("create", "service", "clusterip", "second", "--tcp=80:9376")
	c.kubectl("patch", "service", "second", "--type=merge", "-p", `{"spec":{"selector":{"app":"MyApp"}}}`)
	second := netip.AddrPortFrom(netip.MustParseAddr(c.kubectl("get", "svc", "second", "-o", "jsonpath={.spec.clusterIP}")), 80)
	testbed.Until(t, "what is new", func() error { return c.ask(second) })
	if err := c.ask(at); err != nil {
		t.Errorf("with the server: %v", err)
	}
	c.nodesReady(1)
}
