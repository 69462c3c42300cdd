package controller

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// statusOf creates Services, one after the other, and returns a function that does and
// takes the time from the request until a watch shows an address, as that of
// kubectl wait would.
func (r *rig) statusOf(ctx context.Context) (create func(i int) time.Duration) {
	r.Helper()
	r.withPools("198.18.0.0/15")
	w, err := r.client.CoreV1().Services("default").Watch(ctx, metav1.ListOptions{})
	r.must(err)
	r.Cleanup(w.Stop)
	return func(i int) time.Duration {
		r.Helper()
		name, begin := fmt.Sprint("s", i), time.Now()
		r.service(name)
		timeout := time.After(time.Minute)
		for {
			select {
			case e, open := <-w.ResultChan():
				if !open {
					r.Fatal("the watch has ended")
				}
				if s, ok := e.Object.(*corev1.Service); ok && s.Name == name && published(s) != "" {
					return time.Since(begin)
				}
			case <-timeout:
				r.Fatalf("%s has no address after a minute", name)
			}
		}
	}
}

// Addresses follow what a watch shows, and wait for nothing periodic: of nine Services
// at least five have theirs long before anything is looked at again (foreignPeriod is the shortest).
func TestStatusFollowsCreation(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	create := r.statusOf(t.Context())
	var took []time.Duration
	for i := range 9 {
		took = append(took, create(i))
	}
	slices.Sort(took)
	t.Logf("from create to status: %s to %s", took[0], took[8])
	if took[4] > foreignPeriod/3 {
		t.Errorf("the median is %s", took[4])
	}
}

// BenchmarkCreateToStatus measures from the request that creates a Service until a watch
// shows its address.
func BenchmarkCreateToStatus(b *testing.B) {
	r := newRig(b)
	create := r.statusOf(b.Context())
	var took []time.Duration
	for i := 0; b.Loop(); i++ {
		took = append(took, create(i))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
}
