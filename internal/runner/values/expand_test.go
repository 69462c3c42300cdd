package values

import (
	"strings"
	"testing"
)

func TestExpand(t *testing.T) {
	known := func(name string) (string, bool) {
		v, ok := map[string]string{"A": "1", "B": "$(A)", "EMPTY": ""}[name]
		return v, ok
	}
	for in, want := range map[string]string{
		"plain": "plain", "$(A)": "1", "x$(A)y$(A)": "x1y1", "$(NO)": "$(NO)", "$$(A)": "$(A)", "$$$(A)": "$1",
		"$(A": "$(A", "$": "$", "$x": "$x", "$(B)": "$(A)", "[$(EMPTY)]": "[]", "$()": "$()", "$$": "$",
	} {
		if got := Expand(in, known); got != want {
			t.Errorf("expand(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzExpand(f *testing.F) {
	f.Add("a $(B) $$(C) $(")
	f.Fuzz(func(t *testing.T, s string) {
		got := Expand(s, func(string) (string, bool) { return "", false })
		if !strings.Contains(s, "$$") && got != s {
			t.Errorf("expand(%q) = %q without known names", s, got)
		}
	})
}
