package cli

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/backup"
)

// A dry run fails for a damaged file, whatever a restore would do with the rest, and restores nothing.
func TestRestoreDryRun(t *testing.T) {
	part, err := backup.PartOf("node-token", strings.NewReader("secret"))
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	m := &backup.Manifest{Format: backup.Format, Version: "v0", Layout: 1, Parts: []backup.Part{part, part}}
	m.Parts[1].Name = "pki/sa.key"
	if err := backup.Write(&b, m, func(string) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("secret")), nil }); err != nil {
		t.Fatal(err)
	}
	good := b.Bytes()
	bad := bytes.Replace(good, []byte("secret"), []byte("seXret"), 1)
	for _, c := range []struct {
		data       []byte
		code       int
		out, inErr string
	}{
		{good, exitDone, "all its parts are intact", ""},
		{bad, exitFailed, "", "is damaged in node-token; --intact-only restores the rest: pki/sa.key"},
	} {
		file, dir := filepath.Join(t.TempDir(), "backup.tar"), filepath.Join(t.TempDir(), "dir")
		if err := os.WriteFile(file, c.data, 0o600); err != nil {
			t.Fatal(err)
		}
		code, out, errs := fairlead(t, "restore", "--dry-run", "--intact-only", "--data-dir", dir, file)
		if code != c.code || !strings.Contains(out, c.out) || !strings.Contains(errs, c.inErr) {
			t.Errorf("exit %d\n%s%s", code, out, errs)
		}
		if code != exitDone && strings.Contains(out, "as they were written") {
			t.Errorf("of a damaged file: %s", out)
		}
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("a dry run has made %s: %v", dir, err)
		}
	}
}
