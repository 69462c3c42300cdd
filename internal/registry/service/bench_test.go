package service_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// BenchmarkServer creates Services, and ConfigMaps to compare with, through the
// whole server with a synced etcd. Compare within one run only; expected is that
// the number of Services that exist makes no difference.
func BenchmarkServer(b *testing.B) {
	config := rest.CopyConfig(apiservertest.Start(b, func(o *apiserver.Options) { o.UnsafeNoFsync = false }))
	config.QPS = -1
	config.ContentType = "application/vnd.kubernetes.protobuf"
	client := kubernetes.NewForConfigOrDie(config)
	ctx := context.Background()
	var serial atomic.Int64
	service := func() error {
		s := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("s%d", serial.Add(1))},
			Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "MyApp"}, Ports: []corev1.ServicePort{{Port: 80}}},
		}
		_, err := client.CoreV1().Services("default").Create(ctx, s, metav1.CreateOptions{})
		return err
	}
	configMap := func() error {
		c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("c%d", serial.Add(1))}, Data: map[string]string{"a": "b"}}
		_, err := client.CoreV1().ConfigMaps("default").Create(ctx, c, metav1.CreateOptions{})
		return err
	}
	have := 0
	for _, existing := range []int{200, 5000} {
		for ; have < existing; have += 100 {
			many(b, 32, 100, service)
		}
		for _, clients := range []int{1, 16, 64} {
			for name, f := range map[string]func() error{"Service": service, "ConfigMap": configMap} {
				b.Run(fmt.Sprintf("existing=%d/clients=%d/%s", existing, clients, name), func(b *testing.B) {
					many(b, clients, b.N, f)
					b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
				})
			}
		}
	}
}

// many calls f n times from several clients.
func many(b *testing.B, clients, n int, f func() error) {
	b.Helper()
	var done atomic.Int64
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for done.Add(1) <= int64(n) {
				if err := f(); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}
