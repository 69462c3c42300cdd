package pod

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/registry/annotation"
	"github.com/fairlead/fairlead/internal/svc"
)

// warnings warns of fields of a new Pod that are accepted and probably a mistake.
func warnings(p *corev1.Pod) (out []string) {
	if msgs := utilvalidation.IsDNS1123Label(p.Name); len(msgs) > 0 {
		out = append(out, fmt.Sprintf("metadata.name: this is used in the Pod's hostname, which can result in surprising behavior; "+
			"a DNS label is recommended: %v", msgs))
	}
	return append(out, SpecWarnings(&p.Spec, field.NewPath("spec"))...)
}

// SpecWarnings warns of what is accepted in the spec of a Pod, or of a template, and
// probably not meant.
func SpecWarnings(s *corev1.PodSpec, spec *field.Path) (out []string) {
	out = append(out, duplicates(len(s.HostAliases), spec.Child("hostAliases"), "ip",
		func(i int) string { return s.HostAliases[i].IP })...)
	secrets := spec.Child("imagePullSecrets")
	out = append(out, duplicates(len(s.ImagePullSecrets), secrets, "name",
		func(i int) string { return s.ImagePullSecrets[i].Name })...)
	for i, secret := range s.ImagePullSecrets {
		if secret.Name == "" {
			out = append(out, fmt.Sprintf("%s: invalid empty name %q", secrets.Index(i).Child("name"), secret.Name))
		}
	}
	out = append(out, imageWarnings(s, spec)...)
	out = append(out, commandWarnings(s, spec)...)
	for _, f := range podspec.FindingsAt(s, spec) {
		out = append(out, f.String())
	}
	for _, c := range containers(s, spec) {
		out = append(out, hiddenVariables(c)...)
	}
	return append(out, portWarnings(containers(s, spec))...)
}

// TemplateWarnings warns of what is accepted in a template of Pods, and probably not meant.
func TemplateWarnings(t *corev1.PodTemplateSpec, at *field.Path) []string {
	metadata := at.Child("metadata")
	return slices.Concat(annotation.Warnings("Pod", metadata.Child("annotations"), t.Annotations, nil),
		annotation.LabelWarnings(metadata.Child("labels"), t.Labels, nil), SpecWarnings(&t.Spec, at.Child("spec")))
}

// imageWarnings warns of the first container whose image no node runs: the others say the same.
func imageWarnings(s *corev1.PodSpec, spec *field.Path) []string {
	for _, c := range containers(s, spec) {
		if c.Image == svc.RegisteredImage || c.Image == "" { // the template of a set may leave it out until an admission webhook sets it
			continue
		}
		if why := podspec.CannotRun(c.Image); why != "" {
			return []string{fmt.Sprintf("%s: %s", c.at.Child("image"), why)}
		}
	}
	return nil
}

// commandWarnings warns of each container of the machine's own programs that names none.
func commandWarnings(s *corev1.PodSpec, spec *field.Path) (out []string) {
	for _, c := range containers(s, spec) {
		if c.Image == svc.HostImage && len(c.Command)+len(c.Args) == 0 {
			out = append(out, fmt.Sprintf("%s: image %s has no program of its own: name one here", c.at.Child("command"), svc.HostImage))
		}
	}
	return out
}

// placed is a container and where it stands in the Pod.
type placed struct {
	*corev1.Container
	at *field.Path
}

func containers(s *corev1.PodSpec, spec *field.Path) (out []placed) {
	for i := range s.InitContainers {
		out = append(out, placed{&s.InitContainers[i], spec.Child("initContainers").Index(i)})
	}
	for i := range s.Containers {
		out = append(out, placed{&s.Containers[i], spec.Child("containers").Index(i)})
	}
	return out
}

// duplicates warns of every one of n values that an earlier one equals.
func duplicates(n int, path *field.Path, what string, value func(int) string) (out []string) {
	seen := map[string]bool{}
	for i := range n {
		if v := value(i); seen[v] {
			out = append(out, fmt.Sprintf("%s: duplicate %s %q", path.Index(i).Child(what), what, v))
		}
		seen[value(i)] = true
	}
	return out
}

// hiddenVariables warns of a variable that is set again without use of what it
// was before.
func hiddenVariables(c placed) (out []string) {
	seen := map[string]bool{}
	for i, e := range c.Env {
		ref := "$(" + e.Name + ")"
		if seen[e.Name] && (e.ValueFrom != nil || e.Value == ref || !strings.Contains(e.Value, ref)) {
			out = append(out, fmt.Sprintf("%s: hides previous definition of %q, which may be dropped when using apply", c.at.Child("env").Index(i),
				e.Name))
		}
		seen[e.Name] = true
	}
	return out
}

// portWarnings warns of ports of a Pod that are one port, and of names that
// mean several.
func portWarnings(list []placed) (out []string) {
	type placedPort struct {
		corev1.ContainerPort
		at *field.Path
	}
	ports, names := map[string][]placedPort{}, map[string]*field.Path{}
	var named []string
	for _, c := range list {
		for i, p := range c.Ports {
			at := c.at.Child("ports").Index(i)
			if p.HostIP != "" && p.HostPort == 0 {
				out = append(out, fmt.Sprintf("%s: hostIP set without hostPort: %+v", at, p))
			}
			key := fmt.Sprintf("%d/%s", p.ContainerPort, p.Protocol)
			for _, other := range ports[key] {
				if kind := clash(p, other.ContainerPort); kind != "" {
					out = append(out, fmt.Sprintf("%s: %s port definition with %s", at, kind, other.at))
				}
			}
			ports[key] = append(ports[key], placedPort{p, at})
			if other := names[p.Name]; p.Name != "" && other != nil {
				named = append(named, fmt.Sprintf("%s: duplicate port name %q with %s, services and probes that select ports by name will use %s", at,
					p.Name, other, other))
			} else {
				names[p.Name] = at
			}
		}
	}
	return append(out, named...)
}

// clash names how two ports of one number and protocol are in each other's way.
func clash(a, b corev1.ContainerPort) string {
	switch {
	case a.HostIP == b.HostIP && a.HostPort == b.HostPort:
		return "duplicate"
	case a.HostPort == 0 || b.HostPort == 0:
		return "overlapping"
	case a.HostPort == b.HostPort && (a.HostIP == "") != (b.HostIP == ""):
		return "dangerously ambiguous"
	}
	return ""
}
