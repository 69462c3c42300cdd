package pod

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/runner/confinement"
	"github.com/fairlead/fairlead/internal/runner/podnet"
)

// A pod.json of any content must not stop the agent.
func FuzzReadPod(f *testing.F) {
	f.Add([]byte(`{"uid":"a","ips":["10.0.0.1"]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p := Paths{t.TempDir()}
		if err := os.WriteFile(p.pod(), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if rec, err := readPod(p); err == nil && rec.UID == "" {
			t.Error("a record without a uid")
		}
	})
}

func TestGarbageOnDisk(t *testing.T) {
	dir := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	p := New(Options{
		Client: fake.NewClientset(), Dir: filepath.Join(dir, "pods"), Groups: confinement.OpenGroups(dir, 0),
		Network: podnet.New(podnet.Options{Log: log}), Log: log,
	})
	for name, text := range map[string]string{"empty": "", "broken": "{", "liar": `{"uid":"other"}`} {
		d := filepath.Join(dir, "pods", name)
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
		if text != "" {
			if err := os.WriteFile(filepath.Join(d, "pod.json"), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if err := p.Begin(ctx); err != nil {
		t.Fatal(err)
	}
	if left, err := Dirs(filepath.Join(dir, "pods")); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
