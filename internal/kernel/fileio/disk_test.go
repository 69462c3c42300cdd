package fileio_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// Reserved space is allocated, changes neither length nor content, and can be
// reserved again.
func TestReserve(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	if err := os.WriteFile(path, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	const size = 8 << 20
	for range 2 {
		if err := fileio.Reserve(path, size); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := fileio.Allocated(path); err != nil || got < size {
		t.Errorf("%d bytes allocated, %v", got, err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "content" {
		t.Errorf("content %q, %v", got, err)
	}
	if err := fileio.Reserve(filepath.Join(t.TempDir(), "none"), size); err != nil {
		t.Error("a file that was not there:", err)
	}
	if free, err := fileio.Free(path); err != nil || free == 0 {
		t.Errorf("%d bytes free, %v", free, err)
	}
}
