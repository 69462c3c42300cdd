// Package fileio replaces, locks and duplicates files.
package fileio

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Replace makes data the content of path, with exactly this mode. A crash of the
// process or of the machine leaves the old file or the new one, never a part; when
// it has returned nil it is the new one.
func Replace(path string, data []byte, mode fs.FileMode) error {
	if err := replace(path, data, mode, (*os.File).Sync); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// ReplaceUnsynced is Replace for files that are written again after a crash of the
// machine, which may leave a part of it: nothing waits for the disk.
func ReplaceUnsynced(path string, data []byte, mode fs.FileMode) error {
	return replace(path, data, mode, func(*os.File) error { return nil })
}

func replace(path string, data []byte, mode fs.FileMode, sync func(*os.File) error) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+"-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(mode), sync(f), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// SyncDir writes the entries of a directory to disk: without it a rename may not
// survive a crash of the machine (fsync(2)).
func SyncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// ErrLocked is the error of Lock if another open file has the lock.
var ErrLocked = errors.New("locked by another process")

// Lock locks f for this process until f is closed, or the process has ended
// (flock(2)).
func Lock(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return ErrLocked
	}
	return err
}

// Unlock ends the lock of f and closes it. Close would leave the lock to a program that another goroutine starts right now, which has
// a copy of f from its fork to its exec.
func Unlock(f *os.File) error {
	return errors.Join(unix.Flock(int(f.Fd()), unix.LOCK_UN), f.Close())
}

// Dup returns another open file for what f is open for.
func Dup(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate %s: %w", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// CloseOnExec keeps f from programs that this process becomes.
func CloseOnExec(f *os.File) { unix.CloseOnExec(int(f.Fd())) }

// Owner returns the user and group that a file belongs to, and false if info does not
// know.
func Owner(info fs.FileInfo) (uid, gid int, ok bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return -1, -1, false
	}
	return int(st.Uid), int(st.Gid), true
}

// KeepInherited keeps what this process has open, but for its standard files, from the
// programs it starts: who started it may have left it files without close-on-exec.
func KeepInherited() {
	const first = 3
	if unix.CloseRange(first, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC) == nil {
		return
	}
	entries, _ := os.ReadDir("/proc/self/fd") // before Linux 5.11
	for _, e := range entries {
		if fd, err := strconv.Atoi(e.Name()); err == nil && fd >= first {
			unix.CloseOnExec(fd)
		}
	}
}
