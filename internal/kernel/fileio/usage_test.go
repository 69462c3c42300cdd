package fileio

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestUsage(t *testing.T) {
	dir, elsewhere := t.TempDir(), t.TempDir()
	const mega = 1 << 20
	measure := func(want, enough int64) {
		t.Helper()
		got, err := Usage(t.Context(), dir, enough)
		if err != nil || got < want || got > want+mega/2 {
			t.Errorf("%d bytes, %v; want %d", got, err, want)
		}
	}
	if err := errors.Join(
		os.MkdirAll(dir+"/a/b", 0o700), os.WriteFile(dir+"/a/b/file", make([]byte, mega), 0o600),
		os.WriteFile(dir+"/file", make([]byte, mega), 0o600), os.Link(dir+"/file", dir+"/a/again"),
		os.Symlink(elsewhere, dir+"/link"), os.WriteFile(elsewhere+"/file", make([]byte, mega), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	measure(2*mega, 1<<40)
	measure(mega, 0) // one is enough
	deep := dir
	for range maxDepth + 1 {
		deep = filepath.Join(deep, "d")
	}
	if err := os.MkdirAll(deep, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Usage(t.Context(), dir, 1<<40); !errors.Is(err, ErrTooDeep) {
		t.Errorf("%v, want ErrTooDeep", err)
	}
}
