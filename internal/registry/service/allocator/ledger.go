package allocator

import (
	"sync"
	"time"
)

// holdLimit is how long a hold outlives a relist that does not show it: longer
// than any write takes.
const holdLimit = time.Minute

// ledger is what this server knows of the claims of one kind. It serves to
// choose candidates; the store decides.
//
// A key is known because a watch showed it, or because this server holds it: it
// has chosen it and is writing the claim. A watch event that shows a held key
// ends the hold; one that shows its deletion does not, since it is about an
// earlier claim. So whatever the order in which own writes and events arrive, a
// key that is claimed stays known. A held key that is not claimed yet may be
// forgotten when another server claimed it and released it in the meantime; at
// worst it is then chosen a second time here, and the store rejects one.
type ledger[K comparable] struct {
	mu sync.Mutex
	// known has a zero time for keys that a watch showed, and the start of the
	// hold for held ones.
	known map[K]time.Time
	// mark and unmark inform the pool that a key came or went. They are called
	// with mu held and must not call back.
	mark, unmark func(K)
}

func newLedger[K comparable](mark, unmark func(K)) *ledger[K] {
	return &ledger[K]{known: map[K]time.Time{}, mark: mark, unmark: unmark}
}

// hold calls choose, which marks a free key in the pool itself, and holds that.
func (l *ledger[K]) hold(choose func() (K, error)) (K, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k, err := choose()
	if err == nil {
		l.known[k] = time.Now()
	}
	return k, err
}

// drop ends a hold whose claim was not made, or was made and is gone again.
func (l *ledger[K]) drop(k K) { l.forget(k, false) }

// gone records that a watch showed the deletion of a claim.
func (l *ledger[K]) gone(k K) { l.forget(k, true) }

// forget removes k if it is known in the given way.
func (l *ledger[K]) forget(k K, seen bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if since, ok := l.known[k]; ok && since.IsZero() == seen {
		delete(l.known, k)
		l.unmark(k)
	}
}

// seen records that a watch showed a claim.
func (l *ledger[K]) seen(k K) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.see(k)
}

func (l *ledger[K]) see(k K) {
	if _, ok := l.known[k]; !ok {
		l.mark(k)
	}
	l.known[k] = time.Time{}
}

// replace records the result of a relist.
func (l *ledger[K]) replace(keys map[K]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for k := range keys {
		l.see(k)
	}
	for k, since := range l.known {
		if !keys[k] && (since.IsZero() || time.Since(since) > holdLimit) {
			delete(l.known, k)
			l.unmark(k)
		}
	}
}
