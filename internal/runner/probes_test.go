package runner_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func TestReadiness(t *testing.T) {
	c := newCluster(t, nil)
	dir := t.TempDir()
	p := pod("web", "exec sleep 600")
	p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{
		ProbeHandler:  corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"test", "-e", filepath.Join(dir, "ok")}}},
		PeriodSeconds: 1, FailureThreshold: 1,
	}
	c.create(p)
	got := c.until("web", "running", func(p *corev1.Pod) bool { return status(p).State.Running != nil })
	if isReady(got) || condition(got, corev1.ContainersReady).Reason != "ContainersNotReady" {
		t.Errorf("ready too early: %+v", got.Status)
	}
	if err := os.WriteFile(filepath.Join(dir, "ok"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c.ready("web")
	if err := os.Remove(filepath.Join(dir, "ok")); err != nil {
		t.Fatal(err)
	}
	got = c.until("web", "unready", func(p *corev1.Pod) bool { return !isReady(p) })
	if status(got).RestartCount != 0 {
		t.Error("an unready container was restarted")
	}
	await(t, "the event", func() bool { return strings.Contains(c.events("web"), "Unhealthy: Readiness probe failed") })
}

func TestHTTPAndTCPProbes(t *testing.T) {
	c := newCluster(t, nil)
	web := server("web")
	start := time.Now()
	web.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}
	web.Spec.Containers[0].ReadinessProbe.HTTPGet.Port = intstr.FromString("http")
	web.Spec.Containers[0].StartupProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(8080)}},
	}
	c.create(web)
	got := c.ready("web")
	// Probes have a period of 10 s: eager questions must not wait for it.
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("ready after %v", d)
	}
	if !*status(got).Started {
		t.Errorf("status %+v", status(got))
	}
}

func TestLivenessRestarts(t *testing.T) {
	c := newCluster(t, nil)
	dir := t.TempDir()
	p := pod("sick", fmt.Sprintf("touch %s/alive; sleep 0.3; rm %s/alive; exec sleep 600", dir, dir))
	p.Spec.Containers[0].LivenessProbe = &corev1.Probe{
		ProbeHandler:  corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"test", "-e", dir + "/alive"}}},
		PeriodSeconds: 1, FailureThreshold: 1,
	}
	c.create(p)
	got := c.until("sick", "restarted", restarted(1))
	if last := status(got).LastTerminationState.Terminated; last == nil || last.Signal != 15 {
		t.Errorf("the first run: %+v, want ended by SIGTERM", last)
	}
	await(t, "the events", func() bool {
		e := c.events("sick")
		return strings.Contains(e, "Unhealthy: Liveness probe failed") &&
			strings.Contains(e, "Killing: Container main failed liveness probe, will be restarted")
	})
}

func TestStartupProbeFails(t *testing.T) {
	c := newCluster(t, nil)
	p := pod("slow", "exec sleep 600")
	p.Spec.Containers[0].StartupProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"false"}}}, PeriodSeconds: 1, FailureThreshold: 1,
	}
	c.create(p)
	got := c.until("slow", "restarted", restarted(1))
	if isReady(got) {
		t.Error("ready without having started")
	}
}

// A Pod that serves gRPC is ready while its health service says so.
func TestGRPCProbe(t *testing.T) {
	c := newCluster(t, nil)
	web := server("web")
	web.Spec.Containers[0].Env[0].Value = "grpc"
	web.Spec.Containers[0].ReadinessProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: 8080}}, PeriodSeconds: 1, FailureThreshold: 1, TimeoutSeconds: 10,
	}
	c.create(web)
	got := c.ready("web")
	if err := c.record(got, 0).Process.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	c.until("web", "unready", func(p *corev1.Pod) bool { return !isReady(p) })
	await(t, "the event", func() bool { return strings.Contains(c.events("web"), "NOT_SERVING") })
}
