// Command generate CHANNEL FILE writes the definitions of a channel of the module sigs.k8s.io/gateway-api, as a list in JSON,
// compressed.
package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

func main() {
	text, err := definitions(os.Args[1])
	if err == nil {
		err = os.WriteFile(os.Args[2], text, 0o644) //nolint:gosec // it is checked in
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func definitions(channel string) ([]byte, error) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api").Output()
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "config/crd", channel, "gateway.networking.k8s.io_*s.yaml"))
	if err != nil {
		return nil, err
	}
	var list []json.RawMessage
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		if !bytes.Contains(text, []byte("\nkind: CustomResourceDefinition\n")) {
			continue
		}
		object, err := yaml.YAMLToJSON(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		list = append(list, object)
	}
	text, err := json.Marshal(list)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	w, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(text); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
