package fileio

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A copy is made of the expected executable file and of nothing else.
func TestCopyExecutable(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := errors.Join(
		os.WriteFile(at("program"), []byte("content"), 0o700), os.WriteFile(at("secret"), []byte("content"), 0o600),
		os.WriteFile(at("other"), []byte("other"), 0o755), os.Mkdir(at("out"), 0o700), os.Mkdir(at("directory"), 0o755),
	); err != nil {
		t.Fatal(err)
	}
	sum, err := HashExecutable(at("program"), 7)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := HashExecutable(at("secret"), 7); err == nil || !strings.Contains(err.Error(), "not executable") {
		t.Errorf("the hash of a file that is not executable: %v", err)
	}
	to := at("out/copy")
	for name, limit := range map[string]int64{"secret": 7, "other": 7, "program": 6, "directory": 7, "missing": 7} {
		if err := CopyExecutable(at(name), to, sum, limit); !errors.Is(err, ErrOtherContent) {
			t.Errorf("%s with a limit of %d bytes: %v, want %v", name, limit, err, ErrOtherContent)
		}
		if found, err := os.ReadDir(at("out")); err != nil || len(found) > 0 {
			t.Errorf("%s leaves %v, %v", name, found, err)
		}
	}
	if err := CopyExecutable(at("program"), to, sum, 7); err != nil {
		t.Fatal(err)
	}
	// The copy stays as it was verified.
	if err := os.WriteFile(at("program"), []byte("changed"), 0o700); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(to)
	info, err2 := os.Stat(to)
	if err := errors.Join(err, err2); err != nil || string(text) != "content" || info.Mode().Perm() != 0o555 {
		t.Errorf("the copy is %q with mode %v, %v", text, info.Mode(), err)
	}
}
