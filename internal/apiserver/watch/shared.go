// Package watch makes watches cheap for a server with thousands of them: watches of the same objects share
// one of the watch cache, an event is written in one piece and past the filters of the response, and a client that does not read is
// cut off.
package watch

import (
	"cmp"
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

// sharedWatch is one client's watch. Until it is a member of its group, it gets the its own events watch of
// the cache.
type sharedWatch struct {
	storage  *sharedWatches
	group    groupKey
	client   string // the connection
	opts     storage.ListOptions
	deadline time.Time // of the request; zero for none
	forget   func() bool

	wg   sync.WaitGroup
	out  chan watch.Event
	done chan struct{} // closed when left

	// With the lock of the storage.
	left  bool
	in    *watchGroup // nil for none
	from  uint64      // no event up to this version is for it
	timer *time.Timer // of the next bookmark; nil for none

	mu     sync.Mutex
	behind []waitingEvent // for which out had no room
	bytes  int            // of behind
	slow   bool           // a goroutine sends behind, and then closes out if ended
	ended  bool
}

// noSize is the size of what is small.
func noSize() int { return 0 }

// waitingEvent is an event with its size in bytes.
type waitingEvent struct {
	watch.Event
	size int
}

// compareWatches orders watches by connection.
func compareWatches(a, b *sharedWatch) int { return cmp.Compare(a.client, b.client) }

// ResultChan returns the channel of the events.
func (w *sharedWatch) ResultChan() <-chan watch.Event { return w.out }

// Stop ends the watch and waits for its goroutines.
func (w *sharedWatch) Stop() {
	w.forget()
	w.leave()
	w.wg.Wait()
}

// leave takes w out of its group and ends its goroutines.
func (w *sharedWatch) leave() {
	s := w.storage
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.left {
		return
	}
	w.left = true
	close(w.done)
	w.stopTimer()
	g := w.in
	if g == nil {
		return
	}
	w.in = nil
	w.end()
	if i := g.index(w); i >= 0 {
		g.members = slices.Delete(g.members, i, i+1)
	}
	if len(g.members) == 0 {
		delete(s.groups, w.group)
		g.stop()
	}
}

// index returns where w is among the members, or -1. The caller holds the lock of the storage.
func (g *watchGroup) index(w *sharedWatch) int {
	i, _ := slices.BinarySearchFunc(g.members, w, compareWatches)
	for ; i < len(g.members) && g.members[i].client == w.client; i++ {
		if g.members[i] == w {
			return i
		}
	}
	return -1
}

// follow sends the events of own until the group can go on: at is the version up to which
// the client has its events, 0 while that is not known.
func (w *sharedWatch) follow(own watch.Interface, at uint64) {
	defer own.Stop()
	for at == 0 || !w.storage.join(w, at) {
		select {
		case e, ok := <-own.ResultChan():
			if !ok {
				w.end()
				return
			}
			version, err := w.storage.Versioner().ObjectResourceVersion(e.Object)
			if err == nil && e.Type != watch.Error && (at > 0 || e.Type == watch.Bookmark) {
				at = version
			}
			select {
			case w.out <- e:
				continue
			case <-w.done:
			}
		case <-w.done:
		}
		w.end()
		return
	}
}

// send sends e, which has that size, without waiting. The caller holds the lock of the storage, and w is in a group.
func (w *sharedWatch) send(e watch.Event, size func() int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return
	}
	if !w.slow {
		select {
		case w.out <- e:
			return
		default:
		}
		w.slow = true
		w.wg.Go(w.catchUp)
	}
	w.behind = append(w.behind, waitingEvent{e, size()})
	w.bytes += size()
	if len(w.behind) > sharedBacklog || len(w.behind) > 1 && w.bytes > sharedBacklogBytes {
		w.ended, w.behind, w.bytes = true, nil, 0
		stalledResponses().Inc()
	}
}

// catchUp sends what is behind.
func (w *sharedWatch) catchUp() {
	for {
		w.mu.Lock()
		if len(w.behind) == 0 {
			w.slow, w.behind = false, nil
			if w.ended {
				close(w.out)
			}
			w.mu.Unlock()
			return
		}
		e := w.behind[0]
		w.behind[0] = waitingEvent{}
		w.behind, w.bytes = w.behind[1:], w.bytes-e.size
		w.mu.Unlock()
		select {
		case w.out <- e.Event:
		case <-w.done:
			close(w.out)
			return
		}
	}
}

// end closes the channel after the events that wait.
func (w *sharedWatch) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended && !w.slow {
		close(w.out)
	}
	w.ended = true
}

// bookmark sends a bookmark and sets the time of the next.
func (w *sharedWatch) bookmark() {
	w.storage.mu.Lock()
	defer w.storage.mu.Unlock()
	if w.in == nil {
		return
	}
	object := w.storage.newObject()
	if err := w.storage.Versioner().UpdateObject(object, max(w.from, w.in.seen)); err != nil {
		return // no object of the API; it had no bookmark before either
	}
	w.send(watch.Event{Type: watch.Bookmark, Object: object}, noSize)
	w.setBookmark()
}

// setBookmark sets the time of the next bookmark, if the watch gets another one. The caller holds the lock of the
// storage.
func (w *sharedWatch) setBookmark() {
	wait := bookmarkPeriod
	if !w.deadline.IsZero() {
		wait = min(wait, time.Until(w.deadline)-bookmarkLead)
	}
	switch {
	case !w.opts.Predicate.AllowWatchBookmarks || wait <= 0:
	case w.timer == nil:
		w.timer = time.AfterFunc(wait, w.bookmark)
	default:
		w.timer.Reset(wait)
	}
}

// stopTimer stops the timer of bookmarks. The caller holds the lock of the storage.
func (w *sharedWatch) stopTimer() {
	if w.timer != nil {
		w.timer.Stop()
	}
}
