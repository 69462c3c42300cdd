package kit

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/svc"
)

// NewCache returns an AssumeCache that k keeps up to date from an informer. changed is called for each
// group that another client's write has changed.
func NewCache[T metav1.Object](k *Kit, informer cache.SharedIndexInformer, group func(T) (svc.Name, bool), changed func(svc.Name),
) (*AssumeCache[T], error) {
	c := NewAssumeCache(group, storedIn(informer))
	return c, k.Handle(informer, cacheHandler(c, changed))
}

// storedIn returns a function that reports whether an informer's store has the
// named object.
func storedIn(informer cache.SharedIndexInformer) func(svc.Name) bool {
	return func(name svc.Name) bool {
		_, ok, err := informer.GetStore().GetByKey(name.String())
		return ok && err == nil
	}
}

// cacheHandler feeds a cache from an informer and calls changed for each group
// that another client's write has changed.
func cacheHandler[T metav1.Object](c *AssumeCache[T], changed func(svc.Name)) cache.ResourceEventHandler {
	observe := func(old, obj T, hasOld bool) {
		for _, owner := range c.observe(old, obj, hasOld) {
			changed(owner)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) {
			var none T
			observe(none, o.(T), false)
		},
		UpdateFunc: func(old, o any) { observe(old.(T), o.(T), true) },
		DeleteFunc: func(o any) {
			if obj, ok := Final[T](o); ok {
				if owner, ok := c.observeDelete(obj); ok {
					changed(owner)
				}
			}
		},
	}
}
