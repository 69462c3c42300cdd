// Command generate copies the code of Hubble's API from the module of Cilium that test/hubble/go.mod names.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// files are what the API needs, by their names below api/v1 of Cilium.
func files() []string {
	return []string{
		"flow/flow.pb.go", "observer/observer.pb.go", "observer/observer_grpc.pb.go", "peer/peer.pb.go", "peer/peer_grpc.pb.go",
		"relay/relay.pb.go",
	}
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

// cilium returns the directory of Cilium's module. 'go list' names none before a build has downloaded the module.
func cilium() (dir string, err error) {
	find := exec.Command("go", "-C", "../../../test/hubble", "mod", "download", "-json", "github.com/cilium/cilium")
	find.Stderr = os.Stderr
	out, err := find.Output()
	var module struct{ Dir, Error string }
	if bad := json.Unmarshal(out, &module); err == nil {
		err = bad
	}
	if err == nil && module.Dir == "" {
		err = errors.New("'go mod download' names no directory")
	}
	if err != nil {
		return "", fmt.Errorf("cannot download the module of Cilium: %w %s", err, module.Error)
	}
	return module.Dir, nil
}

func run() error {
	module, err := cilium()
	if err != nil {
		return err
	}
	from := filepath.Join(module, "api", "v1")
	for _, name := range files() {
		text, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			return err
		}
		// The import paths have quotes; paths in descriptors do not, and have a length before them.
		text = bytes.ReplaceAll(text, []byte(`"github.com/cilium/cilium/api/v1/`), []byte(`"github.com/fairlead/fairlead/internal/hubble/api/`))
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(name, text, 0o644); err != nil {
			return err
		}
	}
	license, err := os.ReadFile(filepath.Join(module, "LICENSE"))
	if err != nil {
		return err
	}
	return os.WriteFile("LICENSE", license, 0o644)
}
