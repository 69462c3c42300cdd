package networking

import (
	"context"

	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// Feed lists and watches one kind straight from its storage, without a client,
// and hands the objects over, which are shared with the watch cache and must not
// be changed. It returns when ctx ends.
func Feed(ctx context.Context, name string, s *store.REST, to Sink) {
	cache.NewReflectorWithOptions(listWatch{s}, s.New(), reflectorStore{to}, cache.ReflectorOptions{Name: name}).RunWithContext(ctx)
}

// listWatch reads through the watch cache of a storage.
type listWatch struct{ s *store.REST }

func (lw listWatch) options(o metav1.ListOptions) *metainternal.ListOptions {
	return &metainternal.ListOptions{
		ResourceVersion: o.ResourceVersion, ResourceVersionMatch: o.ResourceVersionMatch,
		Limit: o.Limit, Continue: o.Continue, AllowWatchBookmarks: o.AllowWatchBookmarks,
	}
}

func (lw listWatch) ListWithContext(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	return lw.s.List(genericrequest.WithNamespace(ctx, metav1.NamespaceAll), lw.options(o))
}

func (lw listWatch) WatchWithContext(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	w, err := lw.s.Watch(genericrequest.WithNamespace(ctx, metav1.NamespaceAll), lw.options(o))
	if err != nil {
		return nil, err
	}
	return watch.Filter(w, unwrap), nil
}

// unwrap takes the object out of the shell in which the watch cache keeps its
// encoded forms.
func unwrap(e watch.Event) (watch.Event, bool) {
	if c, ok := e.Object.(runtime.CacheableObject); ok {
		e.Object = c.GetObject()
	}
	return e, true
}

// List is ListWithContext without a context, for the old interface.
func (lw listWatch) List(o metav1.ListOptions) (runtime.Object, error) {
	return lw.ListWithContext(context.Background(), o)
}

// Watch is WatchWithContext without a context, for the old interface.
func (lw listWatch) Watch(o metav1.ListOptions) (watch.Interface, error) {
	return lw.WatchWithContext(context.Background(), o)
}

// IsWatchListSemanticsUnSupported makes the reflector list and then watch.
func (listWatch) IsWatchListSemanticsUnSupported() bool { return true }

// Sink receives what Feed reads, one call at a time.
type Sink struct {
	// Replace gets every object after each list, in place of all before.
	Replace func(objs []any)
	// Put gets an object that was added or changed, Gone one that was deleted.
	Put, Gone func(obj any)
}

// reflectorStore is the Sink in the shape that a reflector writes to.
type reflectorStore struct{ Sink }

func (s reflectorStore) Add(obj any) error    { s.Put(obj); return nil }
func (s reflectorStore) Update(obj any) error { s.Put(obj); return nil }
func (s reflectorStore) Delete(obj any) error { s.Gone(obj); return nil }
func (s reflectorStore) Resync() error        { return nil }
func (s reflectorStore) Replace(objs []any, _ string) error {
	s.Sink.Replace(objs)
	return nil
}
