package runner_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/fairlead/fairlead/internal/svc"
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

// Where a machine has no control groups to limit Pods with, the node's condition has the reason,
// and a Pod that runs without its limits has an Event.
func TestLimitsAreNotEnforced(t *testing.T) {
	c := newCluster(t, nil)
	limits := c.r.Limits()
	if limits.Status == corev1.ConditionTrue {
		t.Skip("this machine has control groups: TestLimits in internal/runner/guest has limits enforced")
	}
	if limits.Type != svc.PodsLimited || limits.Status != corev1.ConditionFalse || limits.Reason != "NoControlGroups" ||
		!strings.Contains(limits.Message, "not enforced: no control groups") {
		t.Errorf("the condition is %+v", limits)
	}
	for _, name := range []string{"free", "limited"} {
		p := pod(name, "exit 0")
		p.Spec.RestartPolicy = corev1.RestartPolicyNever
		if name == "limited" {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("32Mi")}
		}
		c.create(p)
		c.until(name, "over", phase(corev1.PodSucceeded))
	}
	await(t, "the Event", func() bool {
		return strings.Contains(c.events("limited"), "Warning LimitsNotEnforced: the pod runs without its limits: no control groups")
	})
	if events := c.events("free"); strings.Contains(events, "LimitsNotEnforced") {
		t.Errorf("a Pod without limits: %s", events)
	}
}
