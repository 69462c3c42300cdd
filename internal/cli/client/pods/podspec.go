package pods

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/svc"
)

// podFlags describe the Pods of 'fairlead run'.
type podFlags struct {
	name, labels, ready string
	ports, env          []string
	workDir, node       string
	hostNetwork         bool
	command             []string
	// preStop is a shell command; grace is 0 for the default; user is UID[:GID].
	preStop, user, cpu, memory string
	grace                      time.Duration
}

// pod builds the Pod that runs the command.
func (f *podFlags) pod() (*corev1.Pod, error) {
	set, err := labels.ConvertSelectorToLabelsMap(f.labels)
	if err != nil {
		return nil, base.Usagef("--labels %q: %w; want KEY=VALUE[,KEY=VALUE]", f.labels, err)
	}
	c := corev1.Container{Name: "main", Image: svc.HostImage, Command: f.command, WorkingDir: f.workDir}
	for _, p := range f.ports {
		port, err := podspec.ParsePort(p)
		if err != nil {
			return nil, base.Usagef("--port %w", err)
		}
		c.Ports = append(c.Ports, port)
	}
	for _, e := range f.env {
		name, value, ok := strings.Cut(e, "=")
		if !ok || name == "" {
			return nil, base.Usagef("--env %q: want NAME=VALUE", e)
		}
		c.Env = append(c.Env, corev1.EnvVar{Name: name, Value: value})
	}
	if c.ReadinessProbe, err = podspec.ParseProbe(f.ready); err != nil {
		return nil, base.Usagef("--ready %w", err)
	}
	name, err := f.prefix(set)
	if err != nil {
		return nil, err
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: name + "-", Labels: set},
		Spec: corev1.PodSpec{
			NodeName:    f.node,
			HostNetwork: f.hostNetwork,
		},
	}
	if err := f.limits(&c, &pod.Spec); err != nil {
		return nil, err
	}
	pod.Spec.Containers = []corev1.Container{c}
	return pod, nil
}

// limits sets how the command ends, as whom it runs and what it may use.
func (f *podFlags) limits(c *corev1.Container, s *corev1.PodSpec) error {
	if f.preStop != "" {
		c.Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{
			Exec: &corev1.ExecAction{Command: []string{"/bin/sh", "-c", f.preStop}},
		}}
	}
	switch {
	case f.grace < 0:
		return base.Usagef("--grace is %s; want a time such as 30s", f.grace)
	case f.grace > 0:
		s.TerminationGracePeriodSeconds = new(int64((f.grace + time.Second - 1) / time.Second))
	}
	if f.user != "" {
		uid, gid, hasGroup := strings.Cut(f.user, ":")
		s.SecurityContext = &corev1.PodSecurityContext{}
		n, err := strconv.ParseInt(uid, 10, 32)
		if err != nil || n < 0 {
			return base.Usagef("--user %q: want UID or UID:GID, in numbers", f.user)
		}
		s.SecurityContext.RunAsUser = &n
		if hasGroup {
			g, err := strconv.ParseInt(gid, 10, 32)
			if err != nil || g < 0 {
				return base.Usagef("--user %q: want UID or UID:GID, in numbers", f.user)
			}
			s.SecurityContext.RunAsGroup = &g
		}
	}
	for name, text := range map[corev1.ResourceName]string{corev1.ResourceCPU: f.cpu, corev1.ResourceMemory: f.memory} {
		if text == "" {
			continue
		}
		q, err := resource.ParseQuantity(text)
		if err != nil || q.Sign() <= 0 {
			return base.Usagef("--%s %q: want a quantity such as %s", name, text,
				map[corev1.ResourceName]string{corev1.ResourceCPU: "500m or 2", corev1.ResourceMemory: "256Mi"}[name])
		}
		if c.Resources.Limits == nil {
			c.Resources.Limits, c.Resources.Requests = corev1.ResourceList{}, corev1.ResourceList{}
		}
		c.Resources.Limits[name], c.Resources.Requests[name] = q, q
	}
	return nil
}

// prefix is what the Pods' names begin with: --name, else the label app, else
// the command.
func (f *podFlags) prefix(set labels.Set) (string, error) {
	if f.name != "" {
		if errs := validation.IsDNS1123Subdomain(f.name); len(errs) > 0 {
			return "", base.Usagef("--name %q: %s", f.name, errs[0])
		}
		return f.name, nil
	}
	name := set["app"]
	if name == "" {
		name = filepath.Base(f.command[0])
	}
	name = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(name))
	if name = strings.Trim(name, "-"); name == "" {
		name = "run"
	}
	return name[:min(len(name), 50)], nil
}

// ready reports whether a Pod's Ready condition is True.
func ready(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// cannotStart returns why a Pod's command cannot be run, such as a program that is not
// there; "" if it can.
func cannotStart(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		for _, t := range []*corev1.ContainerStateTerminated{c.State.Terminated, c.LastTerminationState.Terminated} {
			if t != nil && t.Reason == "StartError" {
				return t.Message
			}
		}
	}
	return ""
}
