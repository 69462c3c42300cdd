package testbed

import (
	"context"
	"encoding/json"
	"os/exec"
	"testing"
	"time"
)

// ModuleDir returns where the files of the Go module path are, as go.mod in the directory
// dir pins it. It skips the test where there is neither a module proxy nor a filled cache.
func ModuleDir(t *testing.T, dir, path string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", path)
	cmd.Dir = dir
	out, err := cmd.Output()
	var m struct{ Dir, Error string }
	if bad := json.Unmarshal(out, &m); bad != nil {
		t.Fatalf("go mod download: %v, %v", err, bad)
	}
	if m.Error != "" || m.Dir == "" {
		t.Skipf("needs the module %s, from a module proxy or the module cache: %s", path, m.Error)
	}
	return m.Dir
}
