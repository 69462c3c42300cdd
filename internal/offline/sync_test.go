package offline

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// The end waits for what was written, files that are gone are left out.
func TestEndWaitsForTheDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var s syncer
	for i := range 100 {
		path := filepath.Join(dir, fmt.Sprint(i%10))
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		s.soon(path)
	}
	s.soon(filepath.Join(dir, "gone"))
	s.close()
	if len(s.dirty) > 0 || s.busy {
		t.Errorf("left at the end: %v", s.dirty)
	}
	noneOpen(t, dir)
	if s.soon(filepath.Join(dir, "0")); len(s.dirty) > 0 {
		t.Error("begun after the end")
	}
}
