package runner

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/confine"
	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/svc"
)

// PodsConfined is the type of the Node condition that is False where Pods that are not
// allowed to be privileged are not kept apart by users.
const PodsConfined corev1.NodeConditionType = "fairlead.dev/PodsConfined"

// The user and group, inside, of a confined Pod that names none.
const defaultUser, defaultGroup = 1000, 1000

// confined reports whether a Pod is not allowed to be privileged. One without the
// annotation is from before it was set.
func confined(pod *corev1.Pod) bool {
	return pod.Annotations[svc.PodSecurityAnnotation] != "privileged"
}

// security is what a container asks for, with what its Pod asks for all.
type security struct {
	corev1.SecurityContext
	groups []int64
}

func securityOf(pod *corev1.Pod, c *corev1.Container) security {
	var s security
	if c.SecurityContext != nil {
		s.SecurityContext = *c.SecurityContext
	}
	p := pod.Spec.SecurityContext
	if p == nil {
		return s
	}
	s.RunAsUser, s.RunAsGroup = either(s.RunAsUser, p.RunAsUser), either(s.RunAsGroup, p.RunAsGroup)
	s.RunAsNonRoot, s.SeccompProfile = either(s.RunAsNonRoot, p.RunAsNonRoot), either(s.SeccompProfile, p.SeccompProfile)
	s.groups = slices.Clone(p.SupplementalGroups)
	if p.FSGroup != nil {
		s.groups = append(s.groups, *p.FSGroup)
	}
	return s
}

func either[T any](a, b *T) *T {
	if a != nil {
		return a
	}
	return b
}

// walls returns what a container is held to, nil if its processes are as the agent's but
// for user and group.
func (r *Runner) walls(pod *corev1.Pod, c *corev1.Container) (*shim.Walls, error) {
	s := securityOf(pod, c)
	refuse := func(format string, args ...any) (*shim.Walls, error) {
		return nil, configError{"CreateContainerConfigError", fmt.Sprintf(format, args...)}
	}
	locked := confined(pod)
	uid, gid := int64(os.Geteuid()), int64(os.Getegid())
	if locked {
		uid, gid = defaultUser, defaultGroup
		if s.RunAsUser != nil {
			gid = 0 // as with other runtimes
		}
	}
	if s.RunAsUser != nil {
		uid = *s.RunAsUser
	}
	if s.RunAsGroup != nil {
		gid = *s.RunAsGroup
	}
	profile := seccompOf(&s)
	switch {
	case isTrue(s.RunAsNonRoot) && uid == 0 && s.RunAsUser != nil:
		return refuse("container's runAsUser breaks non-root policy (pod: %q, container: %s)", kubeletName(pod), c.Name)
	case isTrue(s.RunAsNonRoot) && uid == 0:
		return refuse("container has runAsNonRoot and image will run as root (pod: %q, container: %s)", kubeletName(pod), c.Name)
	case locked && isTrue(s.Privileged):
		return refuse("privileged: true is for Pods that Pod Security allows it, those of the level privileged")
	case profile == corev1.SeccompProfileTypeLocalhost:
		return refuse("seccompProfile of type Localhost is not supported: want RuntimeDefault or Unconfined")
	case locked && s.ProcMount != nil && *s.ProcMount == corev1.UnmaskedProcMount:
		return refuse("procMount Unmasked is for Pods of the Pod Security level privileged")
	}
	if locked {
		if err := checkIDs(pod, c); err != nil {
			return refuse("%v", err)
		}
	}
	w := &shim.Walls{Spec: confine.Spec{
		UID: uint32(uid), GID: uint32(gid), NoNewPrivs: s.AllowPrivilegeEscalation != nil && !*s.AllowPrivilegeEscalation,
		Seccomp: profile == corev1.SeccompProfileTypeRuntimeDefault || profile == "" && locked,
	}}
	for _, g := range s.groups {
		w.Groups = append(w.Groups, uint32(g))
	}
	if isTrue(s.Privileged) {
		w.Seccomp = false
	}
	if err := capabilities(w, &s, locked); err != nil {
		return refuse("%v", err)
	}
	w.Mount = mount.Walls{ReadOnly: isTrue(s.ReadOnlyRootFilesystem)}
	w.KeepGroups = r.oneUser
	if !locked {
		plain := w.AllCapabilities && !w.NoNewPrivs && !w.Seccomp && !w.Mount.ReadOnly && len(w.Groups) == 0
		if plain {
			return nil, nil
		}
		return w, nil
	}
	w.Mount.Confined, w.Mount.OwnNetwork = true, !pod.Spec.HostNetwork
	w.Mount.Hide = append([]string{r.o.StateDir}, r.o.Hide...)
	if r.oneUser {
		// Not at the start: where all Pods are the user's own, nothing is lost.
		r.warnOneUser.Do(func() {
			r.o.Log.Warn("Pods that are not allowed to be privileged run here, and are not kept apart by users", "namespace", pod.Namespace,
				"pod", pod.Name, "reason", r.confinement().Message)
		})
		w.GID, w.IDs = w.UID, &shim.IDs{First: w.UID, Base: uint32(os.Geteuid()), Size: 1}
		return w, nil
	}
	if r.unmapped != nil {
		return refuse("%v", r.unmapped)
	}
	base, err := r.uids.base(pod.Namespace, r.hasPodsOf)
	w.IDs = &shim.IDs{Base: base, Size: idsPerNamespace}
	return w, err
}

// kubeletName is a Pod as kubelet's messages name it (pkg/kubelet/util/format).
func kubeletName(pod *corev1.Pod) string {
	return fmt.Sprintf("%s_%s(%s)", pod.Name, pod.Namespace, pod.UID)
}

func seccompOf(s *security) corev1.SeccompProfileType {
	if s.SeccompProfile == nil {
		return ""
	}
	return s.SeccompProfile.Type
}

// capabilities sets those of w: the runtimes' default, or all for who is not confined, less
// those dropped, and those added, which other users than root have at once.
func capabilities(w *shim.Walls, s *security, locked bool) error {
	all := confine.AllCapabilities() // in a user namespace of its own
	names := confine.DefaultCapabilities()
	if !locked {
		held, err := confine.HeldCapabilities()
		if err != nil {
			return err
		}
		all, names = held, held
	}
	names = slices.Clone(names)
	c := s.Capabilities
	if c == nil {
		c = &corev1.Capabilities{}
	}
	w.AllCapabilities = !locked && len(c.Add)+len(c.Drop) == 0 || isTrue(s.Privileged)
	for _, d := range c.Drop {
		d := strings.TrimPrefix(strings.ToUpper(string(d)), "CAP_")
		if d == "ALL" {
			names = nil
			continue
		}
		if _, err := confine.Capability(d); err != nil {
			return err
		}
		names = slices.DeleteFunc(names, func(n string) bool { return n == d })
	}
	for _, a := range c.Add {
		if strings.EqualFold(string(a), "ALL") {
			names = slices.Clone(all)
			continue
		}
		n, err := confine.Capability(string(a))
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(strings.ToUpper(string(a)), "CAP_")
		if !slices.Contains(all, name) {
			return fmt.Errorf("the agent does not have %s itself", confine.CapabilityName(n))
		}
		w.Ambient, names = append(w.Ambient, n), append(names, name)
	}
	for _, n := range names {
		if i, err := confine.Capability(n); err == nil && !slices.Contains(w.Bounding, i) {
			w.Bounding = append(w.Bounding, i)
		}
	}
	return nil
}

// hasPodsOf reports whether the node has a Pod of a namespace.
func (r *Runner) hasPodsOf(namespace string) bool {
	found := false
	r.each(func(w *worker) { found = found || w.namespace == namespace })
	return found
}

// confinement is the Node condition PodsConfined.
func (r *Runner) confinement() corev1.NodeCondition {
	if r.oneUser {
		return corev1.NodeCondition{
			Type: PodsConfined, Status: corev1.ConditionFalse, Reason: "OneUser",
			Message: "without root all Pods are of the agent's user: files of that user elsewhere than in hidden directories can be read, " +
				"and supplementalGroups and fsGroup have no effect",
		}
	}
	if r.unmapped != nil {
		return corev1.NodeCondition{
			Type: PodsConfined, Status: corev1.ConditionFalse, Reason: "UsersNotMapped",
			Message: "Pods that are not allowed to be privileged do not start: " + r.unmapped.Error(),
		}
	}
	return corev1.NodeCondition{
		Type: PodsConfined, Status: corev1.ConditionTrue, Reason: "UsersOfNamespaces",
		Message: "Pods that are not allowed to be privileged are of the users " + r.o.UIDs.String(),
	}
}

// readOnlyData returns c with the volumes read-only into which the agent writes: all but
// empty directories and the machine's own.
func readOnlyData(pod *corev1.Pod, c *corev1.Container) *corev1.Container {
	c = c.DeepCopy()
	for i := range c.VolumeMounts {
		m := &c.VolumeMounts[i]
		m.ReadOnly = m.ReadOnly || slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
			return v.Name == m.Name && v.EmptyDir == nil && v.HostPath == nil
		})
	}
	return c
}

// owner is to whom the files of a volume belong: -1 changes nothing. more are rights that
// its group has, and its own files' modes do not.
type owner struct {
	uid, gid int
	more     fs.FileMode
}

// ownerOf returns the owner of what the agent writes into the volumes of a container: its
// user, and the group of its Pod's files. w is nil for a container as the agent is.
func ownerOf(pod *corev1.Pod, w *shim.Walls) owner {
	o := owner{uid: -1, gid: -1}
	if w != nil && w.KeepGroups {
		return o // all is of the one user
	}
	if w != nil && w.IDs != nil {
		o.uid, o.gid = w.Host(w.UID), w.Host(w.GID)
	}
	if s := pod.Spec.SecurityContext; s != nil && s.FSGroup != nil {
		o.gid, o.more = int(*s.FSGroup), 0o440
		if w != nil {
			o.gid = w.Host(uint32(*s.FSGroup))
		}
	}
	return o
}

// give gives the directory of an emptyDir to o. Everybody may write into it.
func (o owner) give(dir string) error {
	if o.uid < 0 && o.gid < 0 {
		return nil
	}
	mode := fs.FileMode(0o777)
	if o.more != 0 {
		mode |= fs.ModeSetgid
	}
	return errors.Join(os.Lchown(dir, o.uid, o.gid), os.Chmod(dir, mode))
}

// rewrite writes a volume of a running pod again, for the containers that have it.
func (w *worker) rewrite(ctx context.Context, f facts, v *corev1.Volume, from source) error {
	for _, c := range w.containers {
		used := func(m corev1.VolumeMount) bool { return m.Name == v.Name }
		if !slices.ContainsFunc(c.spec.VolumeMounts, used) {
			continue
		}
		walls, err := w.r.walls(f.pod, c.spec)
		if err != nil {
			return err
		}
		from.owner = ownerOf(f.pod, walls)
	}
	_, err := volume(ctx, f, v, w.paths.volume(v.Name), from)
	return err
}
