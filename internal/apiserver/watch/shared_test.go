package watch

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// watchLog is a storage of events that are versions. Its watches begin after any version,
// each with a goroutine, and fall behind the others as that runs.
type watchLog struct {
	storage.Interface
	mu      sync.Mutex
	changed *sync.Cond
	oldest  int // watches that begin before it fail
	last    int
	ended   bool
	started int // watches that go on, and with begun all there were
	begun   int
}

func newWatchLog() *watchLog {
	l := &watchLog{}
	l.changed = sync.NewCond(&l.mu)
	return l
}

// Versioner is that of objects of the API.
func (*watchLog) Versioner() storage.Versioner { return storage.APIObjectVersioner{} }

// set runs f, and has the watches look.
func (l *watchLog) set(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
	l.changed.Broadcast()
}

// await waits until f is true.
func (l *watchLog) await(f func() bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !f() {
		l.changed.Wait()
	}
}

// Watch sends the events after the version, or a bookmark first if the objects are wanted.
func (l *watchLog) Watch(ctx context.Context, _ string, opts storage.ListOptions) (watch.Interface, error) {
	at, err := strconv.Atoi(opts.ResourceVersion)
	if err != nil {
		return nil, err
	}
	out := make(chan watch.Event)
	ctx, cancel := context.WithCancel(ctx)
	context.AfterFunc(ctx, func() { l.set(func() {}) })
	l.set(func() { l.started++; l.begun++ })
	go func() {
		defer l.set(func() { l.started-- })
		defer close(out)
		if opts.SendInitialEvents != nil {
			l.mu.Lock()
			at = l.last
			l.mu.Unlock()
			offer(ctx, out, watch.Bookmark, at)
		}
		l.mu.Lock()
		tooOld := at < l.oldest
		l.mu.Unlock()
		if tooOld {
			status := apierrors.NewResourceExpired("too old").Status()
			sendEvent(ctx, out, watch.Event{Type: watch.Error, Object: &status})
			return
		}
		for {
			l.await(func() bool { return l.last > at || l.ended || ctx.Err() != nil })
			if ctx.Err() != nil || l.last <= at {
				return
			}
			at++
			offer(ctx, out, watch.Modified, at)
		}
	}()
	return stopWatch{watch.NewProxyWatcher(out), cancel}, nil
}

// offer sends an event of an object.
func offer(ctx context.Context, out chan<- watch.Event, kind watch.EventType, version int) {
	sendEvent(ctx, out, watch.Event{Type: kind, Object: versioned(version)})
}

func sendEvent(ctx context.Context, out chan<- watch.Event, e watch.Event) {
	select {
	case out <- e:
	case <-ctx.Done():
	}
}

func versioned(version int) runtime.Object {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{ResourceVersion: fmt.Sprint(version)}}
}

// stopWatch is a watch that its context ends.
type stopWatch struct {
	watch.Interface
	cancel context.CancelFunc
}

// Stop ends it.
func (w stopWatch) Stop() { w.cancel() }

// served is the context of a request for a watch on a connection.
func served(ctx context.Context, client string) context.Context {
	return context.WithValue(ctx, guardKey{}, &stallGuard{client: client})
}

// sharedLog returns a log with shared watches, and a function that begins one.
func sharedLog(t *testing.T) (*watchLog, *sharedWatches, func(ctx context.Context, client string, at int, list bool) watch.Interface) {
	l := newWatchLog()
	s := shareWatches(l, func() runtime.Object { return &corev1.ConfigMap{} })
	return l, s, func(ctx context.Context, client string, at int, list bool) watch.Interface {
		opts := storage.ListOptions{ResourceVersion: fmt.Sprint(at), Recursive: true, Predicate: storage.SelectionPredicate{
			Label: labels.Everything(), Field: fields.Everything(), AllowWatchBookmarks: true}}
		if list {
			opts.SendInitialEvents = new(true)
		}
		w, err := s.Watch(served(ctx, client), "/configmaps/", opts)
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
}

// versionOf returns the version of an event's object.
func versionOf(t *testing.T, e watch.Event) int {
	n, err := strconv.Atoi(e.Object.(*corev1.ConfigMap).ResourceVersion)
	if err != nil {
		t.Error(err)
	}
	return n
}

// Each watch has every event after the version it began at, once and in order, wherever it
// begins while events come, and in the end all of them share one watch.
func TestSharedWatchesHaveEveryEvent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const watches, events = 60, 400
		l, s, begin := sharedLog(t)
		defer s.close()
		l.set(func() { l.last = 50 })
		var wg sync.WaitGroup
		var all [watches]watch.Interface
		for i := range watches {
			wg.Go(func() {
				time.Sleep(rand.N(events * time.Millisecond))
				l.mu.Lock()
				at := 1 + rand.IntN(l.last)
				l.mu.Unlock()
				all[i] = begin(t.Context(), fmt.Sprint("client-", i%7), at, i%3 == 0)
				readLog(t, all[i], at, 50+events, i%3 == 0)
			})
		}
		for range events {
			time.Sleep(rand.N(2 * time.Millisecond))
			l.set(func() { l.last++ })
		}
		wg.Wait()
		synctest.Wait()
		if l.started != 1 || l.begun <= watches {
			t.Errorf("%d watches of %d go on below", l.started, l.begun)
		}
		for _, w := range all {
			w.Stop()
		}
	})
}

// readLog reads the events after at, up to last, now and then slowly.
func readLog(t *testing.T, w watch.Interface, at, last int, list bool) {
	for at < last {
		e := <-w.ResultChan()
		switch v := versionOf(t, e); {
		case e.Type == watch.Bookmark && list:
			at, list = v, false
		case v != at+1:
			t.Errorf("%s of version %d after %d", e.Type, v, at)
			return
		default:
			at = v
		}
		if rand.IntN(8) == 0 {
			time.Sleep(rand.N(20 * time.Millisecond))
		}
	}
}

// A watch that is ahead of the others has no event that its client has had.
func TestSharedWatchIsAhead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, s, begin := sharedLog(t)
		defer s.close()
		l.set(func() { l.last = 3 })
		first := begin(t.Context(), "a", 3, false)
		synctest.Wait()
		ahead := begin(t.Context(), "b", 5, false)
		synctest.Wait()
		for range 3 {
			l.set(func() { l.last++ })
		}
		readLog(t, first, 3, 6, false)
		readLog(t, ahead, 5, 6, false)
		first.Stop()
		ahead.Stop()
	})
}

// A client that does not read holds up neither the others nor the storage, and ends when too
// much waits for it; what waited before comes first.
func TestSharedWatchEndsSlow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const events = sharedBacklog + 5*sharedBuffer
		l, s, begin := sharedLog(t)
		defer s.close()
		hostile, other := begin(t.Context(), "hostile", 1, false), begin(t.Context(), "other", 1, false)
		l.set(func() { l.last = 1 })
		synctest.Wait()
		before := time.Now()
		for i := range events {
			l.set(func() { l.last++ })
			if v := versionOf(t, <-other.ResultChan()); v != i+2 {
				t.Fatalf("version %d instead of %d", v, i+2)
			}
		}
		if took := time.Since(before); took > 0 {
			t.Errorf("the other client waited %s", took)
		}
		n := 0
		for e := range hostile.ResultChan() {
			if n++; versionOf(t, e) != n+1 {
				t.Fatalf("version %d after %d", versionOf(t, e), n)
			}
		}
		if n > sharedBuffer+1 {
			t.Errorf("%d events came after the end", n)
		}
		hostile.Stop()
		other.Stop()
		synctest.Wait()
		if l.started != 0 || len(s.groups) != 0 {
			t.Errorf("%d watches and %d groups are left", l.started, len(s.groups))
		}
	})
}

// A watch has a bookmark each minute and one before its time is over, with the version that
// it has reached.
func TestSharedWatchBookmarks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, s, begin := sharedLog(t)
		defer s.close()
		ctx, cancel := context.WithTimeout(t.Context(), 150*time.Second)
		defer cancel()
		l.set(func() { l.last = 7 })
		w := begin(ctx, "client", 7, false)
		defer w.Stop()
		started := time.Now()
		var got []time.Duration
		for e := range w.ResultChan() {
			if v := versionOf(t, e); e.Type != watch.Bookmark || v != 7 {
				t.Errorf("%s of version %d", e.Type, v)
			}
			got = append(got, time.Since(started))
		}
		if want := []time.Duration{time.Minute, 2 * time.Minute, 148 * time.Second}; !slices.Equal(got, want) {
			t.Errorf("bookmarks after %s, want %s", got, want)
		}
		if after := time.Since(started); after != 150*time.Second {
			t.Errorf("ended after %s", after)
		}
	})
}

// The watches end with the one that they share, and can begin again; nothing is left when
// the storage is closed.
func TestSharedWatchesEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, s, begin := sharedLog(t)
		l.set(func() { l.last = 3 })
		for range 3 {
			a, b := begin(t.Context(), "a", 3, false), begin(t.Context(), "b", 3, true)
			if e := <-b.ResultChan(); e.Type != watch.Bookmark {
				t.Errorf("%s before the bookmark", e.Type)
			}
			synctest.Wait()
			l.set(func() { l.ended = true })
			for _, w := range []watch.Interface{a, b} {
				if e, ok := <-w.ResultChan(); ok {
					t.Errorf("%s after the end", e.Type)
				}
				w.Stop()
			}
			l.set(func() { l.ended = false })
		}
		w := begin(t.Context(), "a", 3, false)
		synctest.Wait()
		s.close()
		if _, ok := <-w.ResultChan(); ok {
			t.Error("a watch goes on after its storage")
		}
		w.Stop()
		late := begin(t.Context(), "a", 3, false)
		if _, ok := <-late.ResultChan(); ok {
			t.Error("a watch begins after its storage")
		}
		late.Stop()
	})
}

// A watch from a version that is too old is told so, and not ended without a word: its client
// would begin there again. One that began at a later version is ended, and may begin again.
func TestSharedWatchIsTooOld(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, s, begin := sharedLog(t)
		defer s.close()
		l.set(func() { l.last, l.oldest = 9, 5 })
		for range 3 {
			old := []watch.Interface{begin(t.Context(), "a", 3, false), begin(t.Context(), "b", 3, false)}
			synctest.Wait()
			later := begin(t.Context(), "c", 7, false)
			for _, w := range old {
				e := <-w.ResultChan()
				if err := apierrors.FromObject(e.Object); e.Type != watch.Error || !apierrors.IsResourceExpired(err) {
					t.Errorf("%s: %v", e.Type, err)
				}
				if e, ok := <-w.ResultChan(); ok {
					t.Errorf("%s after the end", e.Type)
				}
				w.Stop()
			}
			for at := 7; ; {
				e, ok := <-later.ResultChan()
				if ok && e.Type != watch.Modified {
					t.Fatalf("%s of one that is not too old", e.Type)
				}
				if ok {
					at = versionOf(t, e)
				}
				if at == 9 {
					break
				}
				if !ok {
					later.Stop()
					later = begin(t.Context(), "c", at, false)
				}
			}
			later.Stop()
		}
	})
}

// Watches with a selector, of one object, of no client or without a version are those of the
// storage.
func TestWatchesThatAreNotShared(t *testing.T) {
	t.Parallel()
	l, s, _ := sharedLog(t)
	defer s.close()
	all := storage.SelectionPredicate{Label: labels.Everything(), Field: fields.Everything()}
	some := all
	some.Label = labels.SelectorFromSet(labels.Set{"app": "a"})
	client := served(t.Context(), "client")
	for name, c := range map[string]struct {
		ctx  context.Context
		opts storage.ListOptions
	}{
		"selector": {client, storage.ListOptions{ResourceVersion: "1", Recursive: true, Predicate: some}},
		"object":   {client, storage.ListOptions{ResourceVersion: "1", Predicate: all}},
		"inside":   {t.Context(), storage.ListOptions{ResourceVersion: "1", Recursive: true, Predicate: all}},
		"no start": {client, storage.ListOptions{ResourceVersion: "0", Recursive: true, Predicate: all}},
	} {
		w, err := s.Watch(c.ctx, "/configmaps/", c.opts)
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := w.(stopWatch); !ok {
			t.Errorf("%s: %T", name, w)
		}
		w.Stop()
	}
	l.await(func() bool { return l.started == 0 })
}
