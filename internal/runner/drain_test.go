package runner_test

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/runner"
)

// A pod behind a Service lives on, and its preStop hook waits, until no node sends it new
// connections; without an answer half of its grace period is left to it. Others do not wait.
func TestDrain(t *testing.T) {
	c := newCluster(t, func(o *runner.Options) { o.DrainWait = time.Hour })
	services := c.client.CoreV1().Services("default")
	if _, err := services.Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "drains"},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"drains": "yes"}, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = services.Delete(context.Background(), "drains", metav1.DeleteOptions{}) })
	start := func(name string, grace int64, selected bool) *corev1.Pod {
		t.Helper()
		p := pod(name, "trap 'exit 7' TERM; while :; do sleep 0.01; done")
		p.Spec.TerminationGracePeriodSeconds = &grace
		if selected {
			p.Labels["drains"] = "yes"
		}
		c.create(p)
		return c.ready(name)
	}
	waits, short, now := start("waits", 600, true), start("short", 2, true), start("now", 600, true)
	start("other", 600, false)

	c.delete("other", metav1.DeleteOptions{})
	c.untilGone("other")
	process := c.record(now, 0).Process // the record goes with the Pod
	c.delete("now", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
	await(t, "the end of the process", func() bool { return !process.Alive() })

	c.delete("waits", metav1.DeleteOptions{})
	begun := time.Now()
	c.delete("short", metav1.DeleteOptions{})
	await(t, "the end of the short wait", func() bool { return c.record(short, 0).Exited })
	if took, code := time.Since(begun), c.record(short, 0).ExitCode; took < time.Second || code != 7 {
		t.Errorf("a Pod with a grace period of 2 s ended after %s with %d, want SIGTERM after half of it", took, code)
	}
	await(t, "the Event of the short wait", func() bool { return strings.Contains(c.events("short"), "Warning NotDrained: ended after 1") })
	c.untilGone("short")
	if !c.record(waits, 0).Process.Alive() {
		t.Fatal("a Pod that nodes may still send connections to has ended")
	}
	p := c.get("waits")
	p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: barrier.Drained, Status: corev1.ConditionTrue})
	if _, err := c.client.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.untilGone("waits")
	if e := c.events("waits") + c.events("now") + c.events("other"); strings.Contains(e, "NotDrained") {
		t.Errorf("Events of Pods that no node sent connections to: %s", e)
	}
}
