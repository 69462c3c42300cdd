package pod

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/svc"
)

// Defaults run on every decoding, so the second time must change nothing.
func TestDefaultsAreStable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPod(t)
		setDefaults(p)
		again := p.DeepCopy()
		setDefaults(again)
		if d := cmp.Diff(p, again); d != "" {
			t.Fatal(d)
		}
	})
}

func drawPod(t *rapid.T) *corev1.Pod {
	p := &corev1.Pod{}
	p.Spec.HostNetwork = rapid.Bool().Draw(t, "host network")
	p.Spec.ServiceAccountName = rapid.SampledFrom([]string{"", "a"}).Draw(t, "account")
	p.Spec.DeprecatedServiceAccount = rapid.SampledFrom([]string{"", "b"}).Draw(t, "old account")
	c := corev1.Container{Image: rapid.SampledFrom([]string{"host", "a:1", "r:5000/a", "a@sha256:0", "a:latest"}).Draw(t, "image")}
	for range rapid.IntRange(0, 2).Draw(t, "ports") {
		c.Ports = append(c.Ports, corev1.ContainerPort{ContainerPort: int32(rapid.IntRange(1, 99).Draw(t, "port"))})
	}
	if rapid.Bool().Draw(t, "probe") {
		c.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{}},
			PeriodSeconds: int32(rapid.IntRange(0, 3).Draw(t, "period"))}
	}
	if rapid.Bool().Draw(t, "limits") {
		c.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}
	}
	p.Spec.Containers = []corev1.Container{c}
	p.Spec.Volumes = []corev1.Volume{{Name: "v"},
		{Name: "w", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}}}
	ips := rapid.SampledFrom([]string{"", "10.0.0.1", "10.0.0.2"})
	p.Status.PodIP = ips.Draw(t, "ip")
	if first := ips.Draw(t, "first ip"); first != "" {
		p.Status.PodIPs = []corev1.PodIP{{IP: first}, {IP: "fd00::1"}}
	}
	return p
}

// A template of Pods has warnings about its annotations and its labels, with their places.
func TestTemplateWarnings(t *testing.T) {
	template := &corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{
		Annotations: map[string]string{svc.Domain + "/nothing": ""}, Labels: map[string]string{svc.WeightAnnotation: "2", "app": "a"},
	}}
	got := strings.Join(TemplateWarnings(template, field.NewPath("spec", "template")), "\n")
	for _, want := range []string{
		"spec.template.metadata.annotations[fairlead.dev/nothing]: ",
		"spec.template.metadata.labels[fairlead.dev/weight]: it is an annotation, and has no effect as a label",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no warning %q in\n%s", want, got)
		}
	}
}

func TestPullPolicy(t *testing.T) {
	for image, want := range map[string]corev1.PullPolicy{
		"host": corev1.PullAlways, "a:latest": corev1.PullAlways, "a:1": corev1.PullIfNotPresent, "r:5000/a": corev1.PullAlways,
		"r:5000/a:2": corev1.PullIfNotPresent, "a@sha256:00": corev1.PullIfNotPresent,
	} {
		if got := pullPolicy(image); got != want {
			t.Errorf("%s: %s, want %s", image, got, want)
		}
	}
}

func TestQOSClass(t *testing.T) {
	list := func(cpu, memory string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
	}
	for _, c := range []struct {
		r    corev1.ResourceRequirements
		want corev1.PodQOSClass
	}{
		{corev1.ResourceRequirements{}, corev1.PodQOSBestEffort},
		{corev1.ResourceRequirements{Limits: list("1", "1Gi"), Requests: list("1", "1Gi")}, corev1.PodQOSGuaranteed},
		{corev1.ResourceRequirements{Limits: list("1", "1Gi"), Requests: list("1", "1Mi")}, corev1.PodQOSBurstable},
		{corev1.ResourceRequirements{Requests: list("1", "1Mi")}, corev1.PodQOSBurstable},
	} {
		p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Resources: c.r}}}}
		if got := qosClass(p); got != c.want {
			t.Errorf("%+v: %s, want %s", c.r, got, c.want)
		}
	}
}

// What kubectl get pods shows in its column STATUS.
func TestSummary(t *testing.T) {
	waiting := func(reason string) corev1.ContainerState {
		return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}
	}
	ended := func(code int32, reason string) corev1.ContainerState {
		return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Reason: reason}}
	}
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	now := metav1.Now()
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		want   string
		ready  int
	}{
		"pending":   {func(*corev1.Pod) {}, "Pending", 0},
		"running":   {func(p *corev1.Pod) { p.Status.Phase = corev1.PodRunning; add(p, running, true) }, "Running", 1},
		"not ready": {func(p *corev1.Pod) { p.Status.Phase = corev1.PodRunning; add(p, running, false) }, "Running", 0},
		"crashing":  {func(p *corev1.Pod) { add(p, waiting("CrashLoopBackOff"), false) }, "CrashLoopBackOff", 0},
		"completed": {func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded; add(p, ended(0, "Completed"), false) }, "Completed", 0},
		"exit code": {func(p *corev1.Pod) { add(p, ended(2, ""), false) }, "ExitCode:2", 0},
		"evicted":   {func(p *corev1.Pod) { p.Status.Reason = "Evicted" }, "Evicted", 0},
		"one of two done": {func(p *corev1.Pod) {
			p.Status.Phase = corev1.PodRunning
			add(p, ended(0, "Completed"), false)
			add(p, running, true)
		}, "NotReady", 1},
		"terminating": {func(p *corev1.Pod) { p.DeletionTimestamp = &now; add(p, running, true) }, "Terminating", 1},
		"init": {func(p *corev1.Pod) {
			p.Spec.InitContainers = make([]corev1.Container, 2)
			p.Status.InitContainerStatuses = []corev1.ContainerStatus{{State: ended(0, "")}, {State: running}}
		}, "Init:1/2", 0},
		"init failed": {func(p *corev1.Pod) {
			p.Spec.InitContainers = make([]corev1.Container, 1)
			p.Status.InitContainerStatuses = []corev1.ContainerStatus{{State: ended(1, "Error")}}
		}, "Init:Error", 0},
	} {
		p := &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodPending}}
		c.change(p)
		if s := summarize(p); s.reason != c.want || s.ready != c.ready {
			t.Errorf("%s: %q with %d ready, want %q with %d", name, s.reason, s.ready, c.want, c.ready)
		}
	}
}

func add(p *corev1.Pod, state corev1.ContainerState, ready bool) {
	p.Spec.Containers = append(p.Spec.Containers, corev1.Container{})
	p.Status.ContainerStatuses = append(p.Status.ContainerStatuses, corev1.ContainerStatus{State: state, Ready: ready})
}

// What is accepted and never runs is named when it is written, not when a node fails.
func TestCommandWarnings(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		container corev1.Container
		want      string
	}{
		{corev1.Container{Image: svc.HostImage}, "spec.containers[0].command: image host has no program of its own: name one here"},
		{corev1.Container{Image: svc.HostImage, Args: []string{"true"}}, ""},
		{corev1.Container{Image: svc.HostImage, Command: []string{"true"}}, ""},
	} {
		got := commandWarnings(&corev1.PodSpec{Containers: []corev1.Container{c.container}}, field.NewPath("spec"))
		if strings.Join(got, "\n") != c.want {
			t.Errorf("%+v: %q, want %q", c.container, got, c.want)
		}
	}
}
