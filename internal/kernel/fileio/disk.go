package fileio

import (
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
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return Disk{}, err
	}
	d := Disk{Free: st.Bavail * uint64(st.Bsize)}
	mounts, err := os.ReadFile("/proc/self/mounts") // proc(5)
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
