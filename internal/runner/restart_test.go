package runner_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/testbed"
)

// The agent goes and comes: the same processes, no restart, no moment unready.
func TestAgentComesBack(t *testing.T) {
	c := newCluster(t, nil)
	c.create(server("web"))
	before := c.ready("web")
	st := c.record(before, 0)
	c.create(pod("short", "sleep 0.5; exit 0"))
	c.ready("short")
	c.stop()
	if !st.Process.Alive() {
		t.Fatal("the process died with the agent")
	}
	watch, err := c.client.CoreV1().Pods("default").Watch(t.Context(),
		metav1.ListOptions{FieldSelector: "metadata.name=web", ResourceVersion: before.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	c.start()
	c.until("short", "restarted", restarted(1)) // containers that ended without the agent are followed up
	if after := c.record(before, 0); after.Process != st.Process || !st.Process.Alive() {
		t.Errorf("process %v, then %v", st.Process, after.Process)
	}
	for done := false; !done; {
		select {
		case e := <-watch.ResultChan():
			if p, ok := e.Object.(*corev1.Pod); ok && (!isReady(p) || status(p).RestartCount != 0) {
				t.Errorf("seen unready or restarted: %+v", p.Status)
			}
		default:
			done = true
		}
	}
	// The pod can still be reached by logs, exec and the end.
	c.delete("web", metav1.DeleteOptions{})
	c.untilGone("web")
	if st.Process.Alive() {
		t.Error("the process outlives the pod")
	}
}

// A pod whose object went while the agent was away is ended.
func TestOrphan(t *testing.T) {
	c := newCluster(t, nil)
	c.create(pod("gone", "trap 'exit 0' TERM; while :; do sleep 0.02; done"))
	got := c.ready("gone")
	main := c.record(got, 0).Process
	c.stop()
	c.delete("gone", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
	c.start()
	await(t, "the end of the orphan", func() bool { return !main.Alive() })
	await(t, "the end of its state", func() bool {
		_, err := os.Stat(filepath.Join(c.state, "pods", string(got.UID)))
		return os.IsNotExist(err)
	})
}

// The shim is killed, with the agent there and with it away: the container
// counts as dead, nothing of it is left, and it is started again.
func TestShimKilled(t *testing.T) {
	c := newCluster(t, nil)
	c.create(pod("web", "sleep 600 & exec sleep 600"))
	kill := func(away bool, n int32) {
		p := c.until("web", "ready", func(p *corev1.Pod) bool { return isReady(p) && status(p).RestartCount == n })
		st := c.record(p, int(n))
		// Later the number of the namespace may be reused.
		var processes []process.ID
		await(t, "both processes of the container", func() bool {
			processes = process.InMountNamespace(st.MountNS)
			return len(processes) == 2
		})
		id, err := (shim.Client{Dir: filepath.Join(c.state, "pods", string(p.UID))}).Process(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if away {
			c.stop()
		}
		if err := id.Signal(9); err != nil {
			t.Fatal(err)
		}
		await(t, "the shim's end", func() bool { return !id.Alive() })
		if away {
			c.start()
		}
		p = c.until("web", "restarted", func(p *corev1.Pod) bool { return isReady(p) && status(p).RestartCount == n+1 })
		if last := status(p).LastTerminationState.Terminated; last == nil || last.ExitCode != 137 {
			t.Errorf("the last run: %+v, want exit code 137", last)
		}
		for _, left := range processes {
			if left.Alive() {
				t.Errorf("left of the last run: %v", left)
			}
		}
	}
	kill(false, 0)
	kill(true, 1)
}

// StopPods ends all pods together, and nothing stays behind.
func TestStopPods(t *testing.T) {
	c := newCluster(t, func(o *runner.Options) {
		o.StopPods, o.StopTimeout = true, time.Second
	})
	var mains []process.ID
	for i := range 3 {
		name := fmt.Sprint("p", i)
		script := "trap 'exit 0' TERM; echo up; while :; do sleep 0.02; done"
		if i == 0 {
			script = "trap '' TERM; echo up; while :; do sleep 0.02; done"
		}
		c.create(pod(name, script))
		p := c.ready(name)
		await(t, "the trap", func() bool { return strings.Contains(c.logOf(p, 0), "up") })
		mains = append(mains, c.record(p, 0).Process)
	}
	start := time.Now()
	c.stop()
	if d := time.Since(start); d > 8*time.Second {
		t.Errorf("stopped after %v", d)
	}
	for _, m := range mains {
		if m.Alive() {
			t.Errorf("process %d lives", m.Pid)
		}
	}
	if d, err := link.Devices(); err != nil || len(d) != 0 {
		t.Errorf("devices left: %v, %v", d, err)
	}
	c.change = nil
	c.start()
	p := c.until("p1", "running again", func(p *corev1.Pod) bool { return isReady(p) && status(p).RestartCount == 1 })
	if p.Status.PodIP == "" {
		t.Error("no address")
	}
}

func TestTwoAgentsOneDirectory(t *testing.T) {
	c := newCluster(t, nil)
	r, err := runner.New(runner.Options{Client: c.client, NodeName: nodeName, StateDir: c.state})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	if err := r.Run(ctx); err == nil || !strings.Contains(err.Error(), "in use by another") {
		t.Errorf("a second agent: %v", err)
	}
}

// A directory that no agent made is left as it is.
func TestCleanupLeavesOtherDirectories(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "pods", "mine")
	if err := errors.Join(os.Mkdir(filepath.Dir(file), 0o700), os.WriteFile(file, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	done := false
	err := runner.Cleanup(t.Context(), dir, func() error { done = true; return nil })
	if !done || err == nil || !strings.Contains(err.Error(), "was not made by an agent") {
		t.Errorf("Cleanup = %v", err)
	}
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
}

// Beside a running agent Cleanup changes nothing.
func TestCleanupBesideAnAgent(t *testing.T) {
	c := newCluster(t, nil)
	c.create(server("web"))
	p := c.ready("web")
	removed := false
	err := runner.Cleanup(t.Context(), c.state, func() error { removed = true; return runner.RemoveNetwork() })
	if !errors.Is(err, runner.ErrRunning) || removed {
		t.Errorf("Cleanup = %v, other things removed: %v; want that an agent runs, and nothing removed", err, removed)
	}
	if d, err := link.Devices(); err != nil || len(d) != 1 || !c.record(p, 0).Process.Alive() {
		t.Errorf("devices %v, %v; the pod lives: %v", d, err, c.record(p, 0).Process.Alive())
	}
}

// A pod whose user namespace is not the agent's is started again: an agent without
// rights there could not give it a network.
func TestPodOfAnotherUserNamespace(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := newCluster(t, func(o *runner.Options) {
		o.ShimCommand = []string{"unshare", "--user", "--map-root-user", "--net", "--uts", "--ipc", "--mount", exe, "pod-shim"}
	})
	c.create(server("web"))
	p := c.ready("web")
	main := c.record(p, 0).Process
	c.stop()
	if !main.Alive() {
		t.Fatal("the pod ended with its agent")
	}
	c.change = nil
	start := time.Now()
	c.start()
	c.until("web", "running again", func(p *corev1.Pod) bool { return isReady(p) && status(p).RestartCount == 1 })
	t.Logf("ready again after %v", time.Since(start).Round(time.Millisecond))
	if main.Alive() {
		t.Error("the process of the earlier run lives")
	}
}
