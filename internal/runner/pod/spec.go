package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/runner/confinement"
	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/runner/values"
	"github.com/fairlead/fairlead/internal/runner/volumes"
	"github.com/fairlead/fairlead/internal/svc"
)

// defaultPath is the PATH of a container whose env sets none.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// configError is a reason not to start a container that only a change of the
// objects can remove; reason is that of the container's waiting state.
type configError struct{ reason, message string }

func (e configError) Error() string { return e.message }

// checkContainer returns why a container can never run here.
func (n *node) checkContainer(pod *corev1.PodSpec, c *corev1.Container) error {
	_, cannot, err := n.Images.Command(c.Image, c.Command, c.Args)
	if cannot != "" {
		return configError{"ImageNotSupported", cannot}
	}
	if err != nil {
		return configError{"CreateContainerConfigError", err.Error()}
	}
	if f := podspec.FirstRefused(pod, c.Name); f != nil {
		return configError{"CreateContainerConfigError", fmt.Sprintf("%s is not supported: %s", f.Field, f.Why)}
	}
	return nil
}

// shimSpec turns the container into what a shim starts. Errors of type configError are permanent; others
// may pass.
func (c *container) shimSpec(ctx context.Context, pod *corev1.Pod, attempt int) (shim.Container, error) {
	w, spec := c.w, c.Spec
	if err := w.node.checkContainer(&pod.Spec, spec); err != nil {
		return shim.Container{}, err
	}
	command, _, _ := w.node.Images.Command(spec.Image, spec.Command, spec.Args) // checked
	confined, err := w.node.Confinement.Of(pod, spec)
	var refused confinement.RefusedError
	if errors.As(err, &refused) {
		err = configError{"CreateContainerConfigError", err.Error()}
	}
	if err != nil {
		return shim.Container{}, err
	}
	if program := w.node.Images.Program(spec.Image); len(spec.Command) == 0 && confined != nil && confined.Mount.Hides(program) {
		return shim.Container{}, configError{"CreateContainerConfigError", fmt.Sprintf(
			"the node's program for image %.100q is %s, in a directory that is hidden from Pods", spec.Image, program)}
	}
	f, from, p := w.facts(pod), w.source(pod), w.paths
	vars, err := values.Variables(ctx, f, spec, w.node.ServiceVars(pod), from)
	if err != nil {
		return shim.Container{}, configError{"CreateContainerConfigError", err.Error()}
	}
	value := func(name string) (string, bool) {
		for _, v := range vars {
			if v.Name == name {
				return v.Value, true
			}
		}
		return "", false
	}
	var args []string
	for _, a := range append(slices.Clone(command), spec.Args...) {
		args = append(args, values.Expand(a, value))
	}
	paths, err := c.volumes(ctx, f, from, volumes.OwnerOf(pod, confined))
	if err != nil {
		return shim.Container{}, err
	}
	mounted := spec
	if confined != nil && confined.Mount.Confined {
		mounted = volumes.ReadOnlyData(pod, spec)
	}
	mounts, err := volumes.Binds(&pod.Spec, mounted, paths, value)
	if err != nil {
		return shim.Container{}, configError{"CreateContainerConfigError", err.Error()}
	}
	out := shim.Container{
		Name: spec.Name, Attempt: attempt, ID: fmt.Sprintf("%s-%s-%d", pod.UID, spec.Name, attempt),
		Args: args, Dir: spec.WorkingDir, Env: environment(vars, hostnameOf(pod), home(confined), spec.TTY),
		Binds: append(append(p.etcBinds(pod), mounts...), p.messageBind(spec, attempt)),
		Log:   p.Log(spec.Name, attempt), Limit: w.node.LogLimit, Record: p.record(spec.Name, attempt),
		TTY: spec.TTY, Stdin: spec.Stdin, StdinOnce: spec.StdinOnce,
	}
	// The shim of an earlier version, which outlives the agent's upgrade, ignores the confinement.
	out.Confinement = confined
	if out.Programs, err = p.programs(pod, confined); err != nil {
		return shim.Container{}, err
	}
	out.User, out.Group = identity(pod, spec)
	out.OOMScoreAdj = confinement.OOMScoreAdj(pod, spec, w.node.memory)
	if out.Cgroup, err = w.node.Groups.Container(pod.UID, spec); err != nil {
		return shim.Container{}, err
	}
	return out, nil
}

// programs returns what a confined container sees of directories that are hidden from it. The Pod has named the content of
// each, so it sees nothing that its author has not read.
func (p Paths) programs(pod *corev1.Pod, confined *shim.Confinement) (out []shim.Program, err error) {
	if confined == nil || !confined.Mount.Confined {
		return nil, nil
	}
	programs, err := podspec.ParsePrograms(pod.Annotations[svc.ProgramsAnnotation])
	if err != nil {
		return nil, configError{"CreateContainerConfigError", fmt.Sprintf("annotation %s: %v", svc.ProgramsAnnotation, err)}
	}
	for _, f := range programs {
		if mount.Hidden(f.Path) && !confined.Mount.Own(f.Path) {
			out = append(out, shim.Program{Path: f.Path, SHA256: f.SHA256, Copy: p.program(f.SHA256)})
		}
	}
	return out, nil
}

// volumes prepares the volumes of the container and returns their paths on the machine, by name.
func (c *container) volumes(ctx context.Context, f values.Facts, from values.Source, o volumes.Owner) (map[string]string, error) {
	w, spec := c.w, c.Spec
	paths := map[string]string{}
	for i := range f.Pod.Spec.Volumes {
		v := &f.Pod.Spec.Volumes[i]
		used := func(m corev1.VolumeMount) bool { return m.Name == v.Name }
		if !slices.ContainsFunc(spec.VolumeMounts, used) {
			continue
		}
		path, err := volumes.Prepare(ctx, f, v, w.paths.volume(v.Name), from, o)
		if errors.Is(err, syscall.ECONNREFUSED) && volumes.Written(w.paths.volume(v.Name)) {
			w.log.Warn("no server answers; the pod's volume stays as it was written last", "volume", v.Name, "err", err)
			path, err = w.paths.volume(v.Name), nil
		}
		if err != nil {
			return nil, configError{"CreateContainerConfigError", fmt.Sprintf("volume %s: %v", v.Name, err)}
		}
		paths[v.Name] = path
	}
	return paths, nil
}

// environment returns the environment of a process: the variables, and the ones that
// container runtimes add unless the pod sets them.
func environment(vars []corev1.EnvVar, hostname, home string, tty bool) []string {
	defaults := []corev1.EnvVar{{Name: "PATH", Value: defaultPath}, {Name: "HOME", Value: home}, {Name: "HOSTNAME", Value: hostname}}
	if tty {
		defaults = append(defaults, corev1.EnvVar{Name: "TERM", Value: "xterm"})
	}
	var out []string
	for _, d := range defaults {
		if !slices.ContainsFunc(vars, func(v corev1.EnvVar) bool { return v.Name == d.Name }) {
			out = append(out, d.Name+"="+d.Value)
		}
	}
	for _, v := range vars {
		out = append(out, v.Name+"="+v.Value)
	}
	return out
}

// home is the HOME of a process that is given none.
func home(w *shim.Confinement) string {
	if h := os.Getenv("HOME"); h != "" && (w == nil || !w.Mount.Confined) {
		return h
	}
	return "/"
}

// identity returns the user and group to run as, nil for the agent's own.
func identity(pod *corev1.Pod, c *corev1.Container) (user, group *int64) {
	if s := pod.Spec.SecurityContext; s != nil {
		user, group = s.RunAsUser, s.RunAsGroup
	}
	if s := c.SecurityContext; s != nil {
		if s.RunAsUser != nil {
			user = s.RunAsUser
		}
		if s.RunAsGroup != nil {
			group = s.RunAsGroup
		}
	}
	return user, group
}
