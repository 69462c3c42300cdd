// Package counted has sets whose members count how often they are used, or by what. It is pure.
package counted

import (
	"iter"
	"maps"
	"slices"
)

// Set has values, each once, in the order in which they came, with how often each is used. The zero value is empty.
type Set[T comparable] struct {
	list []T
	uses map[T]int
}

// Has reports whether a value is used.
func (s *Set[T]) Has(v T) bool { return s.uses[v] > 0 }

// List returns the values, which belong to the set.
func (s *Set[T]) List() []T { return s.list }

// Add notes a use of each of some values.
func (s *Set[T]) Add(values ...T) {
	if s.uses == nil {
		s.uses = map[T]int{}
	}
	for _, v := range values {
		if s.uses[v]++; s.uses[v] == 1 {
			s.list = append(s.list, v)
		}
	}
}

// Remove notes the end of a use of each of some values.
func (s *Set[T]) Remove(values ...T) {
	for _, v := range values {
		if s.uses[v]--; s.uses[v] <= 0 {
			delete(s.uses, v)
			s.list = slices.DeleteFunc(s.list, func(o T) bool { return o == v })
		}
	}
}

// Clone returns a set of the same values and uses.
func (s *Set[T]) Clone() Set[T] { return Set[T]{slices.Clone(s.list), maps.Clone(s.uses)} }

// Index maps each value to its users. The zero value is empty.
type Index[T, U comparable] struct {
	users map[T][]U
	clone bool // it may share lists with the index that it was made of, which may go on appending to them
}

// Has reports whether a value has a user.
func (x *Index[T, U]) Has(v T) bool { return len(x.users[v]) > 0 }

// Of returns the users of a value, which belong to the index. A user appears once for each use.
func (x *Index[T, U]) Of(v T) []U { return x.users[v] }

// All returns the values that have users, with these.
func (x *Index[T, U]) All() iter.Seq2[T, []U] { return maps.All(x.users) }

// Add notes that a user uses a value.
func (x *Index[T, U]) Add(v T, user U) {
	if x.users == nil {
		x.users = map[T][]U{}
	}
	list := x.users[v]
	if x.clone {
		list = slices.Clip(list)
	}
	x.users[v] = append(list, user)
}

// Remove notes the end of one use.
func (x *Index[T, U]) Remove(v T, user U) {
	have := x.users[v]
	i := slices.Index(have, user)
	if i < 0 {
		return
	}
	if len(have) == 1 {
		delete(x.users, v)
		return
	}
	x.users[v] = slices.Concat(have[:i], have[i+1:])
}

// Clone returns an index of the same users.
func (x *Index[T, U]) Clone() Index[T, U] { return Index[T, U]{maps.Clone(x.users), true} }
