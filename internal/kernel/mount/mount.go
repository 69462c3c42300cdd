// Package mount gives processes a private view of the file system: a mount
// private namespace in which single files and directories are laid over
// the machine's.
package mount

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netns"
)

// Bind lays Source, a file or directory of the machine, over Target inside a
// private mount namespace. Target must exist, unless Make, MakeFile or Place is set.
type Bind struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	// Within is a directory above Source that nothing below it leads out of, whatever
	// links others put there in between; "" for none. It needs Linux 5.6 (openat2(2)).
	Within string `json:"within,omitempty"`
	// Optional makes a Target that does not exist no error: it is left out.
	Optional bool `json:"optional,omitempty"`
	// Make makes a Target directory that does not exist: on the machine where
	// that is allowed, else only inside the namespace.
	Make bool `json:"make,omitempty"`
	// MakeFile makes a Target file that does not exist, with the directories above it:
	// only inside the namespace, or in the Source of an earlier Bind that covers the place.
	MakeFile bool `json:"makeFile,omitempty"`
	// Place makes a Target that does not exist as MakeFile does: a directory for a Source
	// that is one, else a file.
	Place bool `json:"place,omitempty"`
}

// Private calls f on its own thread in a new mount namespace with binds
// applied, and returns what f returns. Processes that f starts itself live in
// that namespace; goroutines that it starts do not. ns is an open handle of the
// namespace, valid until f returns.
func Private(binds []Bind, f func(ns *os.File) error) error { return Confine(nil, binds, f) }

// Confine is Private with a confinement, none if w is nil.
func Confine(w *Confinement, binds []Bind, f func(ns *os.File) error) error {
	return netns.OnThread(func() error { return private(w, binds, f) })
}

func private(w *Confinement, binds []Bind, f func(ns *os.File) error) error {
	// CLONE_FS first: threads share their root and working directory, and a
	// thread that shares them may not change its mount namespace.
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	confined := w != nil && w.Confined
	// Slave: mounts of the machine made later arrive here, ours never leave. They
	// arrive as the machine has them, writable, so not where a process is confined.
	propagation := uintptr(unix.MS_SLAVE)
	if confined {
		propagation = unix.MS_PRIVATE
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|propagation, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	sources, done, err := openSources(binds)
	if err != nil {
		return err
	}
	defer done()
	var own []string
	detached := w != nil && w.ReadOnly && !confined
	if detached {
		if err := detach(sources); err != nil {
			return err
		}
	}
	if w != nil {
		if own, err = w.apply(); err != nil {
			return err
		}
	}
	p, err := newPlaces(confined, own)
	if err != nil {
		return err
	}
	defer p.close()
	for _, b := range sources {
		if err := p.lay(b, detached); err != nil {
			return err
		}
	}
	if err := p.settle(); err != nil {
		return err
	}
	ns, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return fmt.Errorf("open the new mount namespace: %w", err)
	}
	defer ns.Close()
	return f(ns)
}

// lay makes the target of b where that is asked for, and lays b over it.
func (p *places) lay(b source, detached bool) error {
	if err := p.prepare(b); err != nil {
		if b.Optional && errors.Is(err, unix.ENOSYS) {
			return nil
		}
		return fmt.Errorf("make a place for %s: %w", b.Target, err)
	}
	if _, err := os.Stat(b.Target); err != nil {
		if b.Optional && os.IsNotExist(err) {
			return nil
		}
		return fmt.Errorf("mount at %s: %w", b.Target, err)
	}
	if p.confined {
		return p.layConfined(b)
	}
	tree, err := b.file, error(nil)
	if !detached {
		if tree, err = b.tree(); err == nil {
			defer tree.Close()
		}
	}
	switch {
	case err == nil:
		if err := p.add(tree, true); err != nil {
			return err
		}
		const flags = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_SYMLINKS
		err = unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, b.Target, flags)
	case errors.Is(err, unix.ENOSYS): // before Linux 5.2
		err = unix.Mount(fdPath(b.file), b.Target, "", unix.MS_BIND|unix.MS_REC, "")
	}
	if err != nil {
		return fmt.Errorf("bind %s to %s: %w", b.Source, b.Target, err)
	}
	if !b.ReadOnly {
		return nil
	}
	return makeReadOnly(b.Target)
}

func makeReadOnly(target string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(target, &st); err != nil {
		return fmt.Errorf("read the mount at %s: %w", target, err)
	}
	// In a user namespace a remount must keep the flags that came from outside.
	keep := uintptr(st.Flags) & (unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOATIME | unix.MS_NODIRATIME)
	if st.Flags&unix.ST_RELATIME != 0 {
		keep |= unix.MS_RELATIME
	}
	if err := unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|keep, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", target, err)
	}
	return nil
}

// Enter calls f on its own thread in the mount namespace behind ns, as
// Behind does in a new one.
func Enter(ns *os.File, f func() error) error {
	return netns.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("unshare the working directory: %w", err)
		}
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("enter the mount namespace: %w", err)
		}
		return f()
	})
}

// Inode is the identity of the namespace behind ns while it lives.
func Inode(ns *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &st); err != nil {
		return 0, fmt.Errorf("read the mount namespace: %w", err)
	}
	return st.Ino, nil
}
