package program

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A pipe in the place of the file, whose directory is the program's, holds up nothing.
func TestPIDFileIsAPipe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pid")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	PIDFile(path)(ctx, func(s State) {
		if s.Up || !strings.Contains(s.Message, path+": it is no regular file") {
			t.Errorf("%+v", s)
		}
		cancel()
	})
}
