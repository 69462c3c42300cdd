package zone

import (
	"hash/maphash"
	"sync/atomic"
)

// index maps names to their records. One writer at a time, any number of
// readers that never wait and never write to shared memory.
//
// It is a hash table with chains. Readers may stand on a node while it is
// unlinked: its next still leads on. Another size makes new nodes, since a node
// cannot be in the chains of two tables.
type index struct {
	seed  maphash.Seed
	table atomic.Pointer[[]atomic.Pointer[node]]
	count int // of the writer
}

// node is one name. Only the writer stores to next and recs.
type node struct {
	key  string
	hash uint64
	next atomic.Pointer[node]
	recs atomic.Pointer[records]
}

const firstTableSize = 1 << 8

func newIndex() *index {
	ix := &index{seed: maphash.MakeSeed()}
	t := make([]atomic.Pointer[node], firstTableSize)
	ix.table.Store(&t)
	return ix
}

// find returns the records of a name, or nil if it does not exist.
func (ix *index) find(key []byte) *records {
	h := maphash.Bytes(ix.seed, key)
	t := *ix.table.Load()
	for n := t[h&uint64(len(t)-1)].Load(); n != nil; n = n.next.Load() {
		if n.hash == h && n.key == string(key) {
			return n.recs.Load()
		}
	}
	return nil
}

// node returns the node of a key, the pointer that leads to it, and the key's
// hash.
func (ix *index) node(key string) (*node, *atomic.Pointer[node], uint64) {
	h := maphash.String(ix.seed, key)
	t := *ix.table.Load()
	link := &t[h&uint64(len(t)-1)]
	for n := link.Load(); n != nil; n = link.Load() {
		if n.hash == h && n.key == key {
			return n, link, h
		}
		link = &n.next
	}
	return nil, nil, h
}

// get is find for the writer, which has its keys as strings.
func (ix *index) get(key string) *records {
	if n, _, _ := ix.node(key); n != nil {
		return n.recs.Load()
	}
	return nil
}

// set stores the records of a name, which must not be nil; false if it has the
// same already.
func (ix *index) set(key string, r *records) bool {
	n, _, h := ix.node(key)
	if n != nil {
		if n.recs.Load().equal(r) {
			return false
		}
		n.recs.Store(r)
		return true
	}
	t := *ix.table.Load()
	if ix.count >= len(t) {
		t = ix.resize(2 * len(t))
	}
	n = &node{key: key, hash: h}
	n.recs.Store(r)
	head := &t[h&uint64(len(t)-1)]
	n.next.Store(head.Load())
	head.Store(n)
	ix.count++
	return true
}

// remove takes a name out; one that is not there is no error.
func (ix *index) remove(key string) {
	if n, link, _ := ix.node(key); n != nil {
		link.Store(n.next.Load())
		ix.count--
	}
}

// reserve makes room for n names at once.
func (ix *index) reserve(n int) {
	have := len(*ix.table.Load())
	size := have
	for size < n {
		size *= 2
	}
	if size > have {
		ix.resize(size)
	}
}

// resize makes a table of another size, a power of two.
func (ix *index) resize(size int) []atomic.Pointer[node] {
	old := *ix.table.Load()
	t := make([]atomic.Pointer[node], size)
	for i := range old {
		for n := old[i].Load(); n != nil; n = n.next.Load() {
			c := &node{key: n.key, hash: n.hash}
			c.recs.Store(n.recs.Load())
			head := &t[c.hash&uint64(len(t)-1)]
			c.next.Store(head.Load())
			head.Store(c)
		}
	}
	ix.table.Store(&t)
	return t
}

// each calls f for every name, in no order.
func (ix *index) each(f func(key string, r *records)) {
	t := *ix.table.Load()
	for i := range t {
		for n := t[i].Load(); n != nil; n = n.next.Load() {
			f(n.key, n.recs.Load())
		}
	}
}
