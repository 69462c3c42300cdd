package iptables

import (
	"bytes"
	"math/bits"
	"slices"
)

// A packet finds its frontend in a tree of chains. Each inner chain looks at
// the next few bits that differ among the frontends below it, and goes on to
// the chain for them; a leaf has the rules of a few frontends one after the
// other. What the tree looks like depends only on its content, not on how it
// came to be so.

const (
	// stride is how many bits an inner chain looks at. Fewer make more chains,
	// which iptables-nft-restore pays for (README.md has figures), more make
	// longer ones, which packets pay for.
	stride = 3
	fanOut = 1 << stride
	// leafRules is how many rules a leaf of several frontends may have.
	leafRules = 48
)

// treeKey is what a tree orders items by, first bit first.
type treeKey [19]byte

func (k *treeKey) bit(i int) byte { return k[i/8] >> (7 - i%8) & 1 }

func (k *treeKey) setBits(at, n int, v uint32) {
	for i := range n {
		k[(at+i)/8] |= byte(v>>(n-1-i)&1) << (7 - (at+i)%8)
	}
}

// chunk is the stride bits at a place.
func (k *treeKey) chunk(at int) int {
	v := 0
	for i := range stride {
		v = v<<1 | int(k.bit(at+i))
	}
	return v
}

// prefix is the key with all bits from n on cleared.
func (k treeKey) prefix(n int) treeKey {
	for i := (n + 7) / 8; i < len(k); i++ {
		k[i] = 0
	}
	if r := n % 8; r != 0 {
		k[n/8] &= 0xff << (8 - r)
	}
	return k
}

// common is how many bits two keys share, in whole strides.
func common(a, b *treeKey) int {
	for i := range a {
		if x := a[i] ^ b[i]; x != 0 {
			n := i*8 + bits.LeadingZeros8(x)
			return n - n%stride
		}
	}
	return len(a) * 8 / stride * stride
}

// item is what a leaf has rules for.
type item interface {
	key() *treeKey
	// weight is how many rules it takes.
	weight() int
	// guarded reports whether packets sent to its address, but to no item of the
	// tree, has a rule too.
	guarded() bool
}

// tree is a tree of chains. It collects the names of the chains that may have
// changed.
type tree[T item] struct {
	root  *node[T]
	name  func(slot treeKey, bits int) string
	nodes map[string]*node[T]
	dirty map[string]bool
}

// node is a chain, or a part of one: leaves side by side share a chain if they
// are small.
type node[T item] struct {
	up   *node[T]
	name string
	// slot is what the keys of all items below begin with.
	slot     treeKey
	slotBits int

	inner bool
	items []T // of a leaf, by key
	// at is the first of the bits an inner node looks at.
	at   int
	kids [fanOut]*node[T]

	count, weight, guarded int
}

func newTree[T item](root string, name func(treeKey, int) string) *tree[T] {
	t := &tree[T]{name: name, nodes: map[string]*node[T]{}, dirty: map[string]bool{}}
	t.root = &node[T]{name: root}
	t.nodes[root] = t.root
	t.dirty[root] = true
	return t
}

// put adds an item, or replaces the one with its key.
func (t *tree[T]) put(it T) { t.change(t.root, it, true) }

// remove removes the item with its key, which is there.
func (t *tree[T]) remove(it T) { t.change(t.root, it, false) }

func (t *tree[T]) change(n *node[T], it T, put bool) {
	switch {
	case !n.inner:
		i, found := slices.BinarySearchFunc(n.items, it, compareItems)
		switch {
		case found && put:
			n.items[i] = it
		case found:
			n.items = slices.Delete(n.items, i, i+1)
		case put:
			n.items = slices.Insert(n.items, i, it)
		}
	default:
		if c := common(it.key(), &n.slotOfKids().slot); put && c < n.at {
			t.raise(n, c)
		}
		k := it.key().chunk(n.at)
		if n.kids[k] == nil {
			n.kids[k] = t.kid(n, *it.key())
		}
		t.change(n.kids[k], it, put)
		if n.kids[k].count == 0 {
			t.drop(n.kids[k])
			n.kids[k] = nil
		}
	}
	t.settle(n)
}

func compareItems[T item](a, b T) int { return bytes.Compare(a.key()[:], b.key()[:]) }

// slotOfKids is any kid: their slots share the bits before n.at.
func (n *node[T]) slotOfKids() *node[T] {
	for _, k := range n.kids {
		if k != nil {
			return k
		}
	}
	return n
}

// kid makes the empty leaf for keys like k below an inner node.
func (t *tree[T]) kid(n *node[T], k treeKey) *node[T] {
	c := &node[T]{up: n, slotBits: n.at + stride}
	c.slot = k.prefix(c.slotBits)
	c.name = t.name(c.slot, c.slotBits)
	t.nodes[c.name] = c
	t.dirty[c.name] = true
	return c
}

// drop forgets a node.
func (t *tree[T]) drop(n *node[T]) {
	t.dirty[n.name] = true
	if t.nodes[n.name] == n {
		delete(t.nodes, n.name)
	}
}

// raise makes n look at earlier bits, with what it was as its only kid.
func (t *tree[T]) raise(n *node[T], at int) {
	old := *n
	n.at, n.kids = at, [fanOut]*node[T]{}
	below := t.kid(n, old.slotOfKids().slot)
	below.inner, below.at, below.kids = true, old.at, old.kids
	for _, k := range below.kids {
		if k != nil {
			k.up = below
		}
	}
	below.sum()
	n.kids[below.slot.chunk(at)] = below
}

func (n *node[T]) sum() {
	n.count, n.weight, n.guarded = 0, 0, 0
	if !n.inner {
		n.count = len(n.items)
		for _, it := range n.items {
			n.weight += it.weight()
			if it.guarded() {
				n.guarded++
			}
		}
		return
	}
	for _, k := range n.kids {
		if k != nil {
			n.count += k.count
			n.weight += k.weight
			n.guarded += k.guarded
		}
	}
}

// settle makes n the kind of node that its items ask for.
func (t *tree[T]) settle(n *node[T]) {
	n.sum()
	leaf := n.weight <= leafRules || n.count < 2
	switch {
	case leaf && n.inner:
		items := n.all(nil)
		t.dropKids(n)
		n.inner, n.kids, n.items = false, [fanOut]*node[T]{}, items
	case !leaf && !n.inner:
		t.split(n)
	case !leaf:
		t.lower(n)
	}
	t.touch(n)
}

// split makes a leaf an inner node.
func (t *tree[T]) split(n *node[T]) {
	items := n.items
	n.inner, n.items = true, nil
	n.at = common(items[0].key(), items[len(items)-1].key())
	for _, it := range items {
		k := it.key().chunk(n.at)
		if n.kids[k] == nil {
			n.kids[k] = t.kid(n, *it.key())
		}
		n.kids[k].items = append(n.kids[k].items, it)
	}
	for _, k := range n.kids {
		if k != nil {
			t.settle(k)
		}
	}
}

// lower makes an inner node with a single kid look at the bits that kid does.
func (t *tree[T]) lower(n *node[T]) {
	only := n.slotOfKids()
	if !only.inner || only.count != n.count {
		return
	}
	t.drop(only)
	n.at, n.kids = only.at, only.kids
	for _, k := range n.kids {
		if k != nil {
			k.up = n
		}
	}
}

func (t *tree[T]) dropKids(n *node[T]) {
	for _, k := range n.kids {
		if k != nil {
			t.dropKids(k)
			t.drop(k)
		}
	}
}

func (n *node[T]) all(to []T) []T {
	to = append(to, n.items...)
	for _, k := range n.kids {
		if k != nil {
			to = k.all(to)
		}
	}
	return to
}

// touch marks n's chain dirty, and the chains of its kids, which may share theirs
// otherwise than before.
func (t *tree[T]) touch(n *node[T]) {
	t.dirty[n.name] = true
	for _, k := range n.kids {
		if k != nil && !k.inner {
			t.dirty[k.name] = true
		}
	}
}

// branch is where an inner chain sends keys with a slot.
type branch[T item] struct {
	slot *node[T]
	to   string
}

// branches are the slots of an inner node, and the chains for them: as many
// leaves in a row share the first one's as have room there.
func (n *node[T]) branches() []branch[T] {
	var out []branch[T]
	var first *node[T]
	room := 0
	for _, k := range n.kids {
		switch {
		case k == nil:
			continue
		case k.inner || k.weight > leafRules:
			first = nil
			out = append(out, branch[T]{k, k.name})
			continue
		case first == nil || k.weight > room:
			first, room = k, leafRules
		}
		room -= k.weight
		out = append(out, branch[T]{k, first.name})
	}
	return out
}

// chain returns the desired content of the chain called name: the slots of an inner
// one or the items of a leaf. It is not there (ok is false) if nothing asks for
// it.
func (t *tree[T]) chain(name string) (n *node[T], slots []branch[T], items []T, ok bool) {
	n = t.nodes[name]
	switch {
	case n == nil:
		return nil, nil, nil, false
	case n.inner:
		return n, n.branches(), nil, true
	case n.up == nil:
		return n, nil, n.items, true
	}
	for _, br := range n.up.branches() {
		if br.to == name {
			items = append(items, br.slot.items...)
		}
	}
	return n, nil, items, len(items) > 0
}
