package filter

import "testing"

func TestRedirectsAndRewrites(t *testing.T) {
	prefix := func(to string) *PathChange { return &PathChange{To: to} }
	for _, c := range []struct {
		redirect         Redirect
		scheme, host     string
		port             uint16
		path, query, pre string
		want             string
	}{
		{Redirect{Scheme: "https"}, "http", "a.b", 80, "/x", "q=1", "", "https://a.b/x?q=1"},
		{Redirect{Host: "c.d"}, "http", "a.b", 8080, "/x", "", "", "http://c.d:8080/x"},
		{Redirect{Port: 8443, Scheme: "https"}, "http", "a.b", 80, "/", "", "", "https://a.b:8443/"},
		{Redirect{Path: prefix("/new")}, "http", "a.b", 80, "/old/x", "", "/old", "http://a.b/new/x"},
		{Redirect{Path: prefix("/")}, "http", "a.b", 80, "/old/x", "", "/old", "http://a.b/x"},
		{Redirect{Path: &PathChange{Whole: true, To: "/whole"}}, "https", "a.b", 443, "/old/x", "", "/old", "https://a.b/whole"},
	} {
		if got := c.redirect.Location(c.scheme, c.host, c.port, c.path, c.query, c.pre); got != c.want {
			t.Errorf("%+v: %s, want %s", c.redirect, got, c.want)
		}
	}
	// The table of the specification (HTTPPathModifier.replacePrefixMatch).
	for _, c := range [][4]string{
		{"/foo/bar", "/foo", "/xyz", "/xyz/bar"}, {"/foo/bar", "/foo", "/xyz/", "/xyz/bar"}, {"/foo", "/foo", "/xyz", "/xyz"},
		{"/foo/", "/foo", "/xyz", "/xyz/"}, {"/foo/bar", "/foo", "", "/bar"}, {"/foo/", "/foo", "", "/"}, {"/foo", "/foo", "", "/"},
		{"/foo/", "/foo", "/", "/"}, {"/foo", "/foo", "/", "/"}, {"/foo/bar", "/foo", "/", "/bar"}, {"/foo", "/foo", "/xyz/", "/xyz/"},
	} {
		if got := prefix(c[2]).Apply(c[0], c[1]); got != c[3] {
			t.Errorf("%v: %s", c, got)
		}
	}
}
