// Package counted has sets whose members count how often they are used. It is pure.
package counted

import (
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

// Add notes a use of a value.
func (s *Set[T]) Add(v T) {
	if s.uses == nil {
		s.uses = map[T]int{}
	}
	if s.uses[v]++; s.uses[v] == 1 {
		s.list = append(s.list, v)
	}
}

// Remove notes the end of a use of a value.
func (s *Set[T]) Remove(v T) {
	if s.uses[v]--; s.uses[v] <= 0 {
		delete(s.uses, v)
		s.list = slices.DeleteFunc(s.list, func(o T) bool { return o == v })
	}
}

// Clone returns a set of the same values and uses.
func (s *Set[T]) Clone() Set[T] { return Set[T]{slices.Clone(s.list), maps.Clone(s.uses)} }
