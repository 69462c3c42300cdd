package podspec

import (
	"slices"
	"strings"
	"testing"
)

// A prefix is for the images whose names it ends a part of, the longest one counts, and other text is refused.
func TestImages(t *testing.T) {
	m, err := ParseImages([]string{
		"example.com/echo=/usr/bin/echo", "example.com/echo:v2=/usr/bin/echo2", "example.com/all/=/usr/bin/all/../any",
	})
	if err != nil {
		t.Fatal(err)
	}
	for image, want := range map[string]string{
		"example.com/echo": "/usr/bin/echo", "example.com/echo:v1": "/usr/bin/echo", "example.com/echo@sha256:0": "/usr/bin/echo",
		"example.com/echo:v2": "/usr/bin/echo2", "example.com/echo:v22": "/usr/bin/echo", "example.com/echo/sub:v1": "/usr/bin/echo",
		"example.com/echo-evil:v1": "", "example.com.evil/echo": "", "evil/example.com/echo": "", "example.com/all/x:v1": "/usr/bin/any",
		"example.com/all": "", "host": "", "": "",
	} {
		if got := m.Program(image); got != want {
			t.Errorf("image %q: program %q, want %q", image, got, want)
		}
	}
	for _, bad := range []string{"", "x", "=/bin/x", "x=", "x=bin/x", "host=/bin/x", "x y=/bin/x"} {
		if _, err := ParseImages([]string{bad}); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	if _, err := ParseImages([]string{"x=/bin/a", "x=/bin/b"}); err == nil {
		t.Error("two programs for an image are accepted")
	}
}

// The program is the entry point of its image: a container may replace it, and adds its arguments.
func TestCommandOfImage(t *testing.T) {
	m, err := ParseImages([]string{"example.com/echo=/usr/bin/echo"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		image         string
		command, args []string
		want          []string
		fails         string
	}{
		{"example.com/echo:v1", nil, nil, []string{"/usr/bin/echo"}, ""},
		{"example.com/echo:v1", nil, []string{"a"}, []string{"/usr/bin/echo"}, ""},
		{"example.com/echo:v1", []string{"/bin/sh"}, []string{"a"}, []string{"/bin/sh"}, ""},
		{"host", []string{"/bin/sh"}, nil, []string{"/bin/sh"}, ""},
		{"host", nil, []string{"/bin/sh"}, nil, ""},
		{"host", nil, nil, nil, "command is required"},
		{"other", []string{"/bin/sh"}, nil, nil, "not supported"},
	} {
		got, cannot, err := m.Command(c.image, c.command, c.args)
		if err != nil {
			cannot = err.Error()
		}
		if !slices.Equal(got, c.want) || (cannot == "") != (c.fails == "") || !strings.Contains(cannot, c.fails) {
			t.Errorf("%s %q %q: %q, %q; want %q, %q", c.image, c.command, c.args, got, cannot, c.want, c.fails)
		}
	}
}
