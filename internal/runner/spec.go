package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/runner/shim"
)

// hostImage is the one image there is: the machine's own file system.
const hostImage = "host"

// defaultPath is the PATH of a container whose env sets none.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// configError is a reason not to start a container that only a change of the
// objects can remove; reason is that of the container's waiting state.
type configError struct{ reason, message string }

func (e configError) Error() string { return e.message }

// checkContainer returns why a container can never run here.
func checkContainer(pod *corev1.PodSpec, c *corev1.Container) error {
	if c.Image != hostImage {
		return configError{"ImageNotSupported", fmt.Sprintf(
			"image %q is not supported: fairlead runs the machine's own programs, write image: %s and a command", c.Image, hostImage)}
	}
	if len(c.Command)+len(c.Args) == 0 {
		return configError{"CreateContainerConfigError", "command is required: with image host there is no default one"}
	}
	if f := podspec.FirstRefused(pod, c.Name); f != nil {
		return configError{"CreateContainerConfigError", fmt.Sprintf("%s is not supported: %s", f.Field, f.Why)}
	}
	return nil
}

// container turns a container of the pod into what a shim starts. t holds the
// pod's tokens. Errors of type configError are permanent; others may pass.
func (r *Runner) container(ctx context.Context, f facts, c *corev1.Container, p podPaths, attempt int, t *tokens) (shim.Container, error) {
	if err := checkContainer(&f.pod.Spec, c); err != nil {
		return shim.Container{}, err
	}
	walls, err := r.walls(f.pod, c)
	if err != nil {
		return shim.Container{}, err
	}
	from := source{client: r.o.Client, namespace: f.pod.Namespace, tokens: t, owner: ownerOf(f.pod, walls)}
	vars, err := variables(ctx, f, c, r.serviceVars(f.pod), from)
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
	for _, a := range append(slices.Clone(c.Command), c.Args...) {
		args = append(args, expand(a, value))
	}
	paths := map[string]string{}
	for i := range f.pod.Spec.Volumes {
		v := &f.pod.Spec.Volumes[i]
		used := func(m corev1.VolumeMount) bool { return m.Name == v.Name }
		if !slices.ContainsFunc(c.VolumeMounts, used) {
			continue
		}
		path, err := volume(ctx, f, v, p.volume(v.Name), from)
		if errors.Is(err, syscall.ECONNREFUSED) && written(p.volume(v.Name)) {
			r.o.Log.Warn("no server answers; the pod's volume stays as it was written last",
				"namespace", f.pod.Namespace, "pod", f.pod.Name, "volume", v.Name, "err", err)
			path, err = p.volume(v.Name), nil
		}
		if err != nil {
			return shim.Container{}, configError{"CreateContainerConfigError", fmt.Sprintf("volume %s: %v", v.Name, err)}
		}
		paths[v.Name] = path
	}
	mounted := c
	if walls != nil && walls.Mount.Confined {
		mounted = readOnlyData(f.pod, c)
	}
	mounts, err := binds(mounted, paths, value)
	if err != nil {
		return shim.Container{}, configError{"CreateContainerConfigError", err.Error()}
	}
	out := shim.Container{
		Name: c.Name, Attempt: attempt, ID: fmt.Sprintf("%s-%s-%d", f.pod.UID, c.Name, attempt),
		Args: args, Dir: c.WorkingDir, Env: environment(vars, hostnameOf(f.pod), home(walls), c.TTY),
		Binds: append(append(p.etcBinds(f.pod), mounts...), p.messageBind(c, attempt)),
		Log:   p.log(c.Name, attempt), Limit: r.o.LogLimit, Record: p.record(c.Name, attempt),
		TTY: c.TTY, Stdin: c.Stdin, StdinOnce: c.StdinOnce,
	}
	// The shim of an earlier version, which outlives the agent's upgrade, knows no walls.
	out.Walls = walls
	out.User, out.Group = identity(f.pod, c)
	out.OOMScoreAdj = oomScoreAdj(f.pod, c, r.memory)
	if out.Cgroup, err = r.cgroups.container(f.pod.UID, c); err != nil {
		return shim.Container{}, err
	}
	return out, nil
}

// environment returns the environment of a process: the variables, and those that
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
func home(w *shim.Walls) string {
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

// podPaths are the paths of one pod below the state directory.
type podPaths struct{ dir string }

func (p podPaths) pod() string                  { return filepath.Join(p.dir, "pod.json") }
func (p podPaths) etc(name string) string       { return filepath.Join(p.dir, "etc", name) }
func (p podPaths) volume(name string) string    { return filepath.Join(p.dir, "volumes", name) }
func (p podPaths) containers() string           { return filepath.Join(p.dir, "containers") }
func (p podPaths) container(name string) string { return filepath.Join(p.containers(), name) }
func (p podPaths) log(name string, attempt int) string {
	return filepath.Join(p.container(name), fmt.Sprintf("%d.log", attempt))
}
func (p podPaths) message(name string, attempt int) string {
	return filepath.Join(p.container(name), fmt.Sprintf("%d.message", attempt))
}
func (p podPaths) record(name string, attempt int) string {
	return filepath.Join(p.container(name), fmt.Sprintf("%d.json", attempt))
}

// etcBinds mounts the pod's own files over those of /etc that the machine has.
func (p podPaths) etcBinds(pod *corev1.Pod) []mount.Bind {
	names := []string{"resolv.conf", "hosts", "hostname"}
	if pod.Spec.HostNetwork {
		names = names[:1]
	}
	var out []mount.Bind
	for _, n := range names {
		out = append(out, mount.Bind{Source: p.etc(n), Target: "/etc/" + n, Optional: true})
	}
	return out
}
