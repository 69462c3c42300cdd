package node

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// A program that was there first becomes an endpoint, goes and comes with what its check
// says, through an agent that is killed, and outlives its registration.
func TestRegisteredProgram(t *testing.T) {
	t.Parallel()
	services := t.TempDir()
	c := newCluster(t, "--services-dir", services)
	start := func() *process.Process { return process.Start(t, c.on(c.node, process.Program("backend"))) }
	program := start()
	register := func(args ...string) string {
		return process.Output(t, c.fairlead(c.server, append([]string{"register", "--node", c.node.Name(), "--name", "my-app"}, args...)...))
	}
	flags := []string{"-l", "app=MyApp", "-p", "http=9376", "--ready", "http://:9376/healthz", "--timeout", "2m"}
	if out := register(flags...); !strings.Contains(out, "my-app registered on node node as pod my-app-node") ||
		!strings.Contains(out, "my-app is ready at "+c.node.Addr4().String()) {
		t.Errorf("fairlead register says %q", out)
	}
	if out := register(flags...); !strings.Contains(out, "registered already") {
		t.Errorf("the same again: %q", out)
	}
	if out := c.kubectl("get", "pods"); !strings.Contains(out, "Registered") {
		t.Errorf("kubectl get pods does not say what it is:\n%s", out)
	}
	c.kubectl("apply", "-f", "../../examples/my-service.yaml")
	ip := c.kubectl("get", "svc", "my-service", "-o", "jsonpath={.spec.clusterIP}")
	at := netip.AddrPortFrom(netip.MustParseAddr(ip), 80)
	answers := func(what string) {
		t.Helper()
		testbed.Until(t, what, func() error { return c.ask(at) })
	}
	silent := func(what string) {
		t.Helper()
		testbed.Until(t, what, func() error {
			out := c.kubectl("get", "endpointslices", "-l", "kubernetes.io/service-name=my-service",
				"-o", "jsonpath={.items[*].endpoints[*].conditions.ready}")
			if err := c.ask(at); err == nil || strings.Contains(out, "true") {
				return errors.New("it is an endpoint: " + out)
			}
			return nil
		})
	}
	answers("an answer")

	program.Kill()
	silent("the end of its endpoint after a crash")
	program = start()
	answers("an answer after its restart")

	c.agent.Kill()
	c.startAgent()
	c.agentUp()
	answers("an answer after the agent's restart")
	program.Kill()
	silent("the end of its endpoint with the second agent")
	start()
	answers("an answer with the second agent")

	c.kubectl("drain", c.node.Name(), "--force", "--timeout", "60s")
	silent("the end of its endpoint after a drain")
	c.kubectl("uncordon", c.node.Name())
	answers("an answer after the node was uncordoned")

	for _, args := range [][]string{{"logs", "my-app-node"}, {"exec", "my-app-node", "--", "true"}} {
		if out, err := c.try(args...); err == nil || !strings.Contains(out+err.Error(), "the node does not start") {
			t.Errorf("kubectl %s: %v, %s", args[0], err, out)
		}
	}
	process.Output(t, c.fairlead(c.server, "deregister", "my-app", "--node", c.node.Name()))
	silent("the end of its endpoint")
	process.Output(t, c.on(c.node, "curl", "-sSf", "--max-time", "30", "http://"+c.node.Addr4().String()+":9376/healthz"))
	out, err := process.Try(c.fairlead(c.server, "deregister", "my-app", "--node", c.node.Name()))
	if err == nil || !strings.Contains(out, "my-app is not registered on node node in namespace default") {
		t.Errorf("deregister of nothing: %v, %q", err, out)
	}

	// The same by a file of the node, where an administrator lets nodes do that.
	text := "name: my-app\nlabels: {app: MyApp}\nports: [http=9376]\nready: http://:9376/healthz\n"
	if err := os.WriteFile(filepath.Join(services, "my-app.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	const remedy = "kubectl create rolebinding nodes-register --namespace default --clusterrole system:node-registrar --group system:nodes"
	c.agent.Says(remedy)
	onNode := func(args ...string) (string, error) {
		cmd := c.fairlead(c.node, append(args, "--data-dir", c.path("agent"))...)
		cmd.Env = append(cmd.Env, "KUBECONFIG=")
		return process.Try(cmd)
	}
	byAgent := []string{"register", "--name", "other", "-l", "app=MyApp", "-p", "http=9376", "--timeout", "2m"}
	if out, err := onNode(byAgent...); err == nil || !strings.Contains(out, remedy) {
		t.Errorf("register on the node without the right: %v, %s", err, out)
	}
	c.kubectl(strings.Fields(remedy)[1:]...)
	answers("an answer of the file's program")
	if err := os.Remove(filepath.Join(services, "my-app.yaml")); err != nil {
		t.Fatal(err)
	}
	silent("the end of its endpoint without the file")

	// The command on the node does that, too.
	if out, err := onNode(byAgent...); err != nil || !strings.Contains(out, "other registered on node node as pod other-node, by ") ||
		!strings.Contains(out, "other is ready at "+c.node.Addr4().String()) {
		t.Errorf("register on the node: %v, %s", err, out)
	}
	answers("an answer of the program that the node has registered")
	if out, err := onNode(byAgent...); err != nil || !strings.Contains(out, "other is registered already") {
		t.Errorf("the same again: %v, %s", err, out)
	}
	if out, err := onNode("deregister", "other"); err != nil || !strings.Contains(out, "other is no longer registered on node node") {
		t.Errorf("deregister on the node: %v, %s", err, out)
	}
	silent("the end of its endpoint after deregister on the node")
	if left, err := os.ReadDir(services); err != nil || len(left) > 0 {
		t.Errorf("left in the directory: %v, %v", left, err)
	}
}
