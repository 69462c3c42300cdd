package controller

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/controller/kittest"
)

// Two Pods that want one port of the node go to two nodes; the third waits with the
// reason, and gets the node of the first when that has ended. Other ports, protocols and
// addresses are no conflict.
func TestHostPorts(t *testing.T) {
	r := newRig(t)
	ns, ctx := r.namespace("ports"), context.Background()
	r.node("n0")
	r.node("n1")
	r.run(Options{Controllers: []string{SchedulerName}})
	make := func(name string, port corev1.ContainerPort) {
		t.Helper()
		p := kittest.Pod(ns, name, "web", "")
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{port}
		_, err := r.client.CoreV1().Pods(ns).Create(ctx, p, metav1.CreateOptions{})
		r.must(err)
	}
	nodeOf := func(name string) string {
		p, err := r.client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
		r.must(err)
		return p.Spec.NodeName
	}
	bound := func(name string) {
		t.Helper()
		r.eventually(name+" is bound", func() error {
			if nodeOf(name) == "" {
				return errors.New("no node")
			}
			return nil
		})
	}
	web := corev1.ContainerPort{ContainerPort: 80, HostPort: 80}
	make("a", web)
	bound("a")
	make("b", web)
	bound("b")
	if nodeOf("a") == nodeOf("b") {
		t.Errorf("both on %s", nodeOf("a"))
	}
	make("c", web)
	r.eventually("c waits with the reason", func() error {
		p, err := r.client.CoreV1().Pods(ns).Get(ctx, "c", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && strings.Contains(c.Message, "2 node(s) didn't have free ports for the requested pod ports") {
				return nil
			}
		}
		return fmt.Errorf("conditions %v", p.Status.Conditions)
	})
	udp, one, other := web, web, web
	udp.Protocol = corev1.ProtocolUDP
	one.HostPort, one.HostIP = 81, "127.0.0.1"
	other.HostPort, other.HostIP = 81, "127.0.0.2"
	make("udp", udp)
	make("one", one)
	make("other", other)
	for _, name := range []string{"udp", "one", "other"} {
		bound(name)
	}
	was := nodeOf("a")
	r.must(r.client.CoreV1().Pods(ns).Delete(ctx, "a", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
	bound("c")
	if nodeOf("c") != was {
		t.Errorf("c is on %s, want %s, where the port is free", nodeOf("c"), was)
	}
}
