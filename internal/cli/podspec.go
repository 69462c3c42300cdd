package cli

import (
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fairlead/fairlead/internal/svc"
)

// hostImage is the image that stands for the node's own file system.
const hostImage = "host"

// podFlags describe the Pods of 'fairlead run'.
type podFlags struct {
	name, labels, ready string
	ports, env          []string
	workDir, node       string
	hostNetwork         bool
	command             []string
}

// pod builds the Pod that runs the command.
func (f *podFlags) pod() (*corev1.Pod, error) {
	set, err := labels.ConvertSelectorToLabelsMap(f.labels)
	if err != nil {
		return nil, usagef("--labels %q: %w; want KEY=VALUE[,KEY=VALUE]", f.labels, err)
	}
	c := corev1.Container{Name: "main", Image: hostImage, Command: f.command, WorkingDir: f.workDir}
	for _, p := range f.ports {
		port, err := parsePort(p)
		if err != nil {
			return nil, err
		}
		c.Ports = append(c.Ports, port)
	}
	for _, e := range f.env {
		name, value, ok := strings.Cut(e, "=")
		if !ok || name == "" {
			return nil, usagef("--env %q: want NAME=VALUE", e)
		}
		c.Env = append(c.Env, corev1.EnvVar{Name: name, Value: value})
	}
	if c.ReadinessProbe, err = parseProbe(f.ready); err != nil {
		return nil, err
	}
	name, err := f.prefix(set)
	if err != nil {
		return nil, err
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: name + "-", Labels: set},
		Spec: corev1.PodSpec{
			Containers:  []corev1.Container{c},
			NodeName:    f.node,
			HostNetwork: f.hostNetwork,
		},
	}, nil
}

// prefix is what the Pods' names begin with: --name, else the label app, else
// the command.
func (f *podFlags) prefix(set labels.Set) (string, error) {
	if f.name != "" {
		if errs := validation.IsDNS1123Subdomain(f.name); len(errs) > 0 {
			return "", usagef("--name %q: %s", f.name, errs[0])
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

// parsePort reads "[NAME=]PORT[/PROTOCOL]", for example http=9376 or
// dns=53/udp.
func parsePort(s string) (corev1.ContainerPort, error) {
	wrong := usagef("--port %q: want [NAME=]PORT[/tcp|udp|sctp], for example http=9376", s)
	name, rest, named := strings.Cut(s, "=")
	if !named {
		name, rest = "", s
	}
	number, proto, _ := strings.Cut(rest, "/")
	port, err := strconv.ParseUint(number, 10, 16)
	protocol, perr := svc.ParseProtocol(strings.ToUpper(proto))
	if err != nil || perr != nil || port == 0 {
		return corev1.ContainerPort{}, wrong
	}
	if errs := validation.IsValidPortName(name); named && len(errs) > 0 {
		return corev1.ContainerPort{}, usagef("--port %q: the name %s", s, errs[0])
	}
	return corev1.ContainerPort{Name: name, ContainerPort: int32(port), Protocol: corev1.Protocol(protocol.String())}, nil
}

// parseProbe reads "http://:PORT/PATH", "https://:PORT/PATH", "tcp://:PORT" or
// "exec:COMMAND"; empty is no probe.
func parseProbe(s string) (*corev1.Probe, error) {
	if s == "" {
		return nil, nil
	}
	probe := &corev1.Probe{PeriodSeconds: 1, TimeoutSeconds: 1, FailureThreshold: 1}
	if command, ok := strings.CutPrefix(s, "exec:"); ok {
		probe.Exec = &corev1.ExecAction{Command: []string{"/bin/sh", "-c", command}}
		return probe, nil
	}
	wrong := usagef("--ready %q: want http://:PORT/PATH, https://:PORT/PATH, tcp://:PORT or exec:COMMAND", s)
	u, err := url.Parse(s)
	if err != nil || u.Port() == "" {
		return nil, wrong
	}
	port := intstr.Parse(u.Port())
	switch u.Scheme {
	case "http", "https":
		path := u.RequestURI()
		probe.HTTPGet = &corev1.HTTPGetAction{Path: path, Port: port, Host: u.Hostname(), Scheme: corev1.URIScheme(strings.ToUpper(u.Scheme))}
	case "tcp":
		probe.TCPSocket = &corev1.TCPSocketAction{Port: port, Host: u.Hostname()}
	default:
		return nil, wrong
	}
	return probe, nil
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

// trouble returns what keeps a Pod from being ready, in one line.
func trouble(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		last := c.LastTerminationState.Terminated
		switch {
		case c.State.Terminated != nil && c.State.Terminated.Message != "":
			return c.State.Terminated.Message
		case c.State.Waiting != nil && last != nil && last.Message != "": // why it cannot be started
			return fmt.Sprintf("%s: %s", c.State.Waiting.Reason, last.Message)
		case c.State.Waiting != nil && c.State.Waiting.Message != "":
			return fmt.Sprintf("%s: %s", c.State.Waiting.Reason, c.State.Waiting.Message)
		case c.State.Waiting != nil && c.LastTerminationState.Terminated != nil:
			return fmt.Sprintf("%s, last exit code %d", c.State.Waiting.Reason, c.LastTerminationState.Terminated.ExitCode)
		case c.State.Terminated != nil:
			return fmt.Sprintf("ended with exit code %d", c.State.Terminated.ExitCode)
		case !c.Ready && c.State.Running != nil:
			return "running, its readiness probe does not pass"
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return c.Message
		}
	}
	if p.Spec.NodeName == "" {
		return "no node has taken it"
	}
	return "node " + p.Spec.NodeName + " has not started it"
}
