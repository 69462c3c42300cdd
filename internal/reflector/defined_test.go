package reflector

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// A kind of a definition is listed again after a watch that the server has ended before its time, and not after one that has ended by
// itself, nor is another kind.
func TestDefinedIsListedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		from  func(Source) Source
		lasts time.Duration
		lists int32
	}{
		"replaced":      {Source.Defined, time.Minute, 2},
		"timed out":     {Source.Defined, 0, 1},
		"no definition": {func(s Source) Source { return s }, time.Minute, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var lists, watches atomic.Int32
				from := Source{
					List: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
						lists.Add(1)
						return &corev1.ConfigMapList{ListMeta: metav1.ListMeta{ResourceVersion: "1"}}, nil
					},
					Watch: func(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
						w := watch.NewFake()
						if watches.Add(1) == 1 {
							lasts := c.lasts
							if lasts == 0 {
								lasts = time.Duration(*o.TimeoutSeconds) * time.Second
							}
							time.AfterFunc(lasts, w.Stop)
						}
						return w, nil
					},
				}
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					Run(Silent(ctx), "test", c.from(from), Sink[*corev1.ConfigMap]{Replace: func([]*corev1.ConfigMap) {}})
				}()
				time.Sleep(30 * time.Minute)
				if lists.Load() != c.lists || watches.Load() < 2 {
					t.Errorf("%d lists, want %d, and %d watches", lists.Load(), c.lists, watches.Load())
				}
				cancel()
				<-ended
			})
		})
	}
}
