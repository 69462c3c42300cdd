package runner_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Of two Pods of this node with one host port the second fails, as with a kubelet; others run. The port is free again when
// the first is gone, and held by it while the agent is away.
func TestSecondPodWithAHostPort(t *testing.T) {
	c := newCluster(t, nil)
	with := func(name, ip string, port int32, protocol corev1.Protocol) {
		p := pod(name, "exec sleep 1000")
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: port, HostIP: ip, Protocol: protocol}}
		c.create(p)
	}
	refused := func(name string, ports ...string) {
		t.Helper()
		got := c.until(name, "refused", phase(corev1.PodFailed))
		ok := false
		for _, port := range ports {
			want := "Pod was rejected: Predicate NodePorts failed: Pod default/first has " + port + " of the node"
			ok = ok || got.Status.Message == want
		}
		if got.Status.Reason != "NodePorts" || !ok {
			t.Errorf("%s: %s: %s", name, got.Status.Reason, got.Status.Message)
		}
		await(t, "the Event", func() bool { return strings.Contains(c.events(name), "NodePorts") })
	}
	with("first", "", 18080, corev1.ProtocolTCP)
	c.ready("first")
	with("second", "127.0.0.1", 18080, corev1.ProtocolTCP)
	refused("second", "TCP port 18080")
	with("udp", "", 18080, corev1.ProtocolUDP)
	with("address", "127.0.0.1", 18081, corev1.ProtocolTCP)
	c.ready("udp")
	c.ready("address")
	with("another", "127.0.0.2", 18081, corev1.ProtocolTCP)
	c.ready("another")
	c.stop()
	with("late", "::", 18080, corev1.ProtocolTCP)
	c.start()
	refused("late", "TCP port 18080")
	c.ready("first")
	c.delete("first", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
	with("next", "", 18080, corev1.ProtocolTCP)
	c.ready("next")
	for _, name := range []string{"udp", "address", "another", "next"} {
		if got := c.get(name); got.Status.Phase != corev1.PodRunning {
			t.Error(fmt.Sprint(name, ": ", got.Status))
		}
	}
}
