package volumes

import (
	"errors"
	"io/fs"
	"os"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/runner/shim"
)

// ReadOnlyData returns c with the volumes read-only into which the agent writes: all but
// empty directories and the machine's own.
func ReadOnlyData(pod *corev1.Pod, c *corev1.Container) *corev1.Container {
	c = c.DeepCopy()
	for i := range c.VolumeMounts {
		m := &c.VolumeMounts[i]
		m.ReadOnly = m.ReadOnly || slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
			return v.Name == m.Name && v.EmptyDir == nil && v.HostPath == nil
		})
	}
	return c
}

// Owner is to whom the files of a volume belong: -1 changes nothing. more are rights that
// its group has, and its own files' modes do not.
type Owner struct {
	uid, gid int
	more     fs.FileMode
}

// OwnerOf returns the owner of what the agent writes into the volumes of a container: its
// user, and the group of its Pod's files. w is nil for a container as the agent is.
func OwnerOf(pod *corev1.Pod, w *shim.Confinement) Owner {
	o := Owner{uid: -1, gid: -1}
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
func (o Owner) give(dir string) error {
	if o.uid < 0 && o.gid < 0 {
		return nil
	}
	mode := fs.FileMode(0o777)
	if o.more != 0 {
		mode |= fs.ModeSetgid
	}
	return errors.Join(os.Lchown(dir, o.uid, o.gid), os.Chmod(dir, mode))
}
