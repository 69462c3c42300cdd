package migrate

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
)

// excluding is the expression that keeps kube-proxy off changed nodes.
func excluding() corev1.NodeSelectorRequirement {
	return corev1.NodeSelectorRequirement{Key: Label, Operator: corev1.NodeSelectorOpNotIn, Values: slices.Clone(withoutKubeProxy)}
}

// Exclude returns kube-proxy's DaemonSet with an affinity that keeps it off changed nodes, beside the affinity that it has.
func Exclude(d *appsv1.DaemonSet) *appsv1.DaemonSet {
	out := Include(d)
	Require(&out.Spec.Template.Spec, excluding())
	return out
}

// Require adds an expression to every term of a Pod's required affinity to nodes, of which one must match.
func Require(spec *corev1.PodSpec, e corev1.NodeSelectorRequirement) {
	if spec.Affinity == nil {
		spec.Affinity = &corev1.Affinity{}
	}
	if spec.Affinity.NodeAffinity == nil {
		spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	a := spec.Affinity.NodeAffinity
	if a.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		a.RequiredDuringSchedulingIgnoredDuringExecution = &corev1.NodeSelector{NodeSelectorTerms: make([]corev1.NodeSelectorTerm, 1)}
	}
	terms := a.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	for i := range terms {
		terms[i].MatchExpressions = append(terms[i].MatchExpressions, e)
	}
}

// byPhase reports whether a DaemonSet selects nodes by their Phase, as that of Ours does.
func byPhase(d *appsv1.DaemonSet) bool {
	a := d.Spec.Template.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return false
	}
	terms := a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	return len(terms) > 0 && !slices.ContainsFunc(terms, func(t corev1.NodeSelectorTerm) bool {
		return !slices.ContainsFunc(t.MatchExpressions, func(e corev1.NodeSelectorRequirement) bool { return e.Key == Label })
	})
}

// Include returns the DaemonSet without what Exclude has added, so that its template is the one before.
func Include(d *appsv1.DaemonSet) *appsv1.DaemonSet {
	out := d.DeepCopy()
	Unrequire(&out.Spec.Template.Spec, Label)
	return out
}

// Unrequire removes what Require has added for a label of nodes.
func Unrequire(spec *corev1.PodSpec, label string) {
	if spec.Affinity == nil || spec.Affinity.NodeAffinity == nil {
		return
	}
	required := spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if required == nil {
		return
	}
	var left []corev1.NodeSelectorTerm
	removed := false
	for _, t := range required.NodeSelectorTerms {
		n := len(t.MatchExpressions)
		t.MatchExpressions = slices.DeleteFunc(t.MatchExpressions, func(e corev1.NodeSelectorRequirement) bool {
			return e.Key == label
		})
		removed = removed || len(t.MatchExpressions) < n
		if len(t.MatchExpressions)+len(t.MatchFields) > 0 {
			left = append(left, t)
		}
	}
	if required.NodeSelectorTerms = left; len(left) > 0 || !removed {
		return
	}
	spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution = nil
	if equality.Semantic.DeepEqual(spec.Affinity.NodeAffinity, &corev1.NodeAffinity{}) {
		spec.Affinity.NodeAffinity = nil
	}
	if equality.Semantic.DeepEqual(spec.Affinity, &corev1.Affinity{}) {
		spec.Affinity = nil
	}
}

// Ours returns the DaemonSet of fairlead proxy that takes kube-proxy's place with its arguments, environment and files, on the
// nodes that have one of withFairlead as label. base is the one of the manifest; image replaces its image unless it is empty.
func Ours(base, theirs *appsv1.DaemonSet, s *Settings, image string) *appsv1.DaemonSet {
	out := base.DeepCopy()
	spec := &out.Spec.Template.Spec
	spec.Affinity = Include(theirs).Spec.Template.Spec.Affinity.DeepCopy()
	Require(spec, corev1.NodeSelectorRequirement{Key: Label, Operator: corev1.NodeSelectorOpIn, Values: slices.Clone(withFairlead)})
	spec.NodeSelector = maps.Clone(theirs.Spec.Template.Spec.NodeSelector)
	c, from := &spec.Containers[0], &theirs.Spec.Template.Spec.Containers[0]
	if image != "" {
		c.Image = image
	}
	// The image has no iptables. The flag comes first whatever the file says.
	c.Args = append(append([]string{"proxy"}, s.Args...), "--mode=nft")
	c.Env, c.EnvFrom = slices.Clone(from.Env), slices.Clone(from.EnvFrom)
	spec.Volumes, c.VolumeMounts = files(&theirs.Spec.Template.Spec, from)
	for _, p := range []*corev1.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
		s.probe(p)
	}
	return out
}

// arguments returns kube-proxy's arguments in its DaemonSet.
func arguments(d *appsv1.DaemonSet) ([]string, error) {
	if len(d.Spec.Template.Spec.Containers) == 0 {
		return nil, fmt.Errorf("the DaemonSet %s has no container", d.Name)
	}
	c := &d.Spec.Template.Spec.Containers[0]
	words := slices.Concat(c.Command, c.Args)
	if len(words) == 0 {
		return nil, fmt.Errorf("the DaemonSet %s has no command: name kube-proxy's program and flags there", d.Name)
	}
	if path.Base(words[0]) == "kube-proxy" {
		return words[1:], nil
	}
	if len(c.Command) == 0 && strings.HasPrefix(words[0], "-") {
		return words, nil
	}
	return nil, fmt.Errorf("the DaemonSet %s starts %q, whose flags for kube-proxy cannot be read: name kube-proxy's program there",
		d.Name, words[0])
}

// files returns the volumes that kube-proxy reads its configuration from, and their mounts, read-only. Locks and modules of
// the host, which mode nft does not need, are left out.
func files(spec *corev1.PodSpec, c *corev1.Container) (volumes []corev1.Volume, mounts []corev1.VolumeMount) {
	for _, m := range c.VolumeMounts {
		i := slices.IndexFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		if i < 0 || hostOnly(&spec.Volumes[i]) {
			continue
		}
		m.ReadOnly = true
		mounts = append(mounts, m)
		if !slices.ContainsFunc(volumes, func(v corev1.Volume) bool { return v.Name == m.Name }) {
			volumes = append(volumes, *spec.Volumes[i].DeepCopy())
		}
	}
	return volumes, mounts
}

// hostOnly reports whether a volume is for the iptables and the modules of the host.
func hostOnly(v *corev1.Volume) bool {
	return v.HostPath != nil && (v.HostPath.Path == "/lib/modules" || strings.HasPrefix(v.HostPath.Path, "/run/xtables.lock") ||
		strings.HasPrefix(v.HostPath.Path, "/sys"))
}
