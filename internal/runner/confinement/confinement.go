// Package confinement decides what the processes of a container may do on the machine: their user and groups,
// capabilities, system calls and files (securityContext), and the limits of their control groups.
package confinement

import (
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/confine"
	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/svc"
)

// The user and group, inside, of a confined Pod that names none.
const defaultUser, defaultGroup = 1000, 1000

// Confined reports whether a Pod is not allowed to be privileged. One without the
// annotation is from before it was set.
func Confined(pod *corev1.Pod) bool {
	return pod.Annotations[svc.PodSecurityAnnotation] != "privileged"
}

// Options configure a confinement.
type Options struct {
	// UIDs are the users for Pods that are not allowed to be privileged.
	UIDs UIDRange
	// StateDir keeps the users of namespaces. Confined Pods see neither it nor Hide.
	StateDir string
	Hide     []string
	// Used reports whether the node has a Pod of a namespace.
	Used func(namespace string) bool
	Log  *slog.Logger
}

// Confinement is how this node confines containers. Its methods are safe for concurrent use.
type Confinement struct {
	o    Options
	uids *uids
	// oneUser reports that there is only one user, as without root; warnOneUser warns when that matters.
	oneUser     bool
	warnOneUser sync.Once
	// unmapped is why the range of users cannot be used, nil if it can.
	unmapped error
}

// New reads the users of namespaces.
func New(o Options) (*Confinement, error) {
	c := &Confinement{o: o, oneUser: confine.OneUser()}
	if !c.oneUser && !confine.Mapped(o.UIDs.First, o.UIDs.Last) {
		c.unmapped = fmt.Errorf("--pod-uid-range %s is not within the users of the agent's own user namespace (/proc/self/uid_map)", o.UIDs)
		o.Log.Warn("cannot start Pods that are not allowed to be privileged", "err", c.unmapped)
	}
	var err error
	c.uids, err = loadUIDs(o.UIDs, o.StateDir)
	return c, err
}

// request is what a container asks for, with what its Pod asks for all, and the user and group that follow.
type request struct {
	corev1.SecurityContext
	pod       *corev1.Pod
	container *corev1.Container
	confined  bool // the Pod is not allowed to be privileged
	groups    []int64
	uid, gid  int64
	seccomp   corev1.SeccompProfileType // "" for the default
}

func requestOf(pod *corev1.Pod, c *corev1.Container) *request {
	r := &request{pod: pod, container: c, confined: Confined(pod)}
	if c.SecurityContext != nil {
		r.SecurityContext = *c.SecurityContext
	}
	if p := pod.Spec.SecurityContext; p != nil {
		r.RunAsUser, r.RunAsGroup = either(r.RunAsUser, p.RunAsUser), either(r.RunAsGroup, p.RunAsGroup)
		r.RunAsNonRoot, r.SeccompProfile = either(r.RunAsNonRoot, p.RunAsNonRoot), either(r.SeccompProfile, p.SeccompProfile)
		r.groups = slices.Clone(p.SupplementalGroups)
		if p.FSGroup != nil {
			r.groups = append(r.groups, *p.FSGroup)
		}
	}
	if r.SeccompProfile != nil {
		r.seccomp = r.SeccompProfile.Type
	}
	r.uid, r.gid = int64(os.Geteuid()), int64(os.Getegid())
	if r.confined {
		r.uid, r.gid = defaultUser, defaultGroup
		if r.RunAsUser != nil {
			r.gid = 0 // as with other runtimes
		}
	}
	if r.RunAsUser != nil {
		r.uid = *r.RunAsUser
	}
	if r.RunAsGroup != nil {
		r.gid = *r.RunAsGroup
	}
	return r
}

func either[T any](a, b *T) *T {
	if a != nil {
		return a
	}
	return b
}

func isTrue(b *bool) bool { return b != nil && *b }

// name is the Pod and container as kubelet's messages name them (pkg/kubelet/util/format).
func (r *request) name() string {
	return fmt.Sprintf("(pod: %q, container: %s)", fmt.Sprintf("%s_%s(%s)", r.pod.Name, r.pod.Namespace, r.pod.UID), r.container.Name)
}

// RefusedError is a reason not to start a container that only another Pod can remove.
type RefusedError struct{ message string }

func (e RefusedError) Error() string { return e.message }

// rules are what a container may not ask for. Users and groups are checkIDs'.
var rules = []struct {
	field     string
	forbidden func(*request) bool
	message   func(*request) string
}{
	{"runAsNonRoot", func(r *request) bool { return isTrue(r.RunAsNonRoot) && r.uid == 0 && r.RunAsUser != nil },
		func(r *request) string { return "container's runAsUser breaks non-root policy " + r.name() }},
	{"runAsNonRoot", func(r *request) bool { return isTrue(r.RunAsNonRoot) && r.uid == 0 },
		func(r *request) string { return "container has runAsNonRoot and image will run as root " + r.name() }},
	{"privileged", func(r *request) bool { return r.confined && isTrue(r.Privileged) },
		always("privileged: true is for Pods of the Pod Security level privileged")},
	{"seccompProfile", func(r *request) bool { return r.seccomp == corev1.SeccompProfileTypeLocalhost },
		always("seccompProfile of type Localhost is not supported: want RuntimeDefault or Unconfined")},
	{"procMount", func(r *request) bool {
		return r.confined && r.ProcMount != nil && *r.ProcMount == corev1.UnmaskedProcMount
	},
		always("procMount Unmasked is for Pods of the Pod Security level privileged")},
}

func always(message string) func(*request) string { return func(*request) string { return message } }

// check returns the first reason why a request is refused.
func (r *request) check() error {
	for _, rule := range rules {
		if rule.forbidden(r) {
			return RefusedError{rule.message(r)}
		}
	}
	if !r.confined {
		return nil
	}
	if err := checkIDs(r.pod, r.container); err != nil {
		return RefusedError{err.Error()}
	}
	return nil
}

// Of returns how a container is confined, nil if its processes differ from the agent's by user and group only. An
// error of type refusedError is permanent; others may pass.
func (c *Confinement) Of(pod *corev1.Pod, k *corev1.Container) (*shim.Confinement, error) {
	r := requestOf(pod, k)
	if err := r.check(); err != nil {
		return nil, err
	}
	w := &shim.Confinement{Spec: confine.Spec{
		UID: uint32(r.uid), GID: uint32(r.gid), NoNewPrivs: r.AllowPrivilegeEscalation != nil && !*r.AllowPrivilegeEscalation,
		Seccomp: r.seccomp == corev1.SeccompProfileTypeRuntimeDefault || r.seccomp == "" && r.confined,
	}}
	for _, g := range r.groups {
		w.Groups = append(w.Groups, uint32(g))
	}
	if isTrue(r.Privileged) {
		w.Seccomp = false
	}
	if err := capabilities(w, r); err != nil {
		return nil, RefusedError{err.Error()}
	}
	w.Mount = mount.Confinement{ReadOnly: isTrue(r.ReadOnlyRootFilesystem)}
	w.KeepGroups = c.oneUser
	if r.confined {
		return w, c.confine(w, pod)
	}
	plain := w.AllCapabilities && !w.NoNewPrivs && !w.Seccomp && !w.Mount.ReadOnly && len(w.Groups) == 0
	if plain {
		return nil, nil
	}
	return w, nil
}

// confine completes w for a Pod that is not allowed to be privileged.
func (c *Confinement) confine(w *shim.Confinement, pod *corev1.Pod) error {
	w.Mount.Confined, w.Mount.OwnNetwork = true, !pod.Spec.HostNetwork
	w.Mount.Hide = append([]string{c.o.StateDir}, c.o.Hide...)
	if c.oneUser {
		// Not at the start: where all Pods are the user's own, nothing is lost.
		c.warnOneUser.Do(func() {
			c.o.Log.Warn("Pods that are not allowed to be privileged run here, and are not kept apart by users", "namespace", pod.Namespace,
				"pod", pod.Name, "reason", c.Condition().Message)
		})
		w.GID, w.IDs = w.UID, &shim.IDs{First: w.UID, Base: uint32(os.Geteuid()), Size: 1}
		return nil
	}
	if c.unmapped != nil {
		return RefusedError{c.unmapped.Error()}
	}
	base, err := c.uids.base(pod.Namespace, c.o.Used)
	w.IDs = &shim.IDs{Base: base, Size: idsPerNamespace}
	return err
}

// Condition is the Node condition PodsConfined.
func (c *Confinement) Condition() corev1.NodeCondition {
	condition := corev1.NodeCondition{
		Type: svc.PodsConfined, Status: corev1.ConditionTrue, Reason: "UsersOfNamespaces",
		Message: "Pods that are not allowed to be privileged are of the users " + c.o.UIDs.String(),
	}
	switch {
	case c.oneUser:
		condition.Status, condition.Reason = corev1.ConditionFalse, "OneUser"
		condition.Message = "without root all Pods are of the agent's user: files of that user elsewhere than in hidden directories can " +
			"be read, " +
			"and supplementalGroups and fsGroup have no effect"
	case c.unmapped != nil:
		condition.Status, condition.Reason = corev1.ConditionFalse, "UsersNotMapped"
		condition.Message = "Pods that are not allowed to be privileged do not start: " + c.unmapped.Error()
	}
	return condition
}
