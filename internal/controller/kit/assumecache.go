package kit

import (
	"context"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/fairlead/fairlead/internal/svc"
)

// AssumeCache is what the API holds of one kind, as far as this process can
// know: what its informer has delivered, overlaid with the answers to its own
// writes that the informer has not delivered yet. A plan made on it never
// repeats a write, and never waits for the informer to catch up.
//
// Objects are grouped by the Service they belong to.
type AssumeCache[T metav1.Object] struct {
	group func(T) (svc.Name, bool)
	// stored reports whether the informer's store holds the object now.
	stored func(svc.Name) bool
	now    func() time.Time

	mu     sync.Mutex
	groups map[svc.Name]map[string]*entry[T]
	// unconfirmed are own writes, by object name, that the informer has not
	// delivered yet.
	unconfirmed map[svc.Name]*entry[T]
}

// entry is one object, or the knowledge that this process has deleted it.
type entry[T metav1.Object] struct {
	obj     T
	owner   svc.Name
	deleted bool
	since   time.Time // of the write, if unconfirmed
}

// NewAssumeCache returns an empty cache of objects that group assigns to a group, or to none. stored reports whether the
// informer holds the named object.
func NewAssumeCache[T metav1.Object](group func(T) (svc.Name, bool), stored func(svc.Name) bool) *AssumeCache[T] {
	return &AssumeCache[T]{
		group: group, stored: stored, now: time.Now,
		groups: map[svc.Name]map[string]*entry[T]{}, unconfirmed: map[svc.Name]*entry[T]{},
	}
}

// Newer reports whether version a comes after b. Versions that are not
// numbers cannot be compared; then what arrives later is taken for newer.
func Newer(a, b string) bool {
	if a == b {
		return false
	}
	c, err := resourceversion.CompareResourceVersion(a, b)
	return err != nil || c > 0
}

// List returns the objects of a group, in no order.
func (c *AssumeCache[T]) List(owner svc.Name) []T {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]T, 0, len(c.groups[owner]))
	for _, h := range c.groups[owner] {
		if !h.deleted {
			out = append(out, h.obj)
		}
	}
	return out
}

func (c *AssumeCache[T]) find(name svc.Name, owner svc.Name) *entry[T] {
	return c.groups[owner][name.Name]
}

func (c *AssumeCache[T]) put(name svc.Name, h *entry[T]) {
	if c.groups[h.owner] == nil {
		c.groups[h.owner] = map[string]*entry[T]{}
	}
	c.groups[h.owner][name.Name] = h
}

func (c *AssumeCache[T]) drop(name svc.Name, owner svc.Name) {
	delete(c.groups[owner], name.Name)
	if len(c.groups[owner]) == 0 {
		delete(c.groups, owner)
	}
	delete(c.unconfirmed, name)
}

// observe takes an object from the informer. old is the one before it, if any.
// It returns the groups that have changed by it: none for the echo of an own
// write.
func (c *AssumeCache[T]) observe(old, obj T, hasOld bool) []svc.Name {
	c.mu.Lock()
	defer c.mu.Unlock()
	var changed []svc.Name
	name := svc.NameOf(obj)
	owner, ok := c.group(obj)
	if hasOld {
		if before, had := c.group(old); had && (!ok || before != owner) {
			c.drop(name, before)
			changed = append(changed, before)
		}
	}
	if !ok {
		return changed
	}
	h := c.find(name, owner)
	switch {
	case h == nil:
	case h.deleted && h.obj.GetUID() == obj.GetUID():
		return changed // from before the own delete
	case !h.deleted && h.obj.GetResourceVersion() == obj.GetResourceVersion():
		h.obj = obj // let the informer's copy be the only one
		delete(c.unconfirmed, name)
		return changed
	case !Newer(obj.GetResourceVersion(), h.obj.GetResourceVersion()):
		return changed
	}
	c.put(name, &entry[T]{obj: obj, owner: owner})
	delete(c.unconfirmed, name)
	return append(changed, owner)
}

// observeDelete takes a delete event. It returns the object's group and reports
// whether that has changed by it.
func (c *AssumeCache[T]) observeDelete(obj T) (svc.Name, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	owner, ok := c.group(obj)
	name := svc.NameOf(obj)
	h := c.find(name, owner)
	if !ok || h == nil || h.obj.GetUID() != obj.GetUID() {
		return owner, false
	}
	c.drop(name, owner)
	return owner, !h.deleted
}

// Assume takes the answer to an own create, update or get.
func (c *AssumeCache[T]) Assume(obj T) {
	c.mu.Lock()
	defer c.mu.Unlock()
	owner, ok := c.group(obj)
	if !ok {
		return
	}
	name := svc.NameOf(obj)
	h := c.find(name, owner)
	if h != nil && !Newer(obj.GetResourceVersion(), h.obj.GetResourceVersion()) {
		return
	}
	h = &entry[T]{obj: obj, owner: owner, since: c.now()}
	c.put(name, h)
	c.unconfirmed[name] = h
}

// AssumeDeleted takes an own delete that succeeded, or that found nothing.
func (c *AssumeCache[T]) AssumeDeleted(name svc.Name, owner svc.Name, uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.find(name, owner)
	if h == nil || h.obj.GetUID() != uid {
		return
	}
	deleted := &entry[T]{obj: h.obj, owner: owner, deleted: true, since: c.now()}
	c.put(name, deleted)
	c.unconfirmed[name] = deleted
}

// How long the informer may take to deliver an own delete, and an own create or update.
// After the latter the object is taken to have been deleted by another client while the
// informer listed again, which yields no event. A watch that stalls for longer has Pods
// created a second time, as with the expectations of Kubernetes, which last as long.
const (
	confirmTimeout = 30 * time.Second
	writeTimeout   = 5 * time.Minute
)

// ExpireLoop drops what stays unconfirmed for too long, until ctx ends, and calls
// changed for each group concerned.
func (c *AssumeCache[T]) ExpireLoop(ctx context.Context, changed func(svc.Name)) {
	wait.UntilWithContext(ctx, func(context.Context) {
		for _, owner := range c.expire() {
			changed(owner)
		}
	}, confirmTimeout/2)
}

func (c *AssumeCache[T]) expire() []svc.Name {
	c.mu.Lock()
	defer c.mu.Unlock()
	var owners []svc.Name
	for name, h := range c.unconfirmed {
		timeout := writeTimeout
		if h.deleted {
			timeout = confirmTimeout
		}
		if c.now().Sub(h.since) < timeout {
			continue
		}
		stored := c.stored(name)
		switch {
		case stored && h.deleted: // kept by a finalizer
			h.since = c.now()
		case stored:
			delete(c.unconfirmed, name)
		default:
			c.drop(name, h.owner)
			if !h.deleted {
				owners = append(owners, h.owner)
			}
		}
	}
	return owners
}
