package runner_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/fairlead/fairlead/internal/runner"
)

// agentEnv is how to reach the API server, and where the state is, for an agent in its own
// process.
const agentEnv = "RUNNER_TEST_AGENT"

type agentConfig struct {
	Host, Token, State string
	CA                 []byte
	ServerName         string
}

// runAsAgent is this test's program as an agent, until SIGTERM.
func runAsAgent() {
	var a agentConfig
	err := json.Unmarshal([]byte(os.Getenv(agentEnv)), &a)
	var client kubernetes.Interface
	if err == nil {
		client, err = kubernetes.NewForConfig(&rest.Config{
			Host: a.Host, BearerToken: a.Token, QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAData: a.CA, ServerName: a.ServerName},
		})
	}
	var r *runner.Runner
	if err == nil {
		o := options(client, a.State, os.Stderr)
		o.Hide = []string{filepath.Dir(o.StateDir)}
		r, err = runner.New(o)
	}
	if err == nil {
		ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer cancel()
		err = r.Run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// spawn starts an agent as a process; the function ends it by a signal.
func (c *cluster) spawn() func(syscall.Signal) {
	c.t.Helper()
	b, err := json.Marshal(agentConfig{
		Host: c.config.Host, Token: c.config.BearerToken, State: c.state, CA: c.config.CAData, ServerName: c.config.ServerName,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "RUNNER_TEST_SERVE=agent", agentEnv+"="+string(b))
	log := &logWriter{}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	ended := false
	end := func(s syscall.Signal) {
		if ended {
			return
		}
		ended = true
		_ = cmd.Process.Signal(s)
		if err := cmd.Wait(); s == syscall.SIGTERM && err != nil || c.t.Failed() {
			c.t.Errorf("the agent ended with %v: %s", err, log.text())
		}
	}
	c.t.Cleanup(func() { end(syscall.SIGKILL) })
	return end
}

// An agent is killed, and another one asked to end: the confined Pod of both goes on,
// confined and with its log, and belongs to the next one.
func TestConfinedPodsOutliveTheirAgent(t *testing.T) {
	armed(t)
	e := newEndpoint(t)
	e.stop()
	first := e.spawn()
	p := e.attack("restricted", func(p *corev1.Pod) {
		main := &p.Spec.Containers[0]
		main.Command = []string{"sh", "-c", "(" + look + ") > /opt/main; n=0; while :; do n=$((n+1)); echo line $n; sleep 0.02; done"}
		p.Spec.RestartPolicy = corev1.RestartPolicyAlways
	})
	await(t, "the Pod", func() bool { p = e.again(p); return isReady(p) })
	main := e.record(p, 0).Process
	grows := func(when string) {
		t.Helper()
		n := strings.Count(e.logOf(p, 0), "\n")
		await(t, "more of the log "+when, func() bool { return strings.Count(e.logOf(p, 0), "\n") > n+2 })
	}
	grows("at first")
	first(syscall.SIGKILL)
	grows("after the agent was killed")
	second := e.spawn()
	e.short("second", 1) // it is at work
	second(syscall.SIGTERM)
	grows("after the second agent")
	e.start()
	var out bytes.Buffer
	if err := e.execAt(p, remotecommand.StreamOptions{Stdout: &out}, "sh", "-c", look); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(e.state, "pods", string(p.UID), "volumes", "v", "main"))
	if err != nil || string(b) != out.String() || !strings.Contains(out.String(), "Seccomp:\t2") {
		t.Errorf("under the third agent a process of the Pod is\n%swant (%v)\n%s", out.String(), err, b)
	}
	if p = e.again(p); !isReady(p) || p.Status.ContainerStatuses[0].RestartCount != 0 || e.record(p, 0).Process != main {
		t.Errorf("the Pod is %+v", p.Status)
	}
}
