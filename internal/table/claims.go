package table

import (
	"iter"
	"time"
)

// Claims is who wants what, for things that only one can have: the first of
// the Services that want it, by the order that NewClaims is given, is its owner. It is
// the one implementation of that rule. The Builder uses it to decide which
// Service has an address, a data plane to decide which of the service ports that
// it has planned is written at one, and mode ipvs to decide which frontend has a
// virtual server.
//
// Nearly everything is wanted by one only; that costs no list.
type Claims[K, C comparable] struct {
	before func(a, b C) bool
	of     map[K]claim[C]
}

type claim[C comparable] struct {
	owner C
	rest  []C // in no order
}

// NewClaims returns Claims in which a owns what b wants too if before(a, b). The
// order of two claimants must not change while both have a claim.
func NewClaims[K, C comparable](before func(a, b C) bool) Claims[K, C] {
	return Claims[K, C]{before: before, of: map[K]claim[C]{}}
}

// Owner returns who has k, false if it is free.
func (cs *Claims[K, C]) Owner(k K) (C, bool) {
	cl, ok := cs.of[k]
	return cl.owner, ok
}

// Add lets c claim k, once however often it is called.
func (cs *Claims[K, C]) Add(k K, c C) {
	cl, taken := cs.of[k]
	switch {
	case !taken:
		cl.owner = c
	case cl.has(c):
		return
	case cs.before(c, cl.owner):
		cl.owner, c = c, cl.owner
		fallthrough
	default:
		cl.rest = append(cl.rest[:len(cl.rest):len(cl.rest)], c)
	}
	cs.of[k] = cl
}

// Remove takes back the claim of c to k, if it has one.
func (cs *Claims[K, C]) Remove(k K, c C) {
	var all []C
	for o := range cs.All(k) {
		if o != c {
			all = append(all, o)
		}
	}
	if len(all) == 0 {
		delete(cs.of, k)
		return
	}
	first := 0
	for i := range all {
		if cs.before(all[i], all[first]) {
			first = i
		}
	}
	all[0], all[first] = all[first], all[0]
	cs.of[k] = claim[C]{owner: all[0], rest: all[1:]}
}

// All yields everybody who wants k, its owner first.
func (cs *Claims[K, C]) All(k K) iter.Seq[C] {
	return func(yield func(C) bool) {
		cl, ok := cs.of[k]
		if !ok || !yield(cl.owner) {
			return
		}
		for _, c := range cl.rest {
			if !yield(c) {
				return
			}
		}
	}
}

func (cl *claim[C]) has(c C) bool {
	for _, o := range cl.rest {
		if o == c {
			return true
		}
	}
	return cl.owner == c
}

// claimant is a Service, or a Pod with a host port, that wants a frontend.
type claimant struct {
	s *service
	// virtual reports whether it wants it as its cluster IP, which was allocated
	// to it alone: another Service's external IP never takes that
	// away.
	virtual bool
	// host reports whether it is a Pod, for its host port: Services go before it, whose
	// node ports were allocated.
	host bool
	// one reports whether it wants a host port at one address: Pods that want it at every
	// address go before it.
	one     bool
	created time.Time
}

func (c claimant) before(o claimant) bool {
	if c.virtual != o.virtual {
		return c.virtual
	}
	if c.host != o.host {
		return o.host
	}
	if c.one != o.one {
		return o.one
	}
	if !c.created.Equal(o.created) {
		return c.created.Before(o.created)
	}
	return c.s.name.Compare(o.s.name) < 0
}
