package filter

import "testing"

// No value that an expression is for begins with something else than its literal.
func TestLiteral(t *testing.T) {
	for text, want := range map[string]string{
		"/admin": "/admin", "/admin(/|$)": "/", "/admin/(?!x)": "/admin/", "/admins?/(?!x)": "/admin", "/adminé*(?!x)": "/admin",
		"/admin{0}": "/admi", "/admin+": "/admin", "/admin/(?!x)|/internal": "/", "/a|b(?!x)": "/", "*": "", "": "", "^/a": "",
		`/a\Qb`: "/a", "/a.b": "/a",
	} {
		if got := Literal(text); got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}
