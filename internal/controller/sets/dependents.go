package sets

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/workloads"
)

// dependents has all objects of one kind that an object of the kind owner controls, by that
// owner, with this process's own writes, and objects that nothing controls.
type dependents[T metav1.Object] struct {
	*kit.AssumeCache[T]
	kind schema.GroupVersionKind // of the owners

	mu      sync.Mutex
	orphans map[string]map[string]T // by namespace and name
	// gone are objects that this process has deleted and that end gracefully.
	gone map[types.UID]bool
}

// newDependents feeds the cache from an informer. changed is called with each owner of which
// something has changed, orphan with each object that nothing controls, when it becomes one and
// when its labels change.
func newDependents[T metav1.Object](k *kit.Kit, informer cache.SharedIndexInformer, kind schema.GroupVersionKind,
	changed func(svc.Name), orphan func(T),
) (*dependents[T], error) {
	o := &dependents[T]{kind: kind, orphans: map[string]map[string]T{}, gone: map[types.UID]bool{}}
	var err error
	if o.AssumeCache, err = kit.NewCache(k, informer, o.ownerOf, changed); err != nil {
		return nil, err
	}
	return o, k.Handle(informer, kit.Handlers(func(obj T) {
		if o.keep(obj) {
			orphan(obj)
		}
	}, o.forget))
}

// eachAdopter calls adopt with the name of each owner of list that selects an object.
func eachAdopter[T metav1.Object](obj metav1.Object, list func(labels.Selector) ([]T, error),
	selectorOf func(T) *metav1.LabelSelector, adopt func(svc.Name),
) {
	if obj.GetDeletionTimestamp() != nil || len(obj.GetLabels()) == 0 {
		return
	}
	owners, _ := list(labels.Everything())
	for _, o := range owners {
		if selector, err := metav1.LabelSelectorAsSelector(selectorOf(o)); err == nil && selector.Matches(labels.Set(obj.GetLabels())) {
			adopt(svc.NameOf(o))
		}
	}
}

func (o *dependents[T]) ownerOf(obj T) (svc.Name, bool) {
	ref := metav1.GetControllerOfNoCopy(obj)
	if ref == nil || ref.Kind != o.kind.Kind || ref.APIVersion != o.kind.GroupVersion().String() {
		return svc.Name{}, false
	}
	return svc.Name{Namespace: obj.GetNamespace(), Name: ref.Name}, true
}

// keep records an object that nothing controls. It reports whether owners might adopt it that
// would not have adopted its last state: it is new, or has other labels.
func (o *dependents[T]) keep(obj T) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	namespace := obj.GetNamespace()
	if metav1.GetControllerOfNoCopy(obj) != nil {
		o.drop(obj)
		return false
	}
	if o.orphans[namespace] == nil {
		o.orphans[namespace] = map[string]T{}
	}
	old, ok := o.orphans[namespace][obj.GetName()]
	o.orphans[namespace][obj.GetName()] = obj
	return !ok || old.GetUID() != obj.GetUID() || !maps.Equal(old.GetLabels(), obj.GetLabels())
}

func (o *dependents[T]) drop(obj T) {
	of := o.orphans[obj.GetNamespace()]
	if delete(of, obj.GetName()); len(of) == 0 {
		delete(o.orphans, obj.GetNamespace())
	}
}

func (o *dependents[T]) forget(obj T) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.drop(obj)
	delete(o.gone, obj.GetUID())
}

// deleting records that this process deletes an object, or takes that back.
func (o *dependents[T]) deleting(uid types.UID, yes bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if yes {
		o.gone[uid] = true
	} else {
		delete(o.gone, uid)
	}
}

// candidates returns what an owner has or might adopt.
func (o *dependents[T]) candidates(owner metav1.Object) []T {
	list := o.List(svc.NameOf(owner))
	o.mu.Lock()
	defer o.mu.Unlock()
	orphans := o.orphans[owner.GetNamespace()]
	if len(orphans) == 0 {
		return list
	}
	owned := make(map[types.UID]bool, len(list))
	for _, obj := range list {
		owned[obj.GetUID()] = true
	}
	for _, obj := range orphans {
		if !owned[obj.GetUID()] { // it may just have been adopted
			list = append(list, obj)
		}
	}
	return list
}

// staying returns what an owner has and this process has not deleted.
func (o *dependents[T]) staying(owner svc.Name) []T {
	list := o.List(owner)
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.DeleteFunc(list, func(obj T) bool { return o.gone[obj.GetUID()] })
}

// deleted returns which of the objects this process has deleted.
func (o *dependents[T]) deleted(list []T) map[types.UID]bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := map[types.UID]bool{}
	for _, obj := range list {
		if o.gone[obj.GetUID()] {
			out[obj.GetUID()] = true
		}
	}
	return out
}

// claim adopts and releases objects, and returns the objects that the owner then has. patch
// writes one; live reads the owner from the API server, for an owner that is gone, or about
// to be, must adopt nothing.
func (o *dependents[T]) claim(ctx context.Context, owner metav1.Object, selector labels.Selector,
	live func(context.Context) (metav1.Object, error), patch func(context.Context, T, []byte) (T, error),
) ([]T, error) {
	c := workloads.Claim(owner, selector, o.candidates(owner))
	var errs []error
	if len(c.Adopt) > 0 {
		now, err := live(ctx)
		switch {
		case err != nil:
			return nil, err
		case now.GetUID() != owner.GetUID() || now.GetDeletionTimestamp() != nil:
			c.Adopt = nil
		}
	}
	ref := metav1.NewControllerRef(owner, o.kind)
	for _, obj := range c.Adopt {
		adopted, err := patch(ctx, obj, ownerPatch(obj, ref))
		if err != nil {
			errs = append(errs, fmt.Errorf("adopt %s: %w", obj.GetName(), err))
			continue
		}
		o.Assume(adopted)
		c.Owned = append(c.Owned, adopted)
	}
	for _, obj := range c.Release {
		if _, err := patch(ctx, obj, ownerPatch(obj, map[string]any{"$patch": "delete", "uid": owner.GetUID()})); kit.IgnoreReplaced(err) != nil {
			errs = append(errs, fmt.Errorf("release %s: %w", obj.GetName(), err))
		}
	}
	return c.Owned, errors.Join(errs...)
}

// ownerPatch adds or removes one owner of an object.
func ownerPatch(obj metav1.Object, ref any) []byte {
	patch, _ := json.Marshal(map[string]any{"metadata": map[string]any{"uid": obj.GetUID(), "ownerReferences": []any{ref}}})
	return patch
}

// runWithDependents returns what runs the loop of a controller of sets, and lets the caches of what
// they own expire, until ctx ends.
func runWithDependents(l *loop.Loop[svc.Name], caches ...expirer) kit.Task {
	tasks := []kit.Task{l.Run}
	for _, c := range caches {
		tasks = append(tasks, func(ctx context.Context) { c.ExpireLoop(ctx, l.Queue.Add) })
	}
	return kit.Together(tasks...)
}

// expirer is dependents of any kind.
type expirer interface {
	ExpireLoop(ctx context.Context, changed func(owner svc.Name))
}
