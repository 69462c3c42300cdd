package node

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// report is what this package reads of 'fairlead status -o json'.
type report struct {
	Node, Healthz string
	Nodes         []struct {
		Name       string
		Programmed *proxy.Status
	}
	Problems []string
}

func (c *cluster) status(cmd *exec.Cmd) (r report) {
	c.t.Helper()
	if err := json.Unmarshal([]byte(process.Output(c.t, cmd)), &r); err != nil {
		c.t.Fatal(err)
	}
	return r
}

// fairlead status names each thing that is wrong, to an administrator, and on a node
// without any kubeconfig what the node knows.
func TestStatus(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.backends()
	ask := func() report { return c.status(c.fairlead(c.server, "status", "-o", "json", "--probe-endpoints")) }
	testbed.Until(t, "nothing to be wrong", func() error {
		if r := ask(); len(r.Problems) > 0 || len(r.Nodes) != 1 || r.Nodes[0].Programmed == nil {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})

	client := c.network.Outside("client")
	manifest := strings.NewReplacer("SILENT", client.Addr4().String(), "SERVER", c.server.Addr4().String()).
		Replace(mustRead(t, "testdata/wrong.yaml"))
	apply := c.on(c.server, process.Program("kubectl"), "apply", "-f", "-")
	apply.Stdin = strings.NewReader(manifest)
	process.Output(t, apply)
	want := []string{
		"service default/typo has no ready endpoint: connections are refused (no Pod has app=myapp (2 have app=MyApp))",
		"service default/ports: port 80 leads to port htpp, which none of its Pods has (they have http=9376)",
		"service default/number: port 80 leads to port 8080, which none of its Pods has (they have http=9376)",
		"service default/empty has no selector and no endpoints",
		"service default/balanced has no load balancer address",
		"service default/hand: its endpoint " + client.Addr4().
			String() +
			":81, written by hand, does not answer this machine: connect: connection refused",
		"pod default/loops: CrashLoopBackOff: ",
		"pod default/unplaced is Pending: ",
	}
	has := func(r report, line string) bool {
		return slices.ContainsFunc(r.Problems, func(p string) bool { return strings.HasPrefix(p, line) })
	}
	testbed.Until(t, "status to name what is wrong", func() error {
		r := ask()
		for _, line := range want {
			if !has(r, line) {
				return fmt.Errorf("no line %q among\n%s", line, strings.Join(r.Problems, "\n"))
			}
		}
		return nil
	})
	r := ask()
	if has(r, "service default/hand: its endpoint "+c.server.Addr4().String()) {
		t.Errorf("an endpoint that answers is named: %q", r.Problems)
	}
	if r := c.status(c.fairlead(c.server, "status", "-o", "json", "--probe-endpoints=false")); has(r, "service default/hand") {
		t.Errorf("probed in spite of the flag: %q", r.Problems)
	}

	c.stories()
	c.explains()
	c.counts()
	c.traces()
	c.plans()
	c.page()

	local := func(args ...string) *exec.Cmd {
		cmd := c.node.Command(t.Context(), process.Program("fairlead"), append([]string{"status", "--data-dir", c.path("agent")}, args...)...)
		cmd.Env = append(os.Environ(), "HOME="+c.path("none"), "KUBECONFIG=")
		return cmd
	}
	r = c.status(local("-o", "json"))
	if r.Node != c.node.Name() || r.Healthz != "healthy" || len(r.Nodes) != 1 || r.Nodes[0].Programmed == nil ||
		r.Nodes[0].Programmed.Mode != "nft" || r.Nodes[0].Programmed.ServicePorts == 0 {
		t.Errorf("the node's view: %+v", r)
	}
	if has(r, "service default/ports: port") { // which takes the Pods of all nodes to know
		t.Errorf("the node's view has the problems %q", r.Problems)
	}
	testbed.Until(t, "the node's own Pod in its view", func() error {
		if r := c.status(local("-o", "json")); !has(r, "pod default/loops: CrashLoopBackOff: ") {
			return fmt.Errorf("%q", r.Problems)
		}
		return nil
	})
	if table := process.Output(t, local()); !strings.Contains(table, "VIEW OF") || !strings.Contains(table, "healthy") {
		t.Errorf("the node's view as a table:\n%s", table)
	}
	c.api.Stop()
	if r = c.status(
		local("-o", "json"),
	); !has(r, "the server does not answer this node: ") || len(r.Nodes) != 1 ||
		r.Nodes[0].Programmed == nil {
		t.Errorf("the node's view without a server: %+v", r)
	}
	c.agent.Stop()
	if r = c.status(local("-o", "json")); !has(r, "the agent of this node does not run") {
		t.Errorf("the node's view without an agent: %+v", r)
	}
	c.api.Start(t) // for the clean-up
	c.api.AwaitReady(t)
}

func mustRead(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
