package hostpath

import (
	"strings"
	"testing"
)

// What rules are compared with is what backends get, and a path that servers read in different ways goes nowhere.
func TestPath(t *testing.T) {
	for path, want := range map[string]string{
		"/": "/", "/a/b": "/a/b", "/a/": "/a/", "//admin": "/admin", "/a//b///c/": "/a/b/c/", "/a/./b": "/a/b", "/a/../b": "/b",
		"/../../b": "/b", "/a/..": "/", "/a/.": "/a/", "/%61dmin": "/admin", "/%41": "/A", "/a%2fb": "/a%2Fb", "/a%2Fb": "/a%2Fb",
		"/%2e%2e/b": "/b", "/a/%2e/b": "/a/b", "/.well-known/x": "/.well-known/x", "/a..b/...": "/a..b/...", "/a;v=1/b": "/a;v=1/b",
		"/x;..": "/x;..", "/%25": "/%25", "/%7Euser": "/~user", "/é": "/é", "/a%20b": "/a%20b",
		// Refused.
		"/a/..;/admin": "", "/a/..;x=1/admin": "", "/a/.;/b": "", "/a/%2e%2e;/admin": "", "/a%2f..%2fadmin": "", "/a%2f%2e%2e%2fadmin": "",
		"/a%5c..%5cadmin": "", `/a\..\admin`: "", `/a\b`: "", "/a%00b": "", "/a\x00": "", "/%": "", "/%4": "", "/%zz": "",
		"": "", "a": "", "*": "",
	} {
		got, ok := Path(path)
		if got != want || ok != (want != "") {
			t.Errorf("%q is %q, %t; want %q", path, got, ok, want)
		}
		if again, _ := Path(got); ok && again != got {
			t.Errorf("%q: %q becomes %q", path, got, again)
		}
	}
}

// A canonical path has no dot segment, no empty one and no backslash, and stays as it is.
func FuzzPath(f *testing.F) {
	for _, s := range []string{"/a/../b", "/%2e%2e/", "//", "/..;/", "/a%2f..%2fb", "/%"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, path string) {
		got, ok := Path(path)
		if !ok {
			return
		}
		if again, ok := Path(got); again != got || !ok {
			t.Errorf("%q: %q becomes %q, %t", path, got, again, ok)
		}
		for i, s := range strings.Split(got[1:], "/") {
			if s == "." || s == ".." || s == "" && i != strings.Count(got[1:], "/") {
				t.Errorf("%q: %q has segment %q", path, got, s)
			}
		}
	})
}

func TestHosts(t *testing.T) {
	for host, want := range map[string]string{
		"Example.com": "example.com", "example.com.": "example.com", "example.com:8080": "example.com",
		"[::1]:80": "[::1]", "[::1]": "[::1]", "": "",
	} {
		if got := Host(host); got != want {
			t.Errorf("%q is %q, want %q", host, got, want)
		}
	}
	x := NewIndex[string](false)
	for _, p := range []string{"foo.example.com", "*.example.com", "*.foo.example.com", "*.com", ""} {
		x.Set(p, "["+p+"]")
	}
	for host, want := range map[string]string{
		"foo.example.com": "[foo.example.com]", "a.foo.example.com": "[*.foo.example.com]", "b.example.com": "[*.example.com]",
		"a.b.example.com": "[*.example.com]", "example.com": "[*.com]", "com": "[]", "org": "[]", ".example.com": "[*.com]",
		strings.Repeat("a.", 5000) + "org": "[]",
	} {
		if got, _ := x.Find(host); got != want {
			t.Errorf("%.40s: %s, want %s", host, got, want)
		}
	}
	for _, c := range [][3]string{
		{"", "a.b", "a.b"}, {"*.b", "a.b", "a.b"}, {"*.b", "*.a.b", "*.a.b"}, {"*.b", "", "*.b"}, {"*.b", "b", "-"}, {"*.b", "a.c", "-"},
		{"a.b", "a.b", "a.b"}, {"a.b", "c.b", "-"}, {"*.b", "*.b", "*.b"}, {"*.example.com", "badexample.com", "-"},
	} {
		for _, pair := range [][2]string{{c[0], c[1]}, {c[1], c[0]}} {
			got, ok := Intersect(pair[0], pair[1])
			if !ok {
				got = "-"
			}
			if got != c[2] {
				t.Errorf("%q and %q: %q, want %q", pair[0], pair[1], got, c[2])
			}
		}
	}
}
