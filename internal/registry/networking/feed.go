package networking

import (
	"context"

	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"

	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/registry/store"
)

// Feed lists and watches one kind straight from its storage, without a client,
// and hands the objects over, which are shared with the watch cache and must not
// be changed. It returns when ctx ends.
func Feed[T any](ctx context.Context, name string, s *store.REST, to reflector.Sink[T]) {
	all := genericrequest.WithNamespace(ctx, metav1.NamespaceAll)
	reflector.Run(all, "registry/"+name, reflector.Source{
		List: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return s.List(ctx, internalOptions(o))
		},
		Watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := s.Watch(ctx, internalOptions(o))
			if err != nil {
				return nil, err
			}
			return watch.Filter(w, unwrap), nil
		},
	}, to)
}

func internalOptions(o metav1.ListOptions) *metainternal.ListOptions {
	return &metainternal.ListOptions{
		ResourceVersion: o.ResourceVersion, ResourceVersionMatch: o.ResourceVersionMatch,
		Limit: o.Limit, Continue: o.Continue, AllowWatchBookmarks: o.AllowWatchBookmarks,
	}
}

// unwrap takes the object out of the shell in which the watch cache keeps its
// encoded forms.
func unwrap(e watch.Event) (watch.Event, bool) {
	if c, ok := e.Object.(runtime.CacheableObject); ok {
		e.Object = c.GetObject()
	}
	return e, true
}
