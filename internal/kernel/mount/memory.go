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
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) { // unknown to the kernel, or for root alone
		err = unix.Mount("tmpfs", dir, "tmpfs", flags, options)
	}
	if err != nil {
		return fmt.Errorf("mount a file system in memory at %s: %w", dir, err)
	}
	return nil
}

// Unmount removes what is mounted at dir, if anything is, also while it is in use.
func Unmount(dir string) error {
	err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // EINVAL: nothing is
		return &os.PathError{Op: "unmount", Path: dir, Err: err}
	}
	return nil
}
