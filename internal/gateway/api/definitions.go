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

//go:generate go run ./generate standard definitions.json.gz
//go:generate go run ./generate experimental experimental.json.gz

var (
	//go:embed definitions.json.gz
	standard []byte
	//go:embed experimental.json.gz
	experimental []byte
)

// versionAnnotation of a definition names the version of the bundle that it is of, and ChannelAnnotation its channel.
const (
	versionAnnotation = "gateway.networking.k8s.io/bundle-version"
	ChannelAnnotation = "gateway.networking.k8s.io/channel"
)

// Channel is a release channel of the Gateway API. The kinds of Experimental have all fields of Standard, and more.
type Channel string

// The channels.
const (
	Standard     Channel = "standard"
	Experimental Channel = "experimental"
)

// Definition is a CustomResourceDefinition.
type Definition struct {
	Name string
	// Bundle is its version, as v1.6.3.
	Bundle  string
	Channel Channel
	// Object is all of it, in JSON.
	Object json.RawMessage
}

// Definitions returns the definitions of the kinds, of a channel.
func Definitions(of Channel) ([]Definition, error) {
	compressed := standard
	if of == Experimental {
		compressed = experimental
	}
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
		out = append(out, Definition{head.Metadata.Name, head.Metadata.Annotations[versionAnnotation], of, object})
	}
	return out, nil
}

// Replaces reports whether the definition may take the place of an installed one with these annotations: not that of a
// newer bundle, nor one without a version, which is not of the Gateway API's own releases. One of the experimental channel
// replaces one of the standard channel, and never the reverse: objects would lose fields.
func (d *Definition) Replaces(annotations map[string]string) bool {
	have, err := version.ParseSemantic(strings.TrimSpace(annotations[versionAnnotation]))
	installed := Channel(annotations[ChannelAnnotation])
	more := installed == Standard && d.Channel == Experimental
	if err != nil || installed != d.Channel && !more {
		return false
	}
	own, err := version.ParseSemantic(d.Bundle)
	return err == nil && (have.LessThan(own) || more && !own.LessThan(have))
}

// Unsupported returns why an installed definition with these annotations is not of a version that is known here, "" if it is: of the
// same minor version, of either channel. What others have in fields is the same, but none of the fields that they add is read.
func (d *Definition) Unsupported(annotations map[string]string) string {
	text := strings.TrimSpace(annotations[versionAnnotation])
	have, err := version.ParseSemantic(text)
	own, err2 := version.ParseSemantic(d.Bundle)
	switch {
	case err != nil || err2 != nil:
		return fmt.Sprintf("the installed definitions have no bundle version; %s is supported", d.Bundle)
	case have.Major() != own.Major() || have.Minor() != own.Minor():
		return fmt.Sprintf("the installed definitions are of bundle %s; %s is supported", text, d.Bundle)
	}
	return ""
}
