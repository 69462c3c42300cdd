package api

import (
	"bytes"
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
	dir, _ := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api").Output()
	for _, channel := range []Channel{Standard, Experimental} {
		list, err := Definitions(channel)
		if err != nil {
			t.Fatal(err)
		}
		names := map[string]bool{}
		for _, d := range list {
			if names[d.Name] = true; d.Bundle != strings.TrimSpace(string(version)) {
				t.Errorf("%s is of %s, want %s: run go generate", d.Name, d.Bundle, version)
			}
			own := []byte(`"` + ChannelAnnotation + `":"` + string(channel) + `"`)
			if !bytes.Contains(d.Object, own) || d.Channel != channel {
				t.Errorf("%s is not of the %s channel", d.Name, channel)
			}
		}
		from := filepath.Join(strings.TrimSpace(string(dir)), "config/crd", string(channel))
		files, _ := filepath.Glob(filepath.Join(from, "gateway.networking.k8s.io_*s.yaml"))
		for _, f := range files {
			kind := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(f), "gateway.networking.k8s.io_"), ".yaml")
			if !strings.HasPrefix(kind, "vap_") && !names[kind+".gateway.networking.k8s.io"] {
				t.Errorf("no definition of %s", kind)
			}
		}
		if len(files) < 10 {
			t.Errorf("%d files of the %s channel", len(files), channel)
		}
	}
}

// An installed bundle that is newer or foreign stays, and an experimental one unless the own one is experimental, too.
func TestReplaces(t *testing.T) {
	for _, c := range []struct {
		version, channel   string
		want, experimental bool
	}{
		{"v1.6.2", "standard", true, true}, {"v1.0.0", "standard", true, true}, {"v1.6.3", "standard", false, true},
		{"v1.7.0", "standard", false, false}, {"v1.5.0", "experimental", false, true}, {"v1.6.3", "experimental", false, false},
		{"v1.7.0", "experimental", false, false}, {"", "standard", false, false}, {"v1.0.0", "", false, false},
		{"main", "standard", false, false},
	} {
		for own, want := range map[Channel]bool{Standard: c.want, Experimental: c.experimental} {
			d := Definition{Bundle: "v1.6.3", Channel: own}
			got := d.Replaces(map[string]string{versionAnnotation: c.version, ChannelAnnotation: c.channel})
			if got != want {
				t.Errorf("%s: %+v: %t", own, c, got)
			}
		}
	}
}

// A bundle of another minor version is not known; patches and channels of the same one are.
func TestUnsupported(t *testing.T) {
	d := Definition{Bundle: "v1.6.3"}
	for text, want := range map[string]string{
		"v1.6.3": "", "v1.6.0": "", "v1.6.9": "", "v1.7.0": "of bundle v1.7.0; v1.6.3", "v1.5.1": "of bundle v1.5.1; v1.6.3",
		"v2.6.3": "of bundle v2.6.3; v1.6.3", "": "no bundle version", "main": "no bundle version",
	} {
		got := d.Unsupported(map[string]string{versionAnnotation: text})
		if (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
