package volumes

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

// Objects watches the ConfigMaps and Secrets in the volumes of this node's Pods, each once, and reports changes to its
// users. It keeps no content. A node may only watch single objects, to which its Pods refer.
type Objects struct {
	ctx     context.Context
	client  kubernetes.Interface
	mu      sync.Mutex
	watches map[objectKey]*objectWatch
	used    map[User]map[objectKey]bool
	running sync.WaitGroup
}

// User gets the changes of objects.
type User interface {
	// Changed is called after each change of an object. It must not block.
	Changed()
}

type objectWatch struct {
	users map[User]bool
	stop  context.CancelFunc
}

// NewObjects returns Objects that watch nothing before Begin.
func NewObjects(client kubernetes.Interface) *Objects {
	return &Objects{client: client, watches: map[objectKey]*objectWatch{}, used: map[User]map[objectKey]bool{}}
}

// Begin sets how long objects are watched: until ctx ends. It comes before the first want.
func (o *Objects) Begin(ctx context.Context) { o.ctx = ctx }

// Wait waits until no object is watched.
func (o *Objects) Wait() { o.running.Wait() }

// Want sets the objects that w uses. What w reads after it is the present state or newer: w.Changed is called for each
// later change.
func (o *Objects) Want(w User, keys map[objectKey]bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for k := range o.used[w] {
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
			watch = &objectWatch{users: map[User]bool{}, stop: stop}
			o.watches[k] = watch
			o.running.Go(func() { o.follow(reflector.Silent(ctx), k) })
		}
		watch.users[w] = true
	}
	o.used[w] = keys
	if len(keys) == 0 {
		delete(o.used, w)
	}
}

// follow wakes the users of an object at each of its changes until ctx ends.
func (o *Objects) follow(ctx context.Context, k objectKey) {
	one := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", k.name).String()}
	if k.secret {
		reflector.Run(ctx, "runner/secrets", reflector.From(o.client.CoreV1().Secrets(k.namespace), one), sinkOf[*corev1.Secret](o, k))
		return
	}
	reflector.Run(ctx, "runner/configmaps", reflector.From(o.client.CoreV1().ConfigMaps(k.namespace), one), sinkOf[*corev1.ConfigMap](o, k))
}

func sinkOf[T any](o *Objects, k objectKey) reflector.Sink[T] {
	return reflector.Sink[T]{
		Replace: func([]T) { o.changed(k) }, Set: func(T) { o.changed(k) },
		Delete: func(T) {}, // pods keep what they have, as with kubelet
	}
}

func (o *Objects) changed(k objectKey) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if watch := o.watches[k]; watch != nil {
		for w := range watch.users {
			w.Changed()
		}
	}
}

// ObjectsOf are the ConfigMaps and Secrets in the volumes of a pod.
func ObjectsOf(pod *corev1.Pod) map[objectKey]bool {
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
