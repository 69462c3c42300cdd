package fileio_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// A reader finds one of the contents whole, whoever writes, and no temporary file
// is left.
func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	content := func(i int) []byte { return bytes.Repeat([]byte{byte('a' + i)}, 100_000) }
	if err := fileio.Replace(path, content(0), 0o640); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for range 20 {
				if err := fileio.Replace(path, content(w), 0o640); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 200 {
		b, err := os.ReadFile(path)
		if err != nil || len(b) != 100_000 || bytes.Count(b, b[:1]) != len(b) {
			t.Fatalf("read a part: %d bytes, %v", len(b), err)
		}
	}
	wg.Wait()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("left in the directory: %v, %v", entries, err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode() != 0o640 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
}

// What cannot be replaced stays, and nothing is left beside it.
func TestReplaceFails(t *testing.T) {
	dir := t.TempDir()
	taken := filepath.Join(dir, "taken")
	if err := os.MkdirAll(filepath.Join(taken, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := fileio.Replace(taken, nil, 0o600); err == nil {
		t.Error("a directory was replaced by a file")
	}
	if err := fileio.Replace(filepath.Join(dir, "none", "a"), nil, 0o600); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("in a directory that does not exist: %v", err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left in the directory: %v, %v", entries, err)
	}
}

// Only one open file has the lock; closing it unlocks, its duplicates keep it. Unlock unlocks whatever duplicates there are.
func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	open := func() *os.File {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	first, second := open(), open()
	if err := fileio.Lock(first); err != nil {
		t.Fatal(err)
	}
	dup, err := fileio.Dup(first)
	if err != nil {
		t.Fatal(err)
	}
	_ = first.Close()
	if err := fileio.Lock(second); !errors.Is(err, fileio.ErrLocked) {
		t.Errorf("locked again: %v", err)
	}
	_ = dup.Close()
	if err := fileio.Lock(second); err != nil {
		t.Errorf("after the end of the first: %v", err)
	}
	if dup, err = fileio.Dup(second); err != nil {
		t.Fatal(err)
	}
	defer dup.Close()
	if err := errors.Join(fileio.Unlock(second), fileio.Lock(open())); err != nil {
		t.Errorf("unlocked, with a copy that a program has which is being started: %v", err)
	}
}
