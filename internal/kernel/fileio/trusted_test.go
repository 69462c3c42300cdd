package fileio

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// Another user's file neither blocks its reader nor fills the memory.
func TestReadRegular(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, err := range []error{
		unix.Mkfifo(at("pipe"), 0o600), os.Symlink("/dev/zero", at("zero")), os.Symlink("pipe", at("link")),
		os.WriteFile(at("large"), make([]byte, 9), 0o600), os.WriteFile(at("file"), []byte("12345678"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"pipe": "it is no regular file", "zero": "it is no regular file", "link": "it is no regular file",
		".": "it is no regular file", "large": "it is larger than 8 bytes", "none": "no such file or directory",
	} {
		if _, err := ReadRegular(at(name), 8); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	if data, err := ReadRegular(at("file"), 8); err != nil || string(data) != "12345678" {
		t.Errorf("%q, %v", data, err)
	}
}

// What another user could write to is not listed, nor is what is hidden or named otherwise.
func TestTrustedFiles(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"b.yaml", "a.json", ".c.yaml", "d.yaml~", "e"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	names, err := TrustedFiles(dir, ".yaml", ".json")
	if err != nil || !slices.Equal(names, []string{"a.json", "b.yaml"}) {
		t.Errorf("%v, %v", names, err)
	}
	if names, err := TrustedFiles(filepath.Join(dir, "none"), ".yaml"); err != nil || names != nil {
		t.Errorf("without a directory: %v, %v", names, err)
	}
	if names, err := TrustedFiles(filepath.Join(dir, "e"), ".yaml"); err == nil {
		t.Errorf("of a file: %v", names)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if names, err := TrustedFiles(dir, ".yaml"); err == nil {
		t.Errorf("of a directory that all may write to: %v", names)
	}
}
