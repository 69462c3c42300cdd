package controller

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

// view is what the API holds of one kind, as far as this process can know: what
// its informer has brought, overlaid with the answers to its own writes that
// the informer has not brought yet. A plan made on it never repeats a write,
// and never has to wait for the informer to catch up.
//
// Objects are grouped by the Service they belong to.
type view[T metav1.Object] struct {
	group func(T) (svc.Name, bool)
	// stored says whether the informer's store holds the object now.
	stored func(svc.Name) bool
	now    func() time.Time

	mu     sync.Mutex
	groups map[svc.Name]map[string]*held[T]
	ahead  map[svc.Name]*held[T] // by object name: what the informer does not know
}

// held is one object, or the knowledge that this process has deleted it.
type held[T metav1.Object] struct {
	obj   T
	owner svc.Name
	gone  bool
	since time.Time // when it went ahead of the informer
}

func newView[T metav1.Object](group func(T) (svc.Name, bool), stored func(svc.Name) bool) *view[T] {
	return &view[T]{
		group: group, stored: stored, now: time.Now,
		groups: map[svc.Name]map[string]*held[T]{}, ahead: map[svc.Name]*held[T]{},
	}
}

// newer says whether version a comes after b. Versions that are no numbers
// cannot be told apart; then what comes later is taken for newer.
func newer(a, b string) bool {
	if a == b {
		return false
	}
	c, err := resourceversion.CompareResourceVersion(a, b)
	return err != nil || c > 0
}

// list returns the objects of a group, in no order.
func (v *view[T]) list(owner svc.Name) []T {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := make([]T, 0, len(v.groups[owner]))
	for _, h := range v.groups[owner] {
		if !h.gone {
			out = append(out, h.obj)
		}
	}
	return out
}

func (v *view[T]) find(name svc.Name, owner svc.Name) *held[T] { return v.groups[owner][name.Name] }

func (v *view[T]) put(name svc.Name, h *held[T]) {
	if v.groups[h.owner] == nil {
		v.groups[h.owner] = map[string]*held[T]{}
	}
	v.groups[h.owner][name.Name] = h
}

func (v *view[T]) drop(name svc.Name, owner svc.Name) {
	delete(v.groups[owner], name.Name)
	if len(v.groups[owner]) == 0 {
		delete(v.groups, owner)
	}
	delete(v.ahead, name)
}

// observed takes an object the informer brought. old is the one before it, if
// any. It returns the groups for which it is news, not an echo of an own write.
func (v *view[T]) observed(old, obj T, hasOld bool) []svc.Name {
	v.mu.Lock()
	defer v.mu.Unlock()
	var news []svc.Name
	name := nameOf(obj)
	owner, ok := v.group(obj)
	if hasOld {
		if before, had := v.group(old); had && (!ok || before != owner) {
			v.drop(name, before)
			news = append(news, before)
		}
	}
	if !ok {
		return news
	}
	h := v.find(name, owner)
	switch {
	case h == nil:
	case h.gone && h.obj.GetUID() == obj.GetUID():
		return news // of the time before the own delete
	case !h.gone && h.obj.GetResourceVersion() == obj.GetResourceVersion():
		h.obj = obj // let the informer's copy be the only one
		delete(v.ahead, name)
		return news
	case !newer(obj.GetResourceVersion(), h.obj.GetResourceVersion()):
		return news
	}
	v.put(name, &held[T]{obj: obj, owner: owner})
	delete(v.ahead, name)
	return append(news, owner)
}

// vanished takes a delete event and says whether it is news.
func (v *view[T]) vanished(obj T) (svc.Name, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	owner, ok := v.group(obj)
	name := nameOf(obj)
	h := v.find(name, owner)
	if !ok || h == nil || h.obj.GetUID() != obj.GetUID() {
		return owner, false
	}
	v.drop(name, owner)
	return owner, !h.gone
}

// wrote takes the answer to an own create, update or get.
func (v *view[T]) wrote(obj T) {
	v.mu.Lock()
	defer v.mu.Unlock()
	owner, ok := v.group(obj)
	if !ok {
		return
	}
	name := nameOf(obj)
	h := v.find(name, owner)
	if h != nil && !newer(obj.GetResourceVersion(), h.obj.GetResourceVersion()) {
		return
	}
	h = &held[T]{obj: obj, owner: owner, since: v.now()}
	v.put(name, h)
	v.ahead[name] = h
}

// deleted notes an own delete that succeeded, or that found nothing.
func (v *view[T]) deleted(name svc.Name, owner svc.Name, uid types.UID) {
	v.mu.Lock()
	defer v.mu.Unlock()
	h := v.find(name, owner)
	if h == nil || h.obj.GetUID() != uid {
		return
	}
	gone := &held[T]{obj: h.obj, owner: owner, gone: true, since: v.now()}
	v.put(name, gone)
	v.ahead[name] = gone
}

// forgetAfter is how long the informer may take to bring an own write before
// the write is taken for overtaken by somebody else's delete, whose event got
// lost in a new list.
const forgetAfter = 30 * time.Second

// audit drops what is ahead of the informer for too long, until ctx ends, and
// hands the groups concerned to tell.
func (v *view[T]) audit(ctx context.Context, tell func(svc.Name)) {
	wait.UntilWithContext(ctx, func(context.Context) {
		for _, owner := range v.forget() {
			tell(owner)
		}
	}, forgetAfter/2)
}

func (v *view[T]) forget() []svc.Name {
	v.mu.Lock()
	defer v.mu.Unlock()
	var owners []svc.Name
	for name, h := range v.ahead {
		if v.now().Sub(h.since) < forgetAfter {
			continue
		}
		stored := v.stored(name)
		switch {
		case stored && h.gone: // held by a finalizer
			h.since = v.now()
		case stored:
			delete(v.ahead, name)
		default:
			v.drop(name, h.owner)
			if !h.gone {
				owners = append(owners, h.owner)
			}
		}
	}
	return owners
}
