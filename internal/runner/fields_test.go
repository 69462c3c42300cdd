package runner_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// A Pod with a field without which it would be another one is not started; the reason
// names the field, in the status and in an Event. Others of the Pod's kind run.
func TestRefusedFields(t *testing.T) {
	c := newCluster(t, nil)
	for name, change := range map[string]func(*corev1.PodSpec){
		"spec.volumes[0].image": func(s *corev1.PodSpec) {
			s.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: "x"}}}}
		},
		"spec.os": func(s *corev1.PodSpec) { s.OS = &corev1.PodOS{Name: corev1.Windows} },
		"spec.securityContext.sysctls": func(s *corev1.PodSpec) {
			s.SecurityContext = &corev1.PodSecurityContext{Sysctls: []corev1.Sysctl{{Name: "net.ipv4.ip_forward", Value: "1"}}}
		},
		"spec.containers[0].lifecycle.stopSignal": func(s *corev1.PodSpec) {
			s.OS = &corev1.PodOS{Name: corev1.Linux}
			s.Containers[0].Lifecycle = &corev1.Lifecycle{StopSignal: new(corev1.SIGUSR1)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &cluster{t: t, client: c.client}
			p := pod("refused-"+strings.ToLower(name[strings.LastIndexByte(name, '.')+1:]), "exit 0")
			change(&p.Spec)
			c.create(p)
			c.until(p.Name, "refused", func(p *corev1.Pod) bool {
				s := p.Status.ContainerStatuses
				return len(s) > 0 && s[0].State.Waiting != nil && s[0].State.Waiting.Reason == "CreateContainerConfigError" &&
					strings.Contains(s[0].State.Waiting.Message, name+" is not supported")
			})
			await(t, "the Event", func() bool { return strings.Contains(c.events(p.Name), name+" is not supported") })
		})
	}
}
