package kubeproxyconfig

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/kube-proxy/config/v1alpha1"
)

// The type that is read.
const (
	Group      = "kubeproxy.config.k8s.io"
	APIVersion = Group + "/v1alpha1"
	Kind       = "KubeProxyConfiguration"
)

// Setting is the value of a flag.
type Setting struct {
	// Path is the field of the file, Line its line.
	Path string
	Line int
	// Flag is the flag of 'fairlead proxy', Values what its Set is called with, one after the other.
	Flag   string
	Values []string
}

// File is what a KubeProxyConfiguration says.
type File struct {
	Settings []Setting
	// Notes are one line for each field that is set and has no effect.
	Notes []string
	// Lenient is what strict decoding found, empty if nothing: such fields are ignored, as by kube-proxy.
	Lenient []string
}

// Is reports whether a mapping of YAML is a document of kube-proxy's group, of whatever version.
func Is(doc *yaml.Node) bool {
	v := child(doc, "apiVersion")
	return v != nil && (v.Value == Group || strings.HasPrefix(v.Value, Group+"/"))
}

// modes are the values of mode.
var modes = []string{noMode, ModeIPTables, ModeIPVS, ModeNFTables}

// Parse reads a document for which Is is true. Errors name line and field.
func Parse(text []byte, doc *yaml.Node) (*File, error) {
	if v, k := child(doc, "apiVersion"), child(doc, "kind"); v.Value != APIVersion || k == nil || k.Value != Kind {
		return nil, fmt.Errorf("line %d: want apiVersion %s and kind %s", v.Line, APIVersion, Kind)
	}
	f := &File{}
	values, err := f.decode(text)
	if err != nil {
		return nil, err
	}
	mode, _ := values["mode"].(string)
	var errs []error
	for i := range fields {
		fd := &fields[i]
		if v := at(values, fd.path); fd.given(v) {
			errs = append(errs, f.add(fd, v, lineOf(doc, fd.path), mode))
		}
	}
	return f, errors.Join(append(errs, checkInterfaces(doc, values))...)
}

// add takes over a field that is set.
func (f *File) add(fd *field, value any, line int, mode string) error {
	if fd.modes != nil && !slices.Contains(fd.modes, mode) && slices.Contains(modes, mode) {
		return nil // as in kube-proxy, it is for another mode
	}
	texts := textsOf(fd.path, value)
	for _, text := range texts {
		if fd.check == nil {
			break
		}
		if err := fd.check(text); err != nil {
			return fmt.Errorf("line %d: %s: %q: %w", line, fd.path, text, err)
		}
	}
	if fd.flag == "" {
		f.Notes = append(f.Notes, fmt.Sprintf("%s has no effect: %s", fd.path, fd.note))
		return nil
	}
	f.Settings = append(f.Settings, Setting{Path: fd.path, Line: line, Flag: fd.flag, Values: texts})
	return nil
}

// checkInterfaces reports a detectLocalMode without the interface that it needs.
func checkInterfaces(doc *yaml.Node, values map[string]any) error {
	mode, _ := values["detectLocalMode"].(string)
	need, needs := map[string]string{
		"BridgeInterface": "detectLocal.bridgeInterface", "InterfaceNamePrefix": "detectLocal.interfaceNamePrefix",
	}[mode]
	if !needs || at(values, need) != "" {
		return nil
	}
	return fmt.Errorf("line %d: detectLocalMode: %s needs %s", lineOf(doc, "detectLocalMode"), mode, need)
}

// decode reads the text as kube-proxy does: strictly, and if only unknown or repeated fields prevent that, without
// them. It returns all values as JSON has them.
func (f *File) decode(text []byte) (map[string]any, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	read := func(o serializer.CodecFactoryOptionsMutator) (runtime.Object, error) {
		o2, _, err := serializer.NewCodecFactory(scheme, o).UniversalDeserializer().Decode(text, nil, nil)
		return o2, err
	}
	object, err := read(serializer.EnableStrict)
	if strict, is := runtime.AsStrictDecodingError(err); is {
		for _, e := range strict.Errors() {
			f.Lenient = append(f.Lenient, e.Error())
		}
		object, err = read(serializer.DisableStrict)
	}
	if err != nil {
		return nil, err
	}
	return valuesOf(object)
}

// valuesOf returns the fields of an object as JSON has them, numbers as json.Number.
func valuesOf(object any) (map[string]any, error) {
	text, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	values := map[string]any{}
	return values, dec.Decode(&values)
}

// at returns the value of a field by its path, nil if there is none.
func at(values any, path string) any {
	for key := range strings.SplitSeq(path, ".") {
		m, _ := values.(map[string]any)
		values = m[key]
	}
	return values
}

// given reports whether a value is more than the zero that stands for nothing.
func (fd *field) given(value any) bool {
	switch v := value.(type) {
	case nil:
		return false
	case []any:
		return len(v) > 0
	case map[string]any:
		return len(v) > 0
	}
	return fd.pointer || !slices.Contains([]string{"", "0", "0s", "false"}, fmt.Sprint(value))
}

// textsOf returns the texts of a value as a flag takes them.
func textsOf(path string, value any) (out []string) {
	switch v := value.(type) {
	case map[string]any: // featureGates
		for name, on := range v {
			out = append(out, fmt.Sprintf("%s=%v", name, on))
		}
		slices.Sort(out)
		return []string{strings.Join(out, ",")}
	case []any:
		for _, item := range v {
			if path != "logging.vmodule" {
				out = append(out, fmt.Sprint(item))
				continue
			}
			out = append(out, fmt.Sprintf("%v=%v", at(item, "filePattern"), at(item, "verbosity")))
		}
		if path == "logging.vmodule" {
			return []string{strings.Join(out, ",")}
		}
		return out
	}
	return []string{fmt.Sprint(value)}
}

// child returns the value of a key of a mapping of YAML, nil if there is none.
func child(n *yaml.Node, key string) *yaml.Node {
	for n != nil && n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return nil
}

// lineOf returns the line of a field, or of what it is in.
func lineOf(n *yaml.Node, path string) int {
	line := n.Line
	for key := range strings.SplitSeq(path, ".") {
		if n = child(n, key); n == nil {
			break
		}
		line = n.Line
	}
	return line
}
