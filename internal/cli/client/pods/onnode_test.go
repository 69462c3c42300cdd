package pods

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// A name that leads to the file of another namespace, or out of the directory, is rejected and removes nothing.
func TestDeregisterRejectsNames(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a := &agent{AgentRecord: base.AgentRecord{Node: "n1", ServicesDir: filepath.Join(dir, "services")}}
	if err := os.Mkdir(a.ServicesDir, 0o700); err != nil {
		t.Fatal(err)
	}
	files := []string{a.file("shop", "web"), filepath.Join(dir, "web.yaml")}
	for _, f := range files {
		if err := os.WriteFile(f, []byte(written), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ namespace, name, want string }{
		{"default", "shop.web", "not the name of a program"},
		{"default", "../web", "not the name of a program"},
		{"default", "", "not the name of a program"},
		{"../shop", "web", "../shop is not a namespace"},
	} {
		if err := a.deregister(t.Context(), c.namespace, c.name); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s in %s: %v, want %q", c.name, c.namespace, err, c.want)
		}
	}
	for _, f := range files {
		if _, err := os.Stat(f); err != nil {
			t.Error(err)
		}
	}
}
