package node

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// run is a fairlead command that succeeds.
func (s *setsCluster) run(args ...string) string {
	s.t.Helper()
	return process.Output(s.t, s.fairlead(s.server, args...))
}

// fails is a fairlead command that fails with an error.
func (s *setsCluster) fails(want string, args ...string) {
	s.t.Helper()
	if _, stderr, code := process.Result(s.t, s.fairlead(s.server, args...)); code != 1 || !strings.Contains(stderr, want) {
		s.t.Errorf("fairlead %q exits with %d and prints\n%s", args, code, stderr)
	}
}

// Sets by fairlead's own commands.
func testRunSets(s *setsCluster) {
	s.t.Helper()
	create := []string{"run", "--name", "shop", "--replicas", "2", "--workdir", "/", "--grace", "2s", "--cpu", "10m",
		"-e", "VERSION=1", "--"}
	if out := s.run(append(slices.Insert(slices.Clone(create), 1, "--dry-run"), "true")...); !strings.Contains(out, "kind: Deployment") {
		s.t.Errorf("--dry-run prints\n%s", out)
	}
	command := []string{"sh", "-c", "echo version $VERSION; exec sleep 600"}
	s.run(append(create, command...)...)
	create[slices.Index(create, "VERSION=1")] = "VERSION=2"
	s.run(append(create, command...)...)
	s.wantPods("shop", versionOf, "VERSION=2", "VERSION=2") // the old ones count when nodes are chosen, so that both may be on one
	// A Pod that has the set's label and is not the set's.
	s.kubectl("run", "stray", "--image=host", "--labels", "fairlead.dev/run=shop", "--command", "--", "sleep", "600")
	if out := s.run("ps"); !strings.Contains(out, "shop") || !strings.Contains(out, "2/2") {
		s.t.Errorf("fairlead ps prints\n%s", out)
	}
	if out := s.run("ps", "shop"); strings.Contains(out, "stray") || strings.Count(out, "shop-") != 2 {
		s.t.Errorf("fairlead ps shop prints\n%s", out)
	}
	testbed.Until(s.t, "the lines of both Pods", func() error {
		if out := s.run("logs", "shop"); strings.Count(out, ": version 2") != 2 || strings.Contains(out, "version 1") {
			return errors.New(out)
		}
		return nil
	})
	testInterrupts(s)
	s.fails("there is a deployment shop in namespace default", "run", "--name", "shop", "--every-node", "--", "sleep", "600")
	s.run("scale", "shop", "1")
	s.run("restart", "shop")
	testbed.Until(s.t, "lines without a name where there is one Pod", func() error {
		if out := s.run("logs", "shop"); out != "version 2" {
			return errors.New(out)
		}
		return nil
	})
	s.run("rm", "shop") // and not the Pod that is not the set's
	s.kubectl("delete", "pod", "stray", "--grace-period=1")
	s.until("the end of the set", func() error {
		if n := len(s.pods("shop")); n > 0 || !s.gone("shop") {
			return fmt.Errorf("%d Pods", n)
		}
		return nil
	})
}

// A command that is interrupted while it waits fails; a set goes on, bare Pods do not. With
// --detach there is no wait.
func testInterrupts(s *setsCluster) {
	s.t.Helper()
	never := []string{"--name", "never", "--grace", "1s", "--ready", "tcp://:9", "--", "sleep", "600"}
	interrupted := func(after, want string, args ...string) {
		s.t.Helper()
		p := process.Start(s.t, s.fairlead(s.server, append(args, never...)...))
		p.Says(after)
		p.Signal(os.Interrupt)
		if err := p.Wait(); err == nil {
			s.t.Errorf("fairlead %q was interrupted and exits with 0", args)
		}
		p.Says(want)
	}
	s.run(append([]string{"run", "-d", "--replicas", "1"}, never...)...)
	interrupted("deployment never applied", "interrupted; no longer waiting for deployment never", "run", "--replicas", "1")
	s.fails("there is a deployment never", append([]string{"run", "--every-node"}, never...)...)
	remove := metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationForeground)}
	s.must(s.client.AppsV1().Deployments(setsNamespace).Delete(s.t.Context(), "never", remove))
	interrupted("pod never-[^ ]+ created", `(?s)pod never-[^ ]+ deleted.*interrupted before pod never-`, "run")
}

// Pods of a Deployment whose machine is lost are replaced, and end when it is back; those of
// --every-node stay.
func testLostMachine(s *setsCluster) {
	s.t.Helper()
	command := []string{"--grace", "1s", "--workdir", "/", "--", "sleep", "600"}
	s.run(append([]string{"run", "--name", "each", "--every-node"}, command...)...)
	s.wantPods("each", nodeOf, "node", "other")
	s.run(append([]string{"run", "--name", "pair", "--replicas", "2"}, command...)...)
	s.wantPods("pair", nodeOf, "node", "other")
	each := s.pods("each")
	link := func(state string) {
		s.t.Helper()
		process.Output(s.t, s.other.Command(s.t.Context(), "ip", "link", "set", "eth0", state))
	}
	link("down")
	s.until("a Pod in the place of the lost one", func() error {
		on := map[string]int{}
		for _, p := range s.pods("pair") {
			if p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning {
				on[nodeOf(p)]++
			}
		}
		if on["node"] != 2 || on["other"] != 0 {
			return fmt.Errorf("Pods by node: %v", on)
		}
		return nil
	})
	link("up")
	s.wantPods("pair", nodeOf, "node", "node")
	s.wantPods("each", nodeOf, "node", "other")
	for _, p := range each {
		if !slices.ContainsFunc(s.pods("each"), func(now *corev1.Pod) bool { return now.UID == p.UID }) {
			s.t.Errorf("Pod %s of --every-node was replaced", p.Name)
		}
	}
	s.run("rm", "pair")
	s.run("rm", "each")
}
