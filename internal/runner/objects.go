package runner

import (
	"context"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/reflector"
)

// objectKey names a ConfigMap or Secret.
type objectKey struct {
	secret          bool
	namespace, name string
}

// objects watches the ConfigMaps and Secrets in the volumes of this node's pods, each
// once, and wakes the pods that use one when it changes. It keeps no content. A node may
// watch single objects alone, those that its pods refer to.
type objects struct {
	ctx     context.Context
	client  kubernetes.Interface
	mu      sync.Mutex
	watches map[objectKey]*objectWatch
	running sync.WaitGroup
}

type objectWatch struct {
	users map[*worker]bool
	stop  context.CancelFunc
}

func newObjects(ctx context.Context, client kubernetes.Interface) *objects {
	return &objects{ctx: ctx, client: client, watches: map[objectKey]*objectWatch{}}
}

// want makes keys those that w uses. What w reads after it is what is there or newer:
// w.volumesChanged is called for each later change.
func (o *objects) want(w *worker, keys map[objectKey]bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for k := range w.watched {
		if keys[k] {
			continue
		}
		if watch := o.watches[k]; watch != nil {
			if delete(watch.users, w); len(watch.users) == 0 {
				watch.stop()
				delete(o.watches, k)
			}
		}
	}
	for k := range keys {
		watch := o.watches[k]
		if watch == nil {
			ctx, stop := context.WithCancel(o.ctx)
			watch = &objectWatch{users: map[*worker]bool{}, stop: stop}
			o.watches[k] = watch
			o.running.Go(func() { o.follow(reflector.Quiet(ctx), k) })
		}
		watch.users[w] = true
	}
	w.watched = keys
}

// follow wakes the users of an object at each of its changes until ctx ends.
func (o *objects) follow(ctx context.Context, k objectKey) {
	one := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", k.name).String()}
	if k.secret {
		reflector.Run(ctx, "runner/secrets", reflector.From(o.client.CoreV1().Secrets(k.namespace), one), sinkOf[*corev1.Secret](o, k))
		return
	}
	reflector.Run(ctx, "runner/configmaps", reflector.From(o.client.CoreV1().ConfigMaps(k.namespace), one), sinkOf[*corev1.ConfigMap](o, k))
}

func sinkOf[T any](o *objects, k objectKey) reflector.Sink[T] {
	return reflector.Sink[T]{
		Replace: func([]T) { o.changed(k) }, Set: func(T) { o.changed(k) },
		Delete: func(T) {}, // pods keep what they have, as with kubelet
	}
}

func (o *objects) changed(k objectKey) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if watch := o.watches[k]; watch != nil {
		for w := range watch.users {
			w.post(w.volumesChanged)
		}
	}
}

// objectsOf are the ConfigMaps and Secrets in the volumes of a pod.
func objectsOf(pod *corev1.Pod) map[objectKey]bool {
	out := map[objectKey]bool{}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if c := v.ConfigMap; c != nil {
			out[objectKey{false, pod.Namespace, c.Name}] = true
		}
		if s := v.Secret; s != nil {
			out[objectKey{true, pod.Namespace, s.SecretName}] = true
		}
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			if s.ConfigMap != nil {
				out[objectKey{false, pod.Namespace, s.ConfigMap.Name}] = true
			}
			if s.Secret != nil {
				out[objectKey{true, pod.Namespace, s.Secret.Name}] = true
			}
		}
	}
	return out
}
