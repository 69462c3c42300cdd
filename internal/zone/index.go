package zone

import (
	"hash/maphash"
	"sync/atomic"
)

// index maps names to their records. One writer at a time, any number of
// readers that never wait and never write to shared memory.
//
// It is a hash table with chains. Readers may stand on a node while it is
// unlinked: its next still leads on. Growing makes new nodes, since a node
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

// get is find for the writer, which has its keys as strings.
func (ix *index) get(key string) *records {
	if n, _ := ix.node(key); n != nil {
		return n.recs.Load()
	}
	return nil
}

// node returns the node of a key and the pointer that leads to it.
func (ix *index) node(key string) (*node, *atomic.Pointer[node]) {
	h := maphash.String(ix.seed, key)
	t := *ix.table.Load()
	link := &t[h&uint64(len(t)-1)]
	for n := link.Load(); n != nil; n = link.Load() {
		if n.hash == h && n.key == key {
			return n, link
		}
		link = &n.next
	}
	return nil, nil
}

// set stores the records of a name, which must not be nil.
func (ix *index) set(key string, r *records) {
	if n, _ := ix.node(key); n != nil {
		n.recs.Store(r)
		return
	}
	t := *ix.table.Load()
	if ix.count >= len(t) {
		t = ix.grow(t)
	}
	n := &node{key: key, hash: maphash.String(ix.seed, key)}
	n.recs.Store(r)
	head := &t[n.hash&uint64(len(t)-1)]
	n.next.Store(head.Load())
	head.Store(n)
	ix.count++
}

// remove takes a name out; one that is not there is no error.
func (ix *index) remove(key string) {
	if n, link := ix.node(key); n != nil {
		link.Store(n.next.Load())
		ix.count--
	}
}

func (ix *index) grow(old []atomic.Pointer[node]) []atomic.Pointer[node] {
	t := make([]atomic.Pointer[node], 2*len(old))
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
