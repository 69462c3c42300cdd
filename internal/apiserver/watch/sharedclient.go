package watch

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// sharedWatch is one client's watch. Until it is a member of its group, it gets its events from a watch
// of the cache of its own.
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
