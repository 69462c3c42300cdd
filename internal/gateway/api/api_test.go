package api

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The definitions come from the module that go.mod names.
func TestDefinitions(t *testing.T) {
	version, err := exec.Command("go", "list", "-m", "-f", "{{.Version}}", "sigs.k8s.io/gateway-api").Output()
	if err != nil {
		t.Fatal(err)
	}
	list, err := Definitions()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, d := range list {
		if names[d.Name] = true; d.Bundle != strings.TrimSpace(string(version)) {
			t.Errorf("%s is of %s, want %s: run go generate", d.Name, d.Bundle, version)
		}
	}
	dir, _ := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api").Output()
	files, _ := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "config/crd/standard/*s.yaml"))
	for _, f := range files {
		kind := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(f), "gateway.networking.k8s.io_"), ".yaml")
		if !strings.HasPrefix(kind, "vap_") && !names[kind+".gateway.networking.k8s.io"] {
			t.Errorf("no definition of %s", kind)
		}
	}
}

// An installed bundle that is newer, experimental or foreign stays.
func TestReplaces(t *testing.T) {
	d := Definition{Bundle: "v1.6.3"}
	for _, c := range []struct {
		version, channel string
		want             bool
	}{
		{"v1.6.2", "standard", true}, {"v1.0.0", "standard", true}, {"v1.6.3", "standard", false}, {"v1.7.0", "standard", false},
		{"v1.5.0", "experimental", false}, {"", "standard", false}, {"v1.0.0", "", false}, {"main", "standard", false},
	} {
		got := d.Replaces(map[string]string{versionAnnotation: c.version, "gateway.networking.k8s.io/channel": c.channel})
		if got != c.want {
			t.Errorf("%+v: %t", c, got)
		}
	}
}
