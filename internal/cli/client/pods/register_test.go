package pods

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// On a joined node without an administrator's kubeconfig the error names what works there, and the command that allows it.
func TestRegisterOnANode(t *testing.T) {
	f := &base.ClientFlags{DataDir: t.TempDir(), Namespace: "shop"}
	missing := fmt.Errorf("%w at x: start a server", base.ErrNoKubeconfig)
	if err := onNode(missing, f); err != missing { //nolint:errorlint // it is returned as it is
		t.Errorf("on a machine that is no node: %v", err)
	}
	record := base.AgentRecordFile(f.DataDir)
	if err := os.MkdirAll(filepath.Dir(record), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(record, []byte(`{"node":"vm1"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	err := onNode(missing, f)
	for _, want := range []string{
		"--node vm1", "/etc/fairlead/services.d", "--namespace shop --clusterrole system:node-registrar --group system:nodes",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("on a node: %v, want %q", err, want)
		}
	}
}
