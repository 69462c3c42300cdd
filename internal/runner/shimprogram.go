package runner

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/runner/shim/embedded"
)

// shimCommand returns how a shim is started: as the embedded program, which is
// written to the state directory, or as this one if there is none or it cannot run
// from there.
func shimCommand(stateDir string, log *slog.Logger) []string {
	self := []string{"/proc/self/exe", "pod-shim"}
	if len(embedded.Program) == 0 {
		return self
	}
	path, err := installShim(stateDir, embedded.Program)
	if err != nil {
		log.Warn("cannot run the small shim: each Pod costs some megabytes more", "err", err)
		return self
	}
	return []string{path}
}

// installShim writes program to dir unless it is there, and removes the programs of other
// versions: shims that run keep theirs. It fails if dir is mounted noexec.
func installShim(dir string, program []byte) (string, error) {
	sum := sha256.Sum256(program)
	path := filepath.Join(dir, "shim-"+hex.EncodeToString(sum[:8]))
	if have, err := os.ReadFile(path); err != nil || !bytes.Equal(have, program) {
		if err := fileio.Replace(path, program, 0o755); err != nil {
			return "", err
		}
	}
	others, _ := filepath.Glob(filepath.Join(dir, "shim-*"))
	for _, o := range others {
		if o != path {
			_ = os.Remove(o)
		}
	}
	if out, err := exec.Command(path, shim.CheckArg).CombinedOutput(); err != nil {
		return "", fmt.Errorf("start %s: %w: %s", path, err, out)
	}
	return path, nil
}
