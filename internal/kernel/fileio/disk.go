package fileio

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Disk is the file system that holds a path.
type Disk struct {
	Device, MountPoint string
	// Free is what an ordinary user may still write, in bytes.
	Free uint64
}

// DiskOf returns the file system of path, without its names if /proc does not tell
// them.
func DiskOf(path string) (Disk, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return Disk{}, err
	}
	free, err := Free(path)
	if err != nil {
		return Disk{}, err
	}
	d := Disk{Free: free}
	mounts, err := os.ReadFile("/proc/thread-self/mounts") // proc(5); a thread may have its own mount namespace
	if err != nil {
		return d, nil
	}
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		inside := path == f[1] || strings.HasPrefix(path, strings.TrimSuffix(f[1], "/")+"/")
		if inside && len(f[1]) >= len(d.MountPoint) {
			d.Device, d.MountPoint = f[0], f[1]
		}
	}
	return d, nil
}

// Free returns what an ordinary user may still write to the file system of path, in
// bytes. It costs one system call.
func Free(path string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return st.Bavail * uint64(st.Bsize), nil
}

// Space is the room of a file system, in bytes and inodes; Free is what an ordinary user
// may still use. A file system that makes inodes as it needs them has none.
type Space struct {
	Total, Free, Inodes, FreeInodes uint64
}

// SpaceOf returns the room of the file system of path. It costs one system call.
func SpaceOf(path string) (Space, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return Space{}, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	size := uint64(st.Bsize)
	return Space{Total: st.Blocks * size, Free: st.Bavail * size, Inodes: st.Files, FreeInodes: st.Ffree}, nil
}

// The thresholds of a kubelet's --eviction-hard, but that minFree is enough of a large disk, of
// which a kubelet wants a tenth: no images are stored.
const (
	minFree          = 1 << 30
	minFreePercent   = 10
	minInodesPercent = 5
)

// Low returns what a node under disk pressure has too little of, "" if there is enough.
func (s Space) Low() string {
	switch {
	case s.Free < min(minFree, s.Total/100*minFreePercent):
		return fmt.Sprintf("%d MiB free, less than 1 GiB and than %d %%", s.Free>>20, minFreePercent)
	case s.FreeInodes < s.Inodes/100*minInodesPercent:
		return fmt.Sprintf("less than %d %% of its inodes free", minInodesPercent)
	}
	return ""
}

// Reserve gives the first size bytes of the file at path their place on the disk, so
// that writing them cannot fail for want of space, as far as the file system allocates
// in place (ext4, xfs, tmpfs; not btrfs). The length of the file stays, and a file that
// is not there is made, with mode 0600. A file system that cannot reserve is no error.
func Reserve(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, size)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err == nil, errors.Is(err, unix.EOPNOTSUPP):
			return nil
		}
		return &fs.PathError{Op: "fallocate", Path: path, Err: err}
	}
}

// Allocated returns the space that the file at path has on the disk, in bytes.
func Allocated(path string) (int64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Blocks * 512, nil // stat(2)
}
