package node

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
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

// podsByName returns the addresses of the Pods' backends by the names with which they answer. That of a
// registered program is the machine's.
func (c *cluster) podsByName() map[string]string {
	c.t.Helper()
	machine, err := os.Hostname()
	if err != nil {
		c.t.Fatal(err)
	}
	out := map[string]string{}
	text := c.kubectl("get", "pods", "-o", `jsonpath={range .items[*]}{.metadata.name} {.status.podIP}{"\n"}{end}`)
	for line := range strings.Lines(text) {
		name, ip, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.HasPrefix(name, "program") {
			name = machine
		}
		out[name] = ip
	}
	if len(out) != 3 {
		c.t.Fatalf("the Pods are %v, want three", out)
	}
	return out
}

// answeredBy returns an error unless requests are answered by all of the backends of these
// names, and by no other.
func (c *cluster) answeredBy(at netip.AddrPort, names ...string) error {
	got := map[string]int{}
	for range 40 {
		name, err := c.answer(c.node, at)
		if err != nil {
			return err
		}
		got[name]++
	}
	if slices.Sort(names); !slices.Equal(slices.Sorted(maps.Keys(got)), names) {
		return fmt.Errorf("answered by %v, want %v", got, names)
	}
	return nil
}

// tell has a backend report that it is "ready" or "unready".
func (c *cluster) tell(ip, what string) {
	c.t.Helper()
	process.Output(c.t, c.on(c.node, "curl", "-sSf", "--max-time", "30", "-X", "POST", "http://"+ip+":9376/"+what))
}

// ownWord has each endpoint of the node fail its check and pass it again while there is no
// server, and the last one fail it as the server comes back, which then ends again.
func (c *cluster) ownWord(at netip.AddrPort, pods map[string]string) {
	c.t.Helper()
	all := slices.Sorted(maps.Keys(pods))
	for i, name := range all {
		c.tell(pods[name], "unready")
		rest := slices.Delete(slices.Clone(all), i, i+1)
		testbed.Until(c.t, name+" to get no more requests", func() error { return c.answeredBy(at, rest...) })
		if i == len(all)-1 {
			break
		}
		c.tell(pods[name], "ready")
		testbed.Until(c.t, name+" to get requests again", func() error { return c.answeredBy(at, all...) })
	}
	last, rest := all[len(all)-1], all[:len(all)-1]
	c.api.Start(c.t)
	c.api.AwaitReady(c.t)
	testbed.Until(c.t, "the server to know of it", func() error {
		if err := c.answeredBy(at, slices.Clone(rest)...); err != nil {
			c.t.Fatalf("as the server comes back: %v", err)
		}
		ready := c.kubectl("get", "endpointslices", "-l", "kubernetes.io/service-name=my-service",
			"-o", "jsonpath={.items[*].endpoints[*].conditions.ready}")
		if strings.Count(ready, "false") != 1 {
			return errors.New("ready: " + ready)
		}
		return nil
	})
	c.tell(pods[last], "ready")
	testbed.Until(c.t, last+" to get requests with the server", func() error { return c.answeredBy(at, all...) })
	testbed.Until(c.t, "the server to know that all are ready", func() error {
		ready := c.kubectl("get", "endpointslices", "-l", "kubernetes.io/service-name=my-service",
			"-o", "jsonpath={.items[*].endpoints[*].conditions.ready}")
		if strings.Contains(ready, "false") {
			return errors.New("ready: " + ready)
		}
		return nil
	})
	c.api.Process.Kill()
}

// A node that starts without any server has the Services, names and Pods that it knew, after a
// restart of its agent and of the machine, goes by what it finds out of its own endpoints, and
// follows the server when that is back.
func TestWithoutServer(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	at := c.backends()
	process.Start(t, c.on(c.node, process.Program("backend")))
	process.Output(t, c.fairlead(c.server, "register", "--node", c.node.Name(), "--name", "program", "-l", "app=MyApp", "-p", "http=9376",
		"--ready", "http://:9376/healthz", "--timeout", "2m"))
	pods := c.podsByName()
	testbed.Until(t, "answers of all three", func() error { return c.answeredBy(at, slices.Collect(maps.Keys(pods))...) })
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

	c.ownWord(at, pods)

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
