package sched

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestHostPortsConflict(t *testing.T) {
	a := hostPort{"", corev1.ProtocolTCP, 80}
	for _, c := range []struct {
		b    hostPort
		want bool
	}{
		{a, true}, {hostPort{"10.0.0.1", corev1.ProtocolTCP, 80}, true}, {hostPort{"", corev1.ProtocolUDP, 80}, false},
		{hostPort{"", corev1.ProtocolTCP, 81}, false},
	} {
		if a.conflicts(c.b) != c.want || c.b.conflicts(a) != c.want {
			t.Errorf("%v and %v: want %v", a, c.b, c.want)
		}
	}
}
