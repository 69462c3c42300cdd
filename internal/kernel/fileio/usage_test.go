package fileio

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestUsage(t *testing.T) {
	dir, elsewhere := t.TempDir(), t.TempDir()
	const mega = 1 << 20
	expect := func(want, enough int64) {
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
	expect(2*mega, 1<<40)
	if got, err := Usage(t.Context(), dir, 0); err != nil || got == 0 || got > mega+mega/2 {
		t.Errorf("%d bytes, %v; one file is enough", got, err)
	}
	for entries, want := range map[int]error{6: nil, 5: ErrTooMany} { // a, b, link, and three names of files
		if _, err := measure(t.Context(), dir, 1<<40, entries); !errors.Is(err, want) {
			t.Errorf("%d entries: %v, want %v", entries, err, want)
		}
	}
	late := errors.New("late")
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(late)
	if _, err := Usage(ended, dir, 1<<40); !errors.Is(err, late) {
		t.Errorf("%v, want the cause of the end", err)
	}
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
