package pods

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// Without an administrator's kubeconfig a node registers by its agent, if that has a directory for it. What works there, with a server, is
// tested in test/node.
func TestAgentOf(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	f := &base.ClientFlags{DataDir: t.TempDir(), Namespace: "shop"}
	missing := fmt.Errorf("%w at x: start a server", base.ErrNoKubeconfig)
	if _, err := agentOf(missing, f); err != missing { //nolint:errorlint // it is returned as it is
		t.Errorf("on a machine that is no node: %v", err)
	}
	record := base.AgentRecordFile(f.DataDir)
	if err := os.MkdirAll(filepath.Dir(record), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(record, []byte(`{"node":"vm1"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := agentOf(missing, f); err == nil || !strings.Contains(err.Error(), "its agent no --services-dir") ||
		!strings.Contains(err.Error(), "--node vm1") {
		t.Errorf("an agent without a directory: %v", err)
	}
	f.Kubeconfig = "named"
	if _, err := agentOf(missing, f); err != missing { //nolint:errorlint // it is returned as it is
		t.Errorf("a kubeconfig that the user named: %v", err)
	}
}

// Files of others are neither changed nor removed, and one that is broken is replaced.
func TestFilesOfOthers(t *testing.T) {
	a := &agent{AgentRecord: base.AgentRecord{Node: "vm1", ServicesDir: t.TempDir()}}
	path := a.file("shop", "db")
	if filepath.Base(path) != "shop.db.yaml" || filepath.Base(a.file("default", "db")) != "db.yaml" {
		t.Errorf("files %s, %s", path, a.file("default", "db"))
	}
	if have, _, err := a.read(path); have != nil || err != nil {
		t.Errorf("no file: %q, %v", have, err)
	}
	for text, want := range map[string]string{
		"name: db\nports: [80]\n":                            "was not written by 'fairlead register'",
		written + "name: db\nports: [80]\nunit: a.service\n": "",
		written + "broken: [":                                "",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		have, spec, err := a.read(path)
		if want != "" && (err == nil || !strings.Contains(err.Error(), want)) ||
			want == "" && (err != nil || string(have) != text || spec == nil) {
			t.Errorf("%q: %q, %v, %v", text, have, spec, err)
		}
		if want == "" {
			continue // without a server
		}
		if err := a.deregister(t.Context(), "shop", "db"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("deregister with %q: %v", text, err)
		}
	}
}
