package fileio

import (
	"os"
	"path/filepath"
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
