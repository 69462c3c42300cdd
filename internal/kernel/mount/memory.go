package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Memory mounts a file system in memory at dir, of size bytes at most (half of the
// machine's memory for 0), unless there is one. Its pages are not swapped where the kernel
// can do that (Linux 6.4), and belong to the control group of who writes them.
func Memory(dir string, size int64) error {
	var here, above unix.Stat_t
	if err := errors.Join(unix.Stat(dir, &here), unix.Stat(filepath.Dir(dir), &above)); err != nil {
		return &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	if here.Dev != above.Dev {
		return nil
	}
	options := "mode=777"
	if size > 0 {
		options += ",size=" + strconv.FormatInt(size, 10)
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV
	err := unix.Mount("tmpfs", dir, "tmpfs", flags, options+",noswap")
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) { // unknown to the kernel, or only for root
		err = unix.Mount("tmpfs", dir, "tmpfs", flags, options)
	}
	if err != nil {
		return fmt.Errorf("mount a file system in memory at %s: %w", dir, err)
	}
	return nil
}

// Unmount removes what is mounted at dir, if anything is, also while it is in use. Where
// nothing is, it needs no rights.
func Unmount(dir string) error {
	err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT): // nothing is
		return nil
	case errors.Is(err, unix.EPERM) && !isRoot(dir):
		return nil
	case err != nil:
		return &os.PathError{Op: "unmount", Path: dir, Err: err}
	}
	return nil
}

// isRoot reports whether dir is where something is mounted, as far as the kernel tells
// (Linux 5.8).
func isRoot(dir string) bool {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &st)
	return err != nil || st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT == 0 || st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}
