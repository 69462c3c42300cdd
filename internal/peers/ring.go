// Package peers decides who watches whom among the machines of a cluster, when one of them
// counts as unreachable for another one, and when the reports of several are enough to act.
// It knows no clock, socket or API.
package peers

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"
)

// Watchers is how many others watch each machine, if there are as many.
const Watchers = 3

// MaxAsked is how many others a machine asks at most. A question costs it some 20 µs and 60 bytes a second.
const MaxAsked = 64

// Ring is an order of the members of a cluster that all of them compute alike from the names:
// a circle by the hash of each. A member is watched by the next ones of the circle, so that each
// is watched by Watchers others and watches as many, and one that comes or goes
// changes this only for its neighbours. The zero Ring is empty.
type Ring struct{ order []place }

type place struct {
	hash uint64
	name string
}

// at returns the place of a name.
func at(name string) place {
	sum := sha256.Sum256([]byte(name))
	return place{binary.BigEndian.Uint64(sum[:]), name}
}

func compare(a, b place) int { return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.name, b.name)) }

// NewRing returns the ring of members, each given once.
func NewRing(members []string) Ring {
	r := Ring{make([]place, 0, len(members))}
	for _, name := range members {
		r.order = append(r.order, at(name))
	}
	slices.SortFunc(r.order, compare)
	return r
}

// Len returns the number of members.
func (r Ring) Len() int { return len(r.order) }

// Has reports whether name is a member.
func (r Ring) Has(name string) bool {
	_, found := slices.BinarySearchFunc(r.order, at(name), compare)
	return found
}

// WatchersOf returns who watches a member, the nearest first; none for others.
func (r Ring) WatchersOf(name string) []string { return r.neighbours(name, 1, Watchers) }

// WatchedBy returns whom a member watches; none for others.
func (r Ring) WatchedBy(name string) []string { return r.neighbours(name, -1, Watchers) }

// AskedBy returns whom a member asks whether it reaches them, to choose its own ways: all others of a cluster of up to
// MaxAsked others, else so many. Those that it watches come first.
func (r Ring) AskedBy(name string) []string { return r.neighbours(name, -1, MaxAsked) }

func (r Ring) neighbours(of string, step, limit int) []string {
	i, found := slices.BinarySearchFunc(r.order, at(of), compare)
	if !found {
		return nil
	}
	n := len(r.order)
	var out []string
	for range min(limit, n-1) {
		i = (i + step + n) % n
		out = append(out, r.order[i].name)
	}
	return out
}
