package kubeproxyconfig

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"
)

// Of returns the KubeProxyConfiguration that says what flags do. value returns the values of a flag, none for one
// that has none; lists have more than one.
func Of(value func(flag string) []string) (*v1alpha1.KubeProxyConfiguration, error) {
	values := map[string]any{"apiVersion": APIVersion, "kind": Kind}
	mode := strings.Join(value("proxy-mode"), "")
	for i := range fields {
		fd := &fields[i]
		texts := value(fd.flag)
		if fd.flag == "" || len(texts) == 0 || fd.modes != nil && !slices.Contains(fd.modes, mode) {
			continue
		}
		put(values, fd.path, jsonOf(fd.path, texts))
	}
	text, err := json.Marshal(values)
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	object, _, err := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer().Decode(text, nil, nil)
	if err != nil {
		return nil, err
	}
	cfg, ok := object.(*v1alpha1.KubeProxyConfiguration)
	if !ok {
		return nil, fmt.Errorf("want a %s", Kind)
	}
	return cfg, nil
}

// FlagsBut returns the flags that fields of a file have, without some.
func FlagsBut(without []string) (out []string) {
	for i := range fields {
		if f := fields[i].flag; f != "" && !slices.Contains(without, f) && !slices.Contains(out, f) {
			out = append(out, f)
		}
	}
	return out
}

// Text returns a KubeProxyConfiguration as YAML.
func Text(cfg *v1alpha1.KubeProxyConfiguration) ([]byte, error) { return yaml.Marshal(cfg) }

// listed are the fields that hold lists.
var listed = []string{"nodePortAddresses", "ipvs.excludeCIDRs"}

// jsonOf returns the texts of a flag as the JSON of a field has them.
func jsonOf(path string, texts []string) any {
	text := strings.Join(texts, ",")
	switch {
	case slices.Contains(listed, path):
		return texts
	case path == "featureGates":
		gates := map[string]bool{}
		for pair := range strings.SplitSeq(text, ",") {
			name, on, _ := strings.Cut(pair, "=")
			gates[name], _ = strconv.ParseBool(on)
		}
		return gates
	case path == "logging.vmodule":
		var out []map[string]any
		for pair := range strings.SplitSeq(text, ",") {
			pattern, verbosity, _ := strings.Cut(pair, "=")
			out = append(out, map[string]any{"filePattern": pattern, "verbosity": json.Number(verbosity)})
		}
		return out
	case path == "showHiddenMetricsForVersion", strings.HasSuffix(path, "infoBufferSize"):
		return text
	}
	if _, err := strconv.ParseFloat(text, 64); err == nil {
		return json.Number(text)
	}
	if on, err := strconv.ParseBool(text); err == nil {
		return on
	}
	return text
}

// put sets a field by its path.
func put(values map[string]any, path string, value any) {
	keys := strings.Split(path, ".")
	for _, key := range keys[:len(keys)-1] {
		inner, ok := values[key].(map[string]any)
		if !ok {
			inner = map[string]any{}
			values[key] = inner
		}
		values = inner
	}
	values[keys[len(keys)-1]] = value
}
