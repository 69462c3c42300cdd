package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Confinement is what a process sees of the machine's file system beside its binds.
type Confinement struct {
	// Confined makes the machine's files read-only and its setuid bits count for
	// nothing; /tmp, /var/tmp, /run and /dev are the process's own, /proc is that of the
	// caller's PID namespace, and what hidden and Hide name is empty. It needs Linux
	// 5.12.
	Confined bool     `json:"confined,omitempty"`
	Hide     []string `json:"hide,omitempty"`
	// OwnNetwork shows in /sys the network namespace of the caller, not the machine's.
	OwnNetwork bool `json:"ownNetwork,omitempty"`
	// ReadOnly makes all of the file system read-only but /dev, /proc, /sys and the
	// binds.
	ReadOnly bool `json:"readOnly,omitempty"`
}

// scratch bounds each file system in memory that a confined process can write.
const scratch = "64m"

// hidden are directories of the machine's users and services in which a confined
// process has no business; many sockets of services are in /run, which is hidden too.
var hidden = []string{
	"/root", "/home", "/boot", "/media", "/mnt", "/lost+found", "/var/log", "/var/mail", "/var/spool", "/var/backups", "/etc/fairlead",
}

// scratchDirs are the directories in which a confined process has its own files, with their modes.
var scratchDirs = map[string]string{"/tmp": "1777", "/var/tmp": "1777", "/run": "755"}

// Hidden reports whether path lies below a directory of which a confined process does not see the machine's files, also by
// way of a link.
func Hidden(path string) bool {
	return below(path, hidden) || below(path, slices.Collect(maps.Keys(scratchDirs)))
}

// Hides reports whether a process confined by w does not see the machine's file at path. It is false for a w that
// confines nothing.
func (w *Confinement) Hides(path string) bool {
	return w != nil && w.Confined && (Hidden(path) || w.Own(path))
}

// Own reports whether path lies in a directory of w.Hide, which nothing is shown of.
func (w *Confinement) Own(path string) bool { return below(path, w.Hide) }

// below reports whether path lies below one of dirs.
func below(path string, dirs []string) bool {
	resolve := func(p string) string {
		if real, err := filepath.EvalSymlinks(p); err == nil {
			return real
		}
		return filepath.Clean(p)
	}
	return slices.ContainsFunc(dirs, func(dir string) bool {
		return strings.HasPrefix(filepath.Clean(path), filepath.Clean(dir)+"/") || strings.HasPrefix(resolve(path), resolve(dir)+"/")
	})
}

// devices are the devices of /dev that a confined process has.
var devices = []string{"null", "zero", "full", "random", "urandom", "tty"}

// apply changes the mount namespace of the calling thread, which is its own, and
// returns the directories that are file systems in memory now.
func (w *Confinement) apply() (own []string, err error) {
	if !w.Confined {
		if w.ReadOnly {
			return nil, readOnly()
		}
		return nil, nil
	}
	from := map[string]*os.File{}
	for _, d := range devices {
		f, err := os.OpenFile("/dev/"+d, unix.O_PATH, 0)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		from[d] = f
	}
	if err := setattr("/", unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID}); err != nil {
		return nil, fmt.Errorf("make the machine's files read-only: %w; Linux 5.12 is needed", err)
	}
	if err := w.system(); err != nil {
		return nil, err
	}
	if err := makeDev(from); err != nil {
		return nil, fmt.Errorf("make a /dev: %w", err)
	}
	for dir, mode := range scratchDirs {
		write := uintptr(0)
		if w.ReadOnly && dir != "/run" { // which is root's; places for binds are made there
			write = unix.MS_RDONLY
		}
		if err := tmpfs(dir, "size="+scratch+",nr_inodes=16k,mode="+mode, write); err != nil {
			return nil, err
		}
	}
	for _, dir := range append(slices.Clone(hidden), w.Hide...) {
		if err := tmpfs(dir, "size=4k,mode=755", unix.MS_RDONLY); err != nil {
			return nil, err
		}
	}
	return []string{"/dev", "/tmp", "/var/tmp", "/run"}, nil
}

// setattr changes the attributes of the mounts at path and below it.
func setattr(path string, a unix.MountAttr) error {
	return unix.MountSetattr(unix.AT_FDCWD, path, unix.AT_RECURSIVE, &a)
}

// tmpfs lays an empty file system over dir, if that is there.
func tmpfs(dir, options string, flags uintptr) error {
	real, err := filepath.EvalSymlinks(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st, err := os.Stat(real); err != nil || !st.IsDir() {
		return err
	}
	if err := unix.Mount("tmpfs", real, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|flags, options); err != nil {
		return fmt.Errorf("cover %s: %w", dir, err)
	}
	return nil
}

// system lays fresh file systems over /proc and /sys, without the files that describe the machine
// or changes it: the masked and read-only paths of the OCI runtimes.
func (w *Confinement) system() error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("proc", "/proc", "proc", flags, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if w.OwnNetwork {
		if err := unix.Mount("sysfs", "/sys", "sysfs", flags|unix.MS_RDONLY, ""); err != nil {
			return fmt.Errorf("mount /sys: %w", err)
		}
	}
	for _, p := range []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"} {
		if err := unix.Mount(p, p, "", unix.MS_BIND|unix.MS_REC, ""); errors.Is(err, unix.ENOENT) {
			continue
		} else if err != nil {
			return fmt.Errorf("cover %s: %w", p, err)
		}
		if err := setattr(p, unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return fmt.Errorf("make %s read-only: %w", p, err)
		}
	}
	for _, p := range []string{"/proc/acpi", "/proc/asound", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap"} {
		if err := tmpfs(p, "size=4k,mode=755", unix.MS_RDONLY); err != nil {
			return err
		}
	}
	for _, p := range []string{
		"/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug",
	} {
		if err := unix.Mount("/dev/null", p, "", unix.MS_BIND, ""); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("cover %s: %w", p, err)
		}
	}
	return nil
}

// makeDev lays a /dev over the machine's with nothing but from, its own terminals,
// and memory to share.
func makeDev(from map[string]*os.File) error {
	if err := unix.Mount("tmpfs", "/dev", "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=755,size=64k"); err != nil {
		return err
	}
	for name, f := range from {
		if err := os.WriteFile("/dev/"+name, nil, 0o666); err != nil {
			return err
		}
		if err := unix.Mount(fdPath(f), "/dev/"+name, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if err := errors.Join(os.Mkdir("/dev/pts", 0o755), os.Mkdir("/dev/shm", 0o755)); err != nil {
		return err
	}
	if err := unix.Mount("devpts", "/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"); err != nil {
		return fmt.Errorf("pts: %w", err)
	}
	shm := "mode=1777,size=" + scratch
	if err := unix.Mount("tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, shm); err != nil {
		return fmt.Errorf("shm: %w", err)
	}
	var errs []error
	for name, to := range map[string]string{
		"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		errs = append(errs, os.Symlink(to, "/dev/"+name))
	}
	return errors.Join(errs...)
}

// readOnly makes all mounts read-only except the kernel's own file systems.
func readOnly() error {
	b, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		at := strings.ReplaceAll(f[4], `\040`, " ")
		first, _, _ := strings.Cut(strings.TrimPrefix(at, "/"), "/")
		if slices.Contains([]string{"dev", "proc", "sys"}, first) {
			continue
		}
		a := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
		err := unix.MountSetattr(unix.AT_FDCWD, at, 0, &a)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EINVAL) { // covered by another mount
			return fmt.Errorf("make %s read-only: %w", at, err)
		}
	}
	return nil
}

func fdPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// layConfined lays b over its target for a confined process, with the attributes that a
// bind has there: the machine's files below it are read-only by now. The target may lie in
// a volume of the Pod, which can put a link there at any time; so it is opened once, and
// what was opened is judged and covered.
func (p *places) layConfined(b source) error {
	target, err := os.OpenFile(b.Target, unix.O_PATH, 0)
	if err != nil {
		return fmt.Errorf("mount at %s: %w", b.Target, err)
	}
	defer target.Close()
	real, err := os.Readlink(fdPath(target))
	if err != nil {
		return fmt.Errorf("mount at %s: %w", b.Target, err)
	}
	if forbidden(real) {
		return fmt.Errorf("mount at %s: %s is not for volumes of a Pod that may not be privileged", b.Target, real)
	}
	tree, err := b.tree()
	if err != nil {
		return fmt.Errorf("bind %s to %s: %w", b.Source, b.Target, err)
	}
	defer tree.Close()
	a := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
	if b.ReadOnly {
		a.Attr_set |= unix.MOUNT_ATTR_RDONLY
	} else {
		a.Attr_clr = unix.MOUNT_ATTR_RDONLY
	}
	fd := int(tree.Fd())
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &a); err != nil {
		return fmt.Errorf("set what may be done at %s: %w", b.Target, err)
	}
	if err := p.add(tree, true); err != nil {
		return err
	}
	if err := unix.MoveMount(fd, "", int(target.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("bind %s to %s: %w", b.Source, b.Target, err)
	}
	return nil
}

// forbidden reports whether a confined process must see what raise made at path: the
// shim opens files there, too.
func forbidden(path string) bool {
	first, rest, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	switch first {
	case "", "proc", "sys":
		return true
	case "dev":
		return rest == "" || rest == "pts" || strings.HasPrefix(rest, "pts/")
	}
	return false
}

// OwnProc gives the calling process, the first of its PID namespace and the only one in its
// mount namespace, a /proc that fits.
func OwnProc() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount the /proc of a new PID namespace: %w", err)
	}
	return nil
}
