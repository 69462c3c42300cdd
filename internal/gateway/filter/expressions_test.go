package filter

import "testing"

// An expression is compiled once, and a host has as many as its bound allows.
func TestExpressions(t *testing.T) {
	x := NewExpressions(nil, 30)
	first, wrong := x.Add("h", "k", "/abcdefghij", CompilePrefix)
	if wrong != "" {
		t.Fatal(wrong)
	}
	y := NewExpressions(x, 30)
	if again, _ := y.Add("h", "k", "/abcdefghij", CompilePrefix); again != first {
		t.Error("it was compiled again")
	}
	_, second := y.Add("h", "k", "/abcdefghij", CompilePrefix)
	if _, third := y.Add("h", "k", "/abcdefghij", CompilePrefix); second != "" || third == "" {
		t.Errorf("%q, %q", second, third)
	}
	if re, wrong := y.Add("g", "bad", "/a)|(b", CompileEither); re != nil || wrong == "" {
		t.Errorf("%v, %q", re, wrong)
	}
	re, _ := y.Add("g", "either", "/v[12]/", CompileEither)
	for text, want := range map[string]bool{"/v1/x": true, "/V[12]/x": true, "/v[12]": true, "/v[12]x": false, "/v1": false, "/v3/": false} {
		if re.MatchString(text) != want {
			t.Errorf("%s: %v", text, !want)
		}
	}
}
