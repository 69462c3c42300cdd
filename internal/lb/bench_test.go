package lb

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BenchmarkCreateToStatus measures from the request that creates a Service until a watch
// shows its address.
func BenchmarkCreateToStatus(b *testing.B) {
	r := newRig(b)
	r.withPools("10.0.0.0/8")
	w, err := r.client.CoreV1().Services("default").Watch(b.Context(), metav1.ListOptions{})
	r.must(err)
	defer w.Stop()
	for i := 0; b.Loop(); i++ {
		name := fmt.Sprintf("s%d", i)
		r.service(name)
		for e := range w.ResultChan() {
			if s, ok := e.Object.(*corev1.Service); ok && s.Name == name && len(s.Status.LoadBalancer.Ingress) > 0 {
				break
			}
		}
	}
}
