// Package watch makes watches cheap for a server with thousands of them: watches of the same objects share
// one of the watch cache, an event is written in one piece and past the filters of the response, and a client that does not read is
// cut off.
package watch

import (
	"context"
	"encoding/json"
	goruntime "runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/loop"
)

const (
	// sharedBuffer is how many events a watch takes without a goroutine that waits for it.
	sharedBuffer = 8
	// sharedBacklog is how many events wait for a slow watch, which ends with the next. All watches share the
	// events, so one that waits costs two words and the list it is in.
	sharedBacklog = 1000
	// sharedBacklogBytes is how large these events may be together; a single one may be larger. They stay in memory as
	// long as one watch waits for them.
	sharedBacklogBytes = 8 << 20
	// sharedTurn is how many watches get an event before what they woke has its turn on the processor. If all of 5,000
	// are woken at once, the goroutines of each connection wait for all others three times, and the median node has
	// the event when nearly the last one has: with 20 in half the time, and for less CPU (bench, fleet).
	sharedTurn = 20
	// sharedQueue is how many events wait for a group of watches, which ends with the next. The
	// cache ends a watch that lets it wait for more than a tenth of a second, and with a group
	// all its clients would come back at once.
	sharedQueue = 10_000
	// bookmarkPeriod is the time from one bookmark of a watch to the next, and bookmarkLead
	// how long before its end it gets the last; the library has the same two.
	bookmarkPeriod = time.Minute
	bookmarkLead   = 2 * time.Second
)

// sharedWatches is a storage in which the watches of the same objects share one of the
// watch cache as soon as each has had what is older. A watch of the cache costs a goroutine
// that each event wakes, before the one that writes; 5,000 nodes watch the same Services.
// Those of one connection are handed an event one after the other, so that it writes for
// all of them.
type sharedWatches struct {
	storage.Interface
	newObject func() runtime.Object

	ctx  context.Context //nolint:containedctx // ends the groups with the storage
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu     sync.Mutex
	groups map[groupKey]*watchGroup // nil when closed
}

// WithShared returns storages as decorate does, with sharedWatches.
func WithShared(decorate generic.StorageDecorator) generic.StorageDecorator {
	return func(c *storagebackend.ConfigForResource, prefix string, key func(runtime.Object) (string, error),
		newObject, newList func() runtime.Object, attrs storage.AttrFunc, triggers storage.IndexerFuncs, indexers *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		inner, destroy, err := decorate(c, prefix, key, newObject, newList, attrs, triggers, indexers)
		if err != nil {
			return inner, destroy, err
		}
		s := shareWatches(inner, newObject)
		return s, func() { s.close(); destroy() }, nil
	}
}

// shareWatches returns inner with shared watches. close must be called at its end.
func shareWatches(inner storage.Interface, newObject func() runtime.Object) *sharedWatches {
	s := &sharedWatches{Interface: inner, newObject: newObject, groups: map[groupKey]*watchGroup{}}
	s.ctx, s.stop = context.WithCancel(context.Background())
	return s
}

// close ends the shared watches and waits for them.
func (s *sharedWatches) close() {
	s.mu.Lock()
	s.groups = nil
	s.mu.Unlock()
	s.stop()
	s.wg.Wait()
}

// groupKey names the objects that a watch without selectors follows.
type groupKey struct{ key, namespace string }

// watchGroup are watches that share one of the cache. All is under the lock of the storage.
type watchGroup struct {
	stop    context.CancelFunc
	members []*sharedWatch // by connection
	last    uint64         // the version of the last event that members got, or that of the start
	seen    uint64         // the version up to which there are no more events; at least last
}

// Watch watches. Only a watch that is served to a client is shared: others have no
// connection, and their readers may keep the objects.
func (s *sharedWatches) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	own, err := s.Interface.Watch(ctx, key, opts)
	guard, served := ctx.Value(guardKey{}).(*stallGuard)
	if err != nil || !served || !opts.Recursive || !opts.Predicate.Empty() {
		return own, err
	}
	at, err := s.Versioner().ParseResourceVersion(opts.ResourceVersion)
	if err != nil || opts.SendInitialEvents != nil && *opts.SendInitialEvents {
		at = 0 // the bookmark after the existing objects has the version
	}
	if at == 0 && !opts.Predicate.AllowWatchBookmarks {
		return own, nil
	}
	w := &sharedWatch{
		storage: s, client: guard.client, opts: opts, out: make(chan watch.Event, sharedBuffer), done: make(chan struct{}),
		group: groupKey{key, request.NamespaceValue(ctx)},
	}
	w.deadline, _ = ctx.Deadline()
	w.wg.Go(func() { w.follow(own, at) })
	w.forget = context.AfterFunc(ctx, w.leave)
	return w, nil
}

// join makes w a member of its group if that has sent nothing newer than at, the version up
// to which w has its events. It also reports true if w has ended.
func (s *sharedWatches) join(w *sharedWatch, at uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.left || s.groups == nil {
		w.end()
		return true
	}
	g := s.groups[w.group]
	if g == nil {
		g = s.startGroup(w.group, w.opts, at)
	}
	if g.last > at {
		return false
	}
	w.from = at
	i, _ := slices.BinarySearchFunc(g.members, w, compareWatches)
	g.members = slices.Insert(g.members, i, w)
	w.in = g
	w.setBookmark()
	return true
}

// startGroup starts a group whose events are newer than at. The caller holds s.mu.
func (s *sharedWatches) startGroup(key groupKey, opts storage.ListOptions, at uint64) *watchGroup {
	ctx, cancel := context.WithCancel(request.WithNamespace(s.ctx, key.namespace))
	g := &watchGroup{stop: cancel, last: at, seen: at}
	s.groups[key] = g
	opts.ResourceVersion, opts.SendInitialEvents = strconv.FormatUint(at, 10), nil
	opts.ResourceVersionMatch, opts.Predicate.AllowWatchBookmarks = "", true
	s.wg.Go(func() {
		defer cancel()
		var failed watch.Event
		if w, err := s.Interface.Watch(ctx, key.key, opts); err == nil {
			failed = s.handOn(g, w)
		}
		s.endGroup(key, g, failed)
	})
	return g
}

// handOn hands the events of w on to the members of g until they end. It returns the error
// that w began with, if it did: the version of g is too old.
func (s *sharedWatches) handOn(g *watchGroup, w watch.Interface) (failed watch.Event) {
	q := &eventQueue{more: loop.NewSignal()}
	s.wg.Go(func() { q.fill(w) })
	defer w.Stop()
	for first := true; ; first = false {
		e, ok := q.take()
		if !ok {
			return watch.Event{}
		}
		if e.Type == watch.Error && first {
			return e
		}
		at, err := s.Versioner().ObjectResourceVersion(e.Object)
		if err != nil || e.Type == watch.Error {
			return watch.Event{} // clients that begin again where they are will be told
		}
		s.mu.Lock()
		g.seen = at
		if e.Type != watch.Bookmark {
			g.last = at
			g.send(e)
		}
		s.mu.Unlock()
	}
}

// eventQueue holds events between two goroutines.
type eventQueue struct {
	mu     sync.Mutex
	events []watch.Event
	ended  bool
	more   loop.Signal // set if there is something new
}

// fill puts the events of w into the queue until they end or there are too many.
func (q *eventQueue) fill(w watch.Interface) {
	for e := range w.ResultChan() {
		if !q.put(e) {
			break
		}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended = true
	q.more.Set()
}

// put reports whether there is room for more.
func (q *eventQueue) put(e watch.Event) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.events = append(q.events, e)
	q.more.Set()
	return len(q.events) < sharedQueue
}

// take waits for the next event, and reports whether there is one.
func (q *eventQueue) take() (watch.Event, bool) {
	for {
		q.mu.Lock()
		if len(q.events) > 0 {
			e := q.events[0]
			q.events[0] = watch.Event{}
			if q.events = q.events[1:]; len(q.events) == 0 {
				q.events = nil
			}
			q.mu.Unlock()
			return e, true
		}
		ended := q.ended
		q.mu.Unlock()
		if ended {
			return watch.Event{}, false
		}
		<-q.more
	}
}

// send gives e, which is as new as g.last, to the members. The caller holds the lock of the storage.
func (g *watchGroup) send(e watch.Event) {
	_, shareable := e.Object.(runtime.CacheableObject)
	size := sync.OnceValue(func() int { return sizeOf(e.Object) })
	for i, w := range g.members {
		if i%sharedTurn == sharedTurn-1 {
			goruntime.Gosched()
		}
		if w.from >= g.last {
			continue
		}
		event := e
		if !shareable { // encoders may change it
			event.Object = e.Object.DeepCopyObject()
		}
		w.send(event, size)
	}
}

// sizeOf returns the size in bytes of an object: in protobuf, or in JSON for custom resources.
func sizeOf(o runtime.Object) int {
	if c, ok := o.(runtime.CacheableObject); ok {
		o = c.GetObject() // a copy, which shares its strings
	}
	switch o := o.(type) {
	case interface{ Size() int }:
		return o.Size()
	case json.Marshaler:
		text, err := o.MarshalJSON()
		if err == nil {
			return len(text)
		}
	}
	return 0
}

// endGroup ends the watches of g. Watches that began at the version of g get the error that g began with:
// without it they would begin there again and again.
func (s *sharedWatches) endGroup(key groupKey, g *watchGroup, failed watch.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.groups[key] == g {
		delete(s.groups, key)
	}
	for _, w := range g.members {
		w.in = nil
		w.stopTimer()
		if failed.Object != nil && w.from == g.last {
			w.send(watch.Event{Type: failed.Type, Object: failed.Object.DeepCopyObject()}, noSize)
		}
		w.end()
	}
	g.members = nil
}
