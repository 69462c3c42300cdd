package api

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"
)

//go:generate go run ./generate definitions.json.gz

//go:embed definitions.json.gz
var compressed []byte

// versionAnnotation of a definition names the version of the bundle that it is of.
const versionAnnotation = "gateway.networking.k8s.io/bundle-version"

// Definition is a CustomResourceDefinition.
type Definition struct {
	Name string
	// Bundle is its version, as v1.6.3.
	Bundle string
	// Object is all of it, in JSON.
	Object json.RawMessage
}

// Definitions returns the definitions of the kinds.
func Definitions() ([]Definition, error) {
	r, err := gzip.NewReader(bytes.NewReader(compressed))
	if err != nil {
		return nil, fmt.Errorf("definitions of the Gateway API: %w", err)
	}
	text, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("definitions of the Gateway API: %w", err)
	}
	var list []json.RawMessage
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("definitions of the Gateway API: %w", err)
	}
	var out []Definition
	for _, object := range list {
		var head struct {
			Metadata struct {
				Name        string            `json:"name"`
				Annotations map[string]string `json:"annotations"`
			} `json:"metadata"`
		}
		if err := json.Unmarshal(object, &head); err != nil {
			return nil, fmt.Errorf("definitions of the Gateway API: %w", err)
		}
		out = append(out, Definition{head.Metadata.Name, head.Metadata.Annotations[versionAnnotation], object})
	}
	return out, nil
}

// Replaces reports whether the definition may take the place of an installed one with these annotations: not that of a
// newer bundle, nor of another channel, nor one without a version, which is not of the Gateway API's own releases.
func (d *Definition) Replaces(annotations map[string]string) bool {
	have, err := version.ParseSemantic(strings.TrimSpace(annotations[versionAnnotation]))
	if err != nil || annotations["gateway.networking.k8s.io/channel"] != "standard" {
		return false
	}
	own, err := version.ParseSemantic(d.Bundle)
	return err == nil && have.LessThan(own)
}
