package apiserver_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// Creation with every write synced to disk, from ten clients at once per core.
// Expected: a Service costs about what two ConfigMaps cost, because the claim of
// its address is its own write.
func BenchmarkCreate(b *testing.B) {
	for name, create := range map[string]func(context.Context, *kubernetes.Clientset, string) error{
		"ConfigMap": func(ctx context.Context, c *kubernetes.Clientset, name string) error {
			_, err := c.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}},
				metav1.CreateOptions{})
			return err
		},
		"Service": func(ctx context.Context, c *kubernetes.Clientset, name string) error {
			_, err := c.CoreV1().Services("default").Create(ctx, &corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
			}, metav1.CreateOptions{})
			return err
		},
	} {
		b.Run(name, func(b *testing.B) {
			c := kubernetes.NewForConfigOrDie(apiservertest.Start(b, func(o *apiserver.Options) { o.UnsafeNoFsync = false }))
			var n atomic.Int64
			b.SetParallelism(10)
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if err := create(b.Context(), c, fmt.Sprintf("x-%d", n.Add(1))); err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
		})
	}
}
