package counted

import (
	"slices"
	"testing"
)

// A clone of an Index keeps its users whatever becomes of the Index, and the other way round.
func TestIndex(t *testing.T) {
	var x Index[string, int]
	x.Add("a", 1)
	x.Add("a", 2)
	x.Add("b", 2)
	clone := x.Clone()
	x.Remove("a", 1)
	x.Remove("a", 9)
	x.Remove("b", 2)
	x.Add("a", 3)
	clone.Add("a", 4)
	for _, c := range []struct {
		of   *Index[string, int]
		a, b []int
	}{{&x, []int{2, 3}, nil}, {&clone, []int{1, 2, 4}, []int{2}}} {
		if !slices.Equal(c.of.Of("a"), c.a) || !slices.Equal(c.of.Of("b"), c.b) || c.of.Has("b") != (c.b != nil) {
			t.Errorf("a: %v, b: %v, want %v and %v", c.of.Of("a"), c.of.Of("b"), c.a, c.b)
		}
		n := 0
		for _, users := range c.of.All() {
			n += len(users)
		}
		if n != len(c.a)+len(c.b) {
			t.Errorf("%d uses, want %d", n, len(c.a)+len(c.b))
		}
	}
}
