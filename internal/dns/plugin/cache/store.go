package cache

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/dns/plugin"
)

// key is what of a question decides its answer.
type key struct {
	name       string
	typ, class uint16
	do, cd     bool
}

func keyOf(q *plugin.Query, name string) key {
	return key{name, q.Type(), q.Question().Qclass, q.DO(), q.Msg.CheckingDisabled}
}

// entry is a kept answer. Its message is never changed.
type entry struct {
	msg      *mdns.Msg
	ttl      time.Duration
	stored   time.Time
	hits     atomic.Int64
	since    atomic.Int64 // of hits, in Unix nanoseconds
	fetching atomic.Bool
}

// left returns how long an entry is still fresh; negative for how long it has not been.
func (e *entry) left(now time.Time) time.Duration {
	return e.ttl - now.Sub(e.stored).Truncate(time.Second)
}

// used counts a use, and returns the number of uses without a pause of within.
func (e *entry) used(now time.Time, within time.Duration) int64 {
	if last := e.since.Swap(now.UnixNano()); now.UnixNano()-last > int64(within) {
		e.hits.Store(0)
	}
	return e.hits.Add(1)
}

// reply returns the answer to q with a TTL.
func (e *entry) reply(q *plugin.Query, ttl time.Duration) *mdns.Msg {
	m := e.msg.Copy()
	m.Id, m.Question = q.Msg.Id, []mdns.Question{*q.Question()}
	m.RecursionDesired, m.CheckingDisabled = q.Msg.RecursionDesired, q.Msg.CheckingDisabled
	if !q.DO() && !q.Msg.AuthenticatedData {
		m.AuthenticatedData = false
	}
	plugin.EachRR(m, func(rr mdns.RR) { rr.Header().Ttl = uint32(ttl / time.Second) })
	return m
}

// withoutOPT leaves OPT records out, which belong to one hop.
func withoutOPT(rrs []mdns.RR) (out []mdns.RR) {
	for _, rr := range rrs {
		if rr.Header().Rrtype != mdns.TypeOPT {
			out = append(out, rr)
		}
	}
	return out
}

const shards = 64

// store is a bounded table of entries. A full shard gives up any entry for a new one, as in CoreDNS.
type store struct {
	seed      maphash.Seed
	limit     int // of a shard
	shards    [shards]shard
	evictions atomic.Uint64
}

type shard struct {
	mu      sync.RWMutex
	entries map[key]*entry
}

func newStore(capacity int) *store {
	s := &store{seed: maphash.MakeSeed(), limit: max(4, capacity/shards)}
	for i := range s.shards {
		s.shards[i].entries = map[key]*entry{}
	}
	return s
}

func (s *store) shard(k key) *shard { return &s.shards[maphash.String(s.seed, k.name)%shards] }

func (s *store) get(k key) *entry {
	sh := s.shard(k)
	sh.mu.RLock()
	defer sh.mu.RUnlock()
	return sh.entries[k]
}

func (s *store) put(k key, e *entry) {
	sh := s.shard(k)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if _, ok := sh.entries[k]; !ok && len(sh.entries) >= s.limit {
		for old := range sh.entries {
			delete(sh.entries, old)
			s.evictions.Add(1)
			break
		}
	}
	sh.entries[k] = e
}

func (s *store) remove(k key) {
	sh := s.shard(k)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	delete(sh.entries, k)
}

func (s *store) len() (n int) {
	for i := range s.shards {
		s.shards[i].mu.RLock()
		n += len(s.shards[i].entries)
		s.shards[i].mu.RUnlock()
	}
	return n
}
