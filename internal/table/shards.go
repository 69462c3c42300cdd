package table

import (
	"hash/maphash"
	"iter"
)

// shardCount bounds the cost of one change to a Table: 1/1024 of its ports are
// copied. At 50,000 ports that is about fifty pointers.
const shardCount = 1024

var shardSeed = maphash.MakeSeed()

// shards is a persistent map: with and without return a changed copy that
// shares all untouched shards with the original.
type shards struct {
	maps [](map[Key]*ServicePort) // nil, or shardCount long
	n    int
}

func shardOf(k Key) int {
	return int(maphash.Comparable(shardSeed, k) % shardCount)
}

func (s shards) len() int { return s.n }

func (s shards) get(k Key) *ServicePort {
	if s.maps == nil {
		return nil
	}
	return s.maps[shardOf(k)][k]
}

func (s shards) all() iter.Seq[*ServicePort] {
	return func(yield func(*ServicePort) bool) {
		for _, m := range s.maps {
			for _, p := range m {
				if !yield(p) {
					return
				}
			}
		}
	}
}

// with returns s with k set to p; a nil p removes k.
func (s shards) with(k Key, p *ServicePort) shards {
	e := s.edit()
	e.set(k, p)
	return e.done()
}

// edit starts a batch of changes, in which each shard is copied once at most.
func (s shards) edit() *shardsEdit {
	e := &shardsEdit{shards: shards{maps: make([]map[Key]*ServicePort, shardCount), n: s.n}}
	copy(e.maps, s.maps)
	return e
}

type shardsEdit struct {
	shards
	owned [shardCount]bool
}

func (e *shardsEdit) set(k Key, p *ServicePort) {
	i := shardOf(k)
	if !e.owned[i] {
		fresh := make(map[Key]*ServicePort, len(e.maps[i])+1)
		for k, v := range e.maps[i] {
			fresh[k] = v
		}
		e.maps[i], e.owned[i] = fresh, true
	}
	_, had := e.maps[i][k]
	switch {
	case p == nil && had:
		delete(e.maps[i], k)
		e.n--
	case p != nil:
		e.maps[i][k] = p
		if !had {
			e.n++
		}
	}
}

func (e *shardsEdit) done() shards { return e.shards }
