// Package test runs the whole binary as its users do: fairlead, kubectl and curl
// as processes, in namespaces of their own.
package test

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testbed/process"
)

func TestMain(m *testing.M) { process.Main(m.Run, "fairlead", "backend", "kubectl") }

// TestDemo runs what make demo runs, which checks every result itself.
func TestDemo(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	bin := filepath.Dir(process.Program("fairlead"))
	cmd := exec.CommandContext(ctx, "go", "run", "./demo", "--bin", bin, "--manifest", "../examples/my-service.yaml")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "all as it should be") {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("\n%s", out)
}
