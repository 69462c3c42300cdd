// Package reflector brings the objects of one kind to a Sink, which keeps as much
// of them as it needs: unlike an informer, it holds no second copy. It is
// client-go's reflector with one configuration for all of this module.
package reflector

import (
	"context"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Source lists and watches one kind.
type Source struct {
	List  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	Watch func(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// Client is the part of a typed client that a Source needs.
type Client[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// From returns the Source that reads through a typed client what selects, given
// as selectors in ListOptions, leaves over.
func From[L runtime.Object](c Client[L], selects metav1.ListOptions) Source {
	narrow := func(o metav1.ListOptions) metav1.ListOptions {
		o.LabelSelector, o.FieldSelector = selects.LabelSelector, selects.FieldSelector
		return o
	}
	return Source{
		List: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return c.List(ctx, narrow(o)) },
		Watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return c.Watch(ctx, narrow(o))
		},
	}
}

// Observed returns s with the result of every list and watch passed to observe,
// which may be called concurrently with the Sink.
func (s Source) Observed(observe func(error)) Source {
	return Source{
		List: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			l, err := s.List(ctx, o)
			observe(err)
			return l, err
		},
		Watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := s.Watch(ctx, o)
			observe(err)
			return w, err
		},
	}
}

// Defined returns s for a kind that a CustomResourceDefinition defines. After a watch that the server has ended before its time it lists
// again. A server ends the watches of a kind when its definition is replaced, and the last objects of such a watch may lack the fields
// that only the new definition has: their versions stay the same, so that a watch from there does not bring them again. The end of a
// server looks the same, and costs one list.
func (s Source) Defined() Source {
	var mu sync.Mutex
	var until time.Time // the time of the last watch
	begin := func(o metav1.ListOptions) {
		mu.Lock()
		defer mu.Unlock()
		if o.TimeoutSeconds != nil {
			until = time.Now().Add(time.Duration(*o.TimeoutSeconds)*time.Second - endSpread)
		}
	}
	ended := func() (early bool) {
		mu.Lock()
		defer mu.Unlock()
		early = time.Now().Before(until)
		until = time.Time{}
		return early
	}
	return Source{List: s.List, Watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
		if ended() {
			return nil, apierrors.NewResourceExpired("the watch has ended before its time: the kind may have another definition")
		}
		w, err := s.Watch(ctx, o)
		if err == nil {
			begin(o)
		}
		return w, err
	}}
}

// endSpread is how much sooner than asked a watch may end by itself.
const endSpread = 5 * time.Second

// Sink receives objects, one call at a time. They may be shared with others and
// must not be changed.
type Sink[T any] struct {
	// Replace gets every object there is, after each list; what it does not get
	// is gone.
	Replace func(objs []T)
	// Set gets an object that was added or changed.
	Set func(obj T)
	// Delete gets an object that was deleted, as it was last.
	Delete func(obj T)
	// Version, which may be nil, gets the resource version up to which everything has been
	// given to the others: after each of their calls, and for bookmarks.
	Version func(version string)
}

// Silent returns a context under which nothing is logged of what a reflector cannot do; the caller of Observed does that.
func Silent(ctx context.Context) context.Context { return klog.NewContext(ctx, klog.Logger{}) }

// quietKey is of contexts of Quiet.
type quietKey struct{}

// Quiet returns a context under which Run logs only what the API server rejects, once for each reason, with the logger of
// klog. That no server answers is logged by other parts of the process.
func Quiet(ctx context.Context) context.Context {
	return context.WithValue(Silent(ctx), quietKey{}, true)
}

// Rejections logs errors by which the API server rejects requests: the first at once, and again when the reason changes or
// after a success.
type Rejections struct {
	// Log writes a line.
	Log func(err error)

	mu   sync.Mutex
	last metav1.StatusReason
}

// Observe is for Source.Observed.
func (r *Rejections) Observe(err error) {
	reason := metav1.StatusReasonUnknown
	if apierrors.IsUnauthorized(err) || apierrors.IsForbidden(err) || apierrors.IsBadRequest(err) {
		reason = apierrors.ReasonForError(err)
	} else if err != nil {
		return // it tells nothing of the credentials
	}
	r.mu.Lock()
	changed := reason != r.last
	r.last = reason
	r.mu.Unlock()
	if changed && err != nil {
		r.Log(err)
	}
}

// While the API server is away it is retried this often, first and later.
const (
	minBackoff = 200 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// Run brings the objects of a Source to a Sink until ctx ends. name, as
// "proxy/services", is for client-go's log.
func Run[T any](ctx context.Context, name string, from Source, to Sink[T]) {
	var none T
	if ctx.Value(quietKey{}) != nil {
		rejections := Rejections{Log: func(err error) {
			klog.Background().Error(err, "the API server rejects a list or watch; retrying", "reflector", name)
		}}
		from = from.Observed(rejections.Observe)
	}
	cache.NewReflectorWithOptions(listerWatcher{from}, none, store[T]{to}, cache.ReflectorOptions{
		Name:    name,
		Backoff: &wait.Backoff{Duration: minBackoff, Factor: 2, Jitter: 0.5, Steps: 10, Cap: maxBackoff},
	}).RunWithContext(ctx)
}

// Informer returns an informer of client-go for a Source, of objects like example, by
// namespace. It lists and then watches, as Run does.
func Informer(from Source, example runtime.Object) cache.SharedIndexInformer {
	return cache.NewSharedIndexInformer(listerWatcher{from}, example, 0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
}

// listerWatcher is a Source as client-go wants it.
type listerWatcher struct{ s Source }

func (l listerWatcher) List(o metav1.ListOptions) (runtime.Object, error) {
	return l.s.List(context.Background(), o)
}

func (l listerWatcher) Watch(o metav1.ListOptions) (watch.Interface, error) {
	return l.s.Watch(context.Background(), o)
}

func (l listerWatcher) ListWithContext(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	return l.s.List(ctx, o)
}

func (l listerWatcher) WatchWithContext(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	return l.s.Watch(ctx, o)
}

// IsWatchListSemanticsUnSupported makes the reflector list and then watch. A
// list comes in one answer, from the API server's memory. Streamed as events it
// costs the client a fifth more and the API server three times as much, waits
// until the server has heard from etcd that nothing is newer, and does not end
// with its context while it waits to retry (client-go 0.37).
func (listerWatcher) IsWatchListSemanticsUnSupported() bool { return true }

// store is a Sink as client-go wants it.
type store[T any] struct{ to Sink[T] }

// call passes obj to f.
func call[T any](f func(T), obj any) error {
	o, ok := obj.(T)
	if !ok {
		return fmt.Errorf("watch delivered a %T, want a %T", obj, o)
	}
	f(o)
	return nil
}

func (s store[T]) Add(obj any) error    { return call(s.to.Set, obj) }
func (s store[T]) Update(obj any) error { return call(s.to.Set, obj) }
func (s store[T]) Delete(obj any) error { return call(s.to.Delete, obj) }
func (s store[T]) Resync() error        { return nil }

// UpdateResourceVersion is called after each event of a watch.
func (s store[T]) UpdateResourceVersion(version string) {
	if s.to.Version != nil {
		s.to.Version(version)
	}
}

func (s store[T]) Replace(list []any, version string) error {
	objs := make([]T, len(list))
	for i, obj := range list {
		if err := call(func(o T) { objs[i] = o }, obj); err != nil {
			return err
		}
	}
	s.to.Replace(objs)
	s.UpdateResourceVersion(version)
	return nil
}
