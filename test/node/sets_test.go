package node

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// newPair is a cluster of two nodes, "node" and "other".
func newPair(t *testing.T) (c *cluster, other *testbed.Host) {
	t.Helper()
	c = newCluster(t)
	other = c.network.Outside("other")
	other.Sysctl("net/ipv4/ip_forward", "1")
	c.cleansUp(other, "other")
	c.agentOn(other, "other")
	c.nodesReady(2)
	return c, other
}

// says runs kubectl and wants its output to contain some texts.
func (c *cluster) says(args string, want ...string) string {
	c.t.Helper()
	out := c.kubectl(strings.Fields(args)...)
	for _, w := range want {
		if !strings.Contains(out, w) {
			c.t.Errorf("kubectl %s: no %q in\n%s", args, w, out)
		}
	}
	return out
}

// becomes waits until the output of kubectl is the wanted one.
func (c *cluster) becomes(want string, args ...string) {
	c.t.Helper()
	testbed.Until(c.t, strings.Join(args, " ")+" to be "+want, func() error {
		if out, err := c.try(args...); err != nil || out != want {
			return fmt.Errorf("%q, %w", out, err)
		}
		return nil
	})
}

// What people do with sets, by kubectl, with real Pods on two nodes.
func TestSets(t *testing.T) {
	t.Parallel()
	c, _ := newPair(t)
	c.kubectl("create", "deployment", "web", "--image=host", "--replicas=3", "--", "sleep", "600")
	c.says("rollout status deployment/web --timeout=60s", "successfully rolled out")
	c.says("get deployment web", "READY", "UP-TO-DATE", "AVAILABLE", "3/3")
	testHealing(c)
	testRollout(c)
	testScaling(c)
	testDaemonSet(c)
	testDrain(c)
	testRunSets(c)
	c.kubectl("delete", "deployment", "web", "--cascade=foreground", "--timeout=60s")
	c.becomes("", "get", "replicasets,pods", "-l", "app=web", "-o", "name")
}

// A Pod that is deleted, and one that is taken out of the set by its label, are replaced.
func testHealing(c *cluster) {
	c.t.Helper()
	pods := strings.Fields(c.kubectl("get", "pods", "-o", "name"))
	if len(pods) != 3 {
		c.t.Fatalf("Pods: %v", pods)
	}
	c.kubectl("delete", pods[0], "--wait=false", "--grace-period=1")
	c.kubectl("label", pods[1], "app-")
	c.becomes("3", "get", "deployment", "web", "-o", "jsonpath={.status.readyReplicas}")
	testbed.Until(c.t, "two Pods in the place of two", func() error {
		out := c.kubectl("get", "pods", "-l", "app=web", "-o", "name")
		if strings.Contains(out, pods[0]) || strings.Contains(out, pods[1]) || len(strings.Fields(out)) != 3 {
			return errors.New(out)
		}
		return nil
	})
	if owner := c.kubectl("get", pods[1], "-o", "jsonpath={.metadata.ownerReferences}"); owner != "" {
		c.t.Errorf("the Pod without the label still belongs to %s", owner)
	}
	// With its label it is adopted, and one is too many then.
	c.kubectl("label", pods[1], "app=web")
	c.becomes("3", "get", "deployment", "web", "-o", "jsonpath={.status.replicas}")
	testbed.Until(c.t, "three Pods again", func() error {
		if out := c.kubectl("get", "pods", "-o", "name"); len(strings.Fields(out)) != 3 {
			return errors.New(out)
		}
		return nil
	})
}

// Revisions, by kubectl rollout.
func testRollout(c *cluster) {
	c.t.Helper()
	c.kubectl("set", "env", "deployment/web", "VERSION=2")
	c.says("rollout status deployment/web --timeout=60s", "successfully rolled out")
	c.kubectl("annotate", "deployment/web", "kubernetes.io/change-cause=two")
	c.becomes("2", "get", "deployment", "web", "-o", `jsonpath={.metadata.annotations.deployment\.kubernetes\.io/revision}`)
	testbed.Until(c.t, "the cause in the history", func() error {
		if out := c.kubectl("rollout", "history", "deployment/web"); !strings.Contains(out, "two") {
			return errors.New(out)
		}
		return nil
	})
	c.says("rollout history deployment/web --revision=2", "VERSION:", "2")
	c.kubectl("rollout", "undo", "deployment/web")
	c.says("rollout status deployment/web --timeout=60s", "successfully rolled out")
	testbed.Until(c.t, "the end of the Pods of revision 2", func() error {
		if out := c.kubectl("get", "pods", "-o", "yaml"); strings.Contains(out, "VERSION") {
			return errors.New("Pods have the variable of revision 2")
		}
		return nil
	})
	c.kubectl("rollout", "pause", "deployment/web")
	c.kubectl("set", "env", "deployment/web", "VERSION=4")
	c.kubectl("rollout", "resume", "deployment/web")
	c.says("rollout status deployment/web --timeout=60s", "successfully rolled out")
	c.kubectl("rollout", "restart", "deployment/web")
	c.says("rollout status deployment/web --timeout=60s", "successfully rolled out")
}

func testScaling(c *cluster) {
	c.t.Helper()
	c.kubectl("scale", "deployment/web", "--replicas=1", "--current-replicas=3")
	c.becomes("1 1", "get", "deployment", "web", "-o", "jsonpath={.status.replicas} {.status.availableReplicas}")
	if out, err := c.try("scale", "deployment/web", "--replicas=2", "--current-replicas=3"); err == nil {
		c.t.Errorf("scaled although there is another number of replicas: %s", out)
	}
}

const daemonSet = `apiVersion: apps/v1
kind: DaemonSet
metadata: {name: agent}
spec:
  selector: {matchLabels: {app: agent}}
  template:
    metadata: {labels: {app: agent}}
    spec: {containers: [{name: agent, image: host, command: [sleep, "600"]}]}
`

// One Pod on each node, also on one that comes to suit it, and updates node by node.
func testDaemonSet(c *cluster) {
	c.t.Helper()
	file := c.path("daemonset.yaml")
	if err := os.WriteFile(file, []byte(daemonSet), 0o600); err != nil {
		c.t.Fatal(err)
	}
	nodes := func(want string) {
		c.t.Helper()
		testbed.Until(c.t, "Pods on "+want, func() error {
			out := strings.Fields(c.kubectl("get", "pods", "-l", "app=agent", "-o", "jsonpath={.items[*].spec.nodeName}"))
			if slices.Sort(out); strings.Join(out, " ") != want {
				return fmt.Errorf("on %s", out)
			}
			return nil
		})
	}
	c.kubectl("apply", "-f", file)
	c.says("rollout status daemonset/agent --timeout=60s", "successfully rolled out")
	nodes("node other")
	c.kubectl("taint", "node", "other", "dedicated=x:NoExecute")
	nodes("node")
	c.kubectl("taint", "node", "other", "dedicated-")
	nodes("node other")
	c.kubectl("set", "env", "daemonset/agent", "VERSION=2")
	c.says("rollout status daemonset/agent --timeout=60s", "successfully rolled out")
	c.says("rollout history daemonset/agent", "REVISION", "1", "2")
	c.kubectl("rollout", "undo", "daemonset/agent")
	c.says("rollout status daemonset/agent --timeout=60s", "successfully rolled out")
	if out := c.kubectl("get", "daemonset", "agent", "-o", "yaml"); strings.Contains(out, "VERSION") {
		c.t.Errorf("after undo:\n%s", out)
	}
}

// A node is drained one Pod at a time as the budget asks for, and each is replaced before
// the next one goes.
func testDrain(c *cluster) {
	c.t.Helper()
	c.kubectl("scale", "deployment/web", "--replicas=4")
	c.says("rollout status deployment/web --timeout=60s", "successfully rolled out")
	c.kubectl("create", "poddisruptionbudget", "web", "--selector=app=web", "--min-available=4")
	c.becomes("0", "get", "pdb", "web", "-o", "jsonpath={.status.disruptionsAllowed}")
	if out, err := c.try("drain", "other", "--ignore-daemonsets", "--force", "--timeout=1s"); err == nil ||
		!strings.Contains(err.Error(), "violate the pod's disruption budget") {
		c.t.Errorf("drained against the budget: %v %s", err, out)
	}
	c.kubectl("delete", "pdb", "web")
	c.kubectl("create", "poddisruptionbudget", "web", "--selector=app=web", "--min-available=3")
	watch := process.Start(c.t, c.on(c.server, process.Program("kubectl"), "get", "deployment", "web", "--watch-only",
		"-o", `jsonpath={.status.availableReplicas}{"\n"}`))
	c.says("drain other --ignore-daemonsets --force --timeout=90s", "node/other drained")
	c.becomes("node node node node", "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].spec.nodeName}")
	for n := range strings.FieldsSeq(watch.Log()) {
		if n < "3" {
			c.t.Errorf("only %s Pods were available", n)
		}
	}
	watch.Kill()
	c.kubectl("uncordon", "other")
}

// Sets by fairlead's own commands.
func testRunSets(c *cluster) {
	c.t.Helper()
	run := func(args ...string) string {
		c.t.Helper()
		return process.Output(c.t, c.fairlead(c.server, args...))
	}
	create := []string{"run", "--name", "shop", "--replicas", "2", "--workdir", "/", "--grace", "2s", "--cpu", "10m", "-e", "VERSION=1", "--"}
	if out := run(append(slices.Insert(slices.Clone(create), 1, "--dry-run"), "true")...); !strings.Contains(out, "kind: Deployment") {
		c.t.Errorf("--dry-run prints\n%s", out)
	}
	command := []string{"sh", "-c", "echo version $VERSION; exec sleep 600"}
	run(append(create, command...)...)
	create[slices.Index(create, "VERSION=1")] = "VERSION=2"
	run(append(create, command...)...)
	if out := run("ps"); !strings.Contains(out, "shop") || !strings.Contains(out, "2/2") {
		c.t.Errorf("fairlead ps prints\n%s", out)
	}
	testbed.Until(c.t, "the Pods of the second command alone", func() error {
		if out := run("logs", "shop"); strings.Count(out, "version 2") != 2 || strings.Contains(out, "version 1") {
			return errors.New(out)
		}
		return nil
	})
	nodes := strings.Fields(c.kubectl("get", "pods", "-l", "app=shop", "-o", "jsonpath={.items[*].spec.nodeName}"))
	if slices.Sort(nodes); !slices.Equal(nodes, []string{"node", "other"}) {
		c.t.Errorf("two Pods with the same labels are on %s", nodes)
	}
	run("scale", "shop", "1")
	run("restart", "shop")
	run("rm", "shop")
	c.becomes("", "get", "deployments,pods", "-l", "app=shop", "-o", "name")
}
