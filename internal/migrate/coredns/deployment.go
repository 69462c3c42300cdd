package coredns

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// PodLabel is the label of the Pods that a migration of DNS makes. The manifest's own label may be CoreDNS's, as RKE2's is.
const PodLabel = "fairlead.dev/migrate-dns"

// The values of PodLabel.
const (
	serving   = "server"
	comparing = "compare"
)

// Selector selects fairlead's Pods.
func Selector() map[string]string { return map[string]string{PodLabel: serving} }

// container is CoreDNS's in its Pod, with the Corefile that it reads.
type container struct {
	*corev1.Container
	file string
}

// serverOf returns the container that runs CoreDNS.
func serverOf(d *appsv1.Deployment) (container, error) {
	for i := range d.Spec.Template.Spec.Containers {
		c := &d.Spec.Template.Spec.Containers[i]
		words := slices.Concat(c.Command, c.Args)
		for j, w := range words {
			name, value, has := strings.Cut(w, "=")
			if strings.TrimLeft(name, "-") != "conf" || !strings.HasPrefix(name, "-") {
				continue
			}
			if !has && j+1 < len(words) {
				value = words[j+1]
			}
			if path.IsAbs(value) {
				return container{c, path.Clean(value)}, nil
			}
		}
	}
	return container{}, fmt.Errorf("the Deployment %s has no container with the argument -conf and a path, as CoreDNS's has", d.Name)
}

// ports are where CoreDNS's Pods and the Service answer over UDP.
func ports(s *corev1.Service, c *corev1.Container) (ofPods, ofService int32, err error) {
	for _, p := range s.Spec.Ports {
		if p.Protocol != corev1.ProtocolUDP {
			continue
		}
		if p.TargetPort.Type == intstr.Int && p.TargetPort.IntVal != 0 {
			return p.TargetPort.IntVal, p.Port, nil
		}
		if p.TargetPort.StrVal == "" {
			return p.Port, p.Port, nil
		}
		for _, at := range c.Ports {
			if at.Name == p.TargetPort.StrVal {
				return at.ContainerPort, p.Port, nil
			}
		}
		return 0, 0, fmt.Errorf("the Service %s has targetPort %s, which no port of CoreDNS's container has", s.Name, p.TargetPort.StrVal)
	}
	return 0, 0, fmt.Errorf("the Service %s has no UDP port", s.Name)
}

// Ours returns the Deployment of fairlead dns that takes CoreDNS's place with its Corefile, environment, ports, probes and nodes.
// The Service selects its Pods if joined is set. base is the manifest's; image replaces its image unless it is empty.
func (p *Plan) Ours(base *appsv1.Deployment, joined bool, image string) *appsv1.Deployment {
	out, from := base.DeepCopy(), &p.theirs.Spec.Template.Spec
	replicas := p.replicas
	out.Spec.Replicas, out.Spec.Selector = &replicas, &metav1.LabelSelector{MatchLabels: Selector()}
	out.Namespace = p.theirs.Namespace
	labels := Selector()
	if joined {
		maps.Copy(labels, p.Selected())
	}
	out.Spec.Template.Labels = labels
	spec := &out.Spec.Template.Spec
	spec.NodeSelector, spec.Tolerations = maps.Clone(from.NodeSelector), slices.Clone(from.Tolerations)
	spec.DNSPolicy, spec.DNSConfig = from.DNSPolicy, from.DNSConfig.DeepCopy()
	spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
		PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{{Weight: 100, PodAffinityTerm: corev1.PodAffinityTerm{
			TopologyKey: corev1.LabelHostname, LabelSelector: &metav1.LabelSelector{MatchLabels: Selector()},
		}}},
	}}
	if from.Affinity != nil {
		spec.Affinity.NodeAffinity = from.Affinity.NodeAffinity.DeepCopy()
	}
	c := &spec.Containers[0]
	if image != "" {
		c.Image = image
	}
	c.Args = []string{"dns", "--corefile=" + p.server.file}
	c.Env, c.EnvFrom = slices.Clone(p.server.Env), slices.Clone(p.server.EnvFrom)
	probes(c, p.server.Container)
	spec.Volumes, c.VolumeMounts = nil, nil
	for _, m := range p.server.VolumeMounts {
		i := slices.IndexFunc(from.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		if i < 0 {
			continue
		}
		m.ReadOnly = true
		c.VolumeMounts = append(c.VolumeMounts, m)
		if !slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name }) {
			spec.Volumes = append(spec.Volumes, *from.Volumes[i].DeepCopy())
		}
	}
	return out
}

// probes gives a container the ports and the probes of CoreDNS's, which fit to its Corefile. A probe that it lacks stays.
func probes(c, from *corev1.Container) {
	for _, p := range []*corev1.Probe{c.ReadinessProbe, c.LivenessProbe} {
		for _, at := range c.Ports {
			if at.Name == p.HTTPGet.Port.StrVal {
				p.HTTPGet.Port = intstr.FromInt32(at.ContainerPort)
			}
		}
	}
	c.Ports = slices.Clone(from.Ports)
	for to, p := range map[**corev1.Probe]*corev1.Probe{&c.ReadinessProbe: from.ReadinessProbe, &c.LivenessProbe: from.LivenessProbe} {
		if p != nil {
			*to = p.DeepCopy()
		}
	}
}

// Budget returns the PodDisruptionBudget of the manifest for the Pods of Ours.
func Budget(b *policyv1.PodDisruptionBudget) *policyv1.PodDisruptionBudget {
	out := b.DeepCopy()
	out.Spec.Selector = &metav1.LabelSelector{MatchLabels: Selector()}
	return out
}

// podDeadline bounds the Pod that compares, in seconds.
const podDeadline = 300

// settles is how long answers may differ while the Pod compares them: the servers learn of a change one after the other.
const settles = time.Minute

// PodFor returns the Pod that asks servers the questions, and compares their answers with those of like. It runs once, and has the
// place and the image of Ours. Answers may differ for a minute, and for half of timeout at most: the rest is for the Pod to start.
func PodFor(ours *appsv1.Deployment, servers []string, like string, questions []string, timeout time.Duration) *corev1.Pod {
	deadline, no := int64(podDeadline), false
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "fairlead-migrate-dns", Namespace: ours.Namespace, Labels: map[string]string{PodLabel: comparing},
		},
		Spec: *ours.Spec.Template.Spec.DeepCopy(),
	}
	pod.Spec.RestartPolicy, pod.Spec.ActiveDeadlineSeconds = corev1.RestartPolicyNever, &deadline
	pod.Spec.AutomountServiceAccountToken, pod.Spec.Volumes, pod.Spec.Affinity.PodAntiAffinity = &no, nil, nil
	pod.Spec.Containers = pod.Spec.Containers[:1]
	c := &pod.Spec.Containers[0]
	c.ReadinessProbe, c.LivenessProbe, c.StartupProbe, c.Lifecycle, c.Ports, c.VolumeMounts = nil, nil, nil, nil, nil, nil
	c.TerminationMessagePolicy = corev1.TerminationMessageFallbackToLogsOnError
	c.Args = []string{"migrate", "compare-dns", "--within=" + min(settles, timeout/2).String(), "--servers=" + strings.Join(servers, ","),
		"--like=" + like}
	c.Args = append(c.Args, questions...)
	return pod
}
