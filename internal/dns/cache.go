package dns

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
)

// cacheShards is a power of two.
const cacheShards = 64

// maxEntry is the largest answer that is kept, in bytes.
const maxEntry = 8 << 10

// cache has the answers of upstreams. Its size is bounded: new names evict old
// ones. Denials have their own store, so that random names do not evict
// existing ones.
type cache struct {
	seed             maphash.Seed
	success, denials store
	// stale is how many seconds an entry stays usable after it has expired.
	stale int64
}

// store is the entries of one kind.
type store struct {
	shards    [cacheShards]cacheShard
	perShard  int
	evictions atomic.Uint64
	hits      atomic.Uint64
}

type cacheShard struct {
	mu      sync.RWMutex
	entries map[string]*slot
	// ring has the slots in the order of the CLOCK algorithm: hand evicts the
	// first slot that was not used since it last passed.
	ring  []*slot
	hand  int
	bytes int
}

// slot is a place in the ring.
type slot struct {
	key  string
	e    *entry
	at   int
	used atomic.Bool
}

// newCache makes a cache of size entries of each kind, of one KiB each on
// average at most.
func newCache(size int, stale int64) *cache {
	c := &cache{seed: maphash.MakeSeed(), stale: stale}
	for _, s := range []*store{&c.success, &c.denials} {
		s.perShard = max(1, size/cacheShards)
		for i := range s.shards {
			s.shards[i].entries = map[string]*slot{}
		}
	}
	return c
}

// get returns the entry of a key, its age in seconds, and whether it has expired;
// nil if there is none.
func (c *cache) get(key []byte, now int64) (e *entry, age uint32, stale bool) {
	shard := maphash.Bytes(c.seed, key) % cacheShards
	for _, s := range []*store{&c.success, &c.denials} {
		sh := &s.shards[shard]
		sh.mu.RLock()
		sl := sh.entries[string(key)]
		sh.mu.RUnlock()
		if sl == nil {
			continue
		}
		if !sl.used.Load() {
			sl.used.Store(true)
		}
		e = sl.e
		a := max(0, now-e.stored)
		switch {
		case a < int64(e.ttl):
			s.hits.Add(1)
			return e, uint32(a), false
		case c.stale > 0 && a < int64(e.ttl)+c.stale && e.rcode != rcodeServFail:
			return e, uint32(a), true
		}
		// Unusable; the other store may have a newer one.
	}
	return nil, 0, false
}

// put adds an answer, in place of an earlier one of the key.
func (c *cache) put(key string, e *entry, now int64) {
	if e.ttl == 0 || e.size() > maxEntry {
		return
	}
	e.stored = now
	shard := maphash.String(c.seed, key) % cacheShards
	to, other := &c.success, &c.denials
	if e.negative {
		to, other = other, to
	}
	if e.rcode == rcodeServFail {
		other = nil // the earlier answer may still be served stale
	}
	if other != nil {
		other.shards[shard].remove(key)
	}
	to.evictions.Add(to.shards[shard].put(key, e, to.perShard))
}

func (sh *cacheShard) put(key string, e *entry, limit int) (evicted uint64) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if old := sh.entries[key]; old != nil {
		sl := &slot{key: key, e: e, at: old.at}
		sl.used.Store(true)
		sh.entries[key], sh.ring[old.at] = sl, sl
		sh.bytes += e.size() - old.e.size()
		return 0
	}
	for len(sh.ring) > 0 && (len(sh.ring) >= limit || sh.bytes+e.size() > limit<<10) {
		sh.evict()
		evicted++
	}
	sh.bytes += e.size()
	sl := &slot{key: key, e: e, at: len(sh.ring)}
	sh.entries[key] = sl
	sh.ring = append(sh.ring, sl)
	return evicted
}

// evict removes one slot, in at most two passes.
func (sh *cacheShard) evict() {
	for {
		sh.hand %= len(sh.ring)
		sl := sh.ring[sh.hand]
		if !sl.used.Swap(false) {
			sh.drop(sl)
			return
		}
		sh.hand++
	}
}

func (sh *cacheShard) remove(key string) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sl := sh.entries[key]; sl != nil {
		sh.drop(sl)
	}
}

func (sh *cacheShard) drop(sl *slot) {
	delete(sh.entries, sl.key)
	sh.bytes -= sl.e.size()
	last := len(sh.ring) - 1
	sh.ring[sl.at] = sh.ring[last]
	sh.ring[sl.at].at = sl.at
	sh.ring[last] = nil
	sh.ring = sh.ring[:last]
}

// len is the number of entries of a store.
func (s *store) len() int {
	n := 0
	for i := range s.shards {
		s.shards[i].mu.RLock()
		n += len(s.shards[i].ring)
		s.shards[i].mu.RUnlock()
	}
	return n
}
