package coredns

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/corefile"
)

// settings is what 'fairlead dns' makes of a Corefile.
type settings struct {
	configMap string
	notes     []string
	// zones are the cluster domains, reverse reports whether the names of addresses are answered.
	zones   []string
	reverse bool
}

// readCorefile reads the Corefile of CoreDNS's Pod with the files of its ConfigMaps, at the same paths below a directory that is
// removed again. The error is about its line.
func readCorefile(spec *corev1.PodSpec, c container, configMaps map[string]*corev1.ConfigMap) (*settings, error) {
	dir, err := os.MkdirTemp("", "fairlead-migrate-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	s := &settings{}
	var pairs []string
	for _, m := range c.VolumeMounts {
		pairs = append(pairs, path.Clean(m.MountPath)+"/", filepath.Join(dir, m.MountPath)+"/")
	}
	there := strings.NewReplacer(pairs...)
	for _, m := range c.VolumeMounts {
		for i := range spec.Volumes {
			v := &spec.Volumes[i]
			if v.Name != m.Name || v.ConfigMap == nil {
				continue
			}
			if path.Dir(c.file) == path.Clean(m.MountPath) {
				s.configMap = v.ConfigMap.Name
			}
			if err := unpack(filepath.Join(dir, m.MountPath), v.ConfigMap, configMaps[v.ConfigMap.Name], there); err != nil {
				return nil, err
			}
		}
	}
	if s.configMap == "" {
		return nil, fmt.Errorf("CoreDNS's -conf is %s, which it mounts from no ConfigMap: its Corefile cannot be read", c.file)
	}
	plan, err := corefile.Load(filepath.Join(dir, c.file))
	if err != nil {
		return nil, fmt.Errorf("ConfigMap %s: %w", s.configMap, errors.New(strings.ReplaceAll(err.Error(), dir, "")))
	}
	for _, note := range plan.Notes {
		s.notes = append(s.notes, strings.ReplaceAll(note, dir, ""))
	}
	for i := range plan.Blocks {
		for _, p := range plan.Blocks[i].Plugins {
			if k, ok := p.(*corefile.Kubernetes); ok {
				s.zones, s.reverse = append(s.zones, k.Zones...), s.reverse || len(k.Reverse) > 0
			}
		}
	}
	return s, nil
}

// unpack writes the files of a ConfigMap as the kubelet mounts them, with the paths of other files replaced.
func unpack(dir string, v *corev1.ConfigMapVolumeSource, config *corev1.ConfigMap, there *strings.Replacer) error {
	if config == nil {
		if v.Optional != nil && *v.Optional {
			return nil
		}
		return fmt.Errorf("CoreDNS mounts the ConfigMap %s, which is not there", v.Name)
	}
	files := map[string]string{}
	for key, text := range config.Data {
		if len(v.Items) == 0 {
			files[key] = text
		}
	}
	for _, item := range v.Items {
		files[item.Path] = config.Data[item.Key]
	}
	for name, text := range files {
		file := filepath.Join(dir, filepath.FromSlash(path.Clean("/"+name)))
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(there.Replace(text)), 0o600)); err != nil {
			return fmt.Errorf("ConfigMap %s: %w", v.Name, err)
		}
	}
	return nil
}
