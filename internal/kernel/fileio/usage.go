package fileio

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Bounds of what Usage looks at.
const (
	maxDepth   = 500     // it holds a file open for each level
	maxEntries = 1 << 22 // some seconds, if the kernel has them cached; an empty file takes no blocks
)

// ErrTooDeep is the error of Usage where directories are nested deeper than it looks.
var ErrTooDeep = errors.New("directories are nested too deep to be measured")

// ErrTooMany is the error of Usage where files and directories are more than it looks at.
var ErrTooMany = errors.New("files are too many to be measured")

// Usage returns how many bytes of the disk the files below dir take, files of other file
// systems not counted. Of a file with several names each counts its share. It stops counting
// when they are more than enough, and returns the cause of ctx's end when that comes first. It
// follows no links, so whoever may write below dir cannot lead it elsewhere.
func Usage(ctx context.Context, dir string, enough int64) (int64, error) {
	return measure(ctx, dir, enough, maxEntries)
}

func measure(ctx context.Context, dir string, enough int64, entries int) (int64, error) {
	fd, err := unix.Open(dir, dirFlags, 0)
	if err != nil {
		return 0, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return 0, &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	u := usage{ctx: ctx, dev: st.Dev, enough: enough, entries: entries}
	if err := u.count(fd, dir, maxDepth); err != nil {
		return u.sum, fmt.Errorf("measure %s: %w", dir, err)
	}
	return u.sum, nil
}

const dirFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC

type usage struct {
	ctx         context.Context
	dev         uint64
	sum, enough int64
	entries     int // how many more it looks at
}

// count adds what is in the directory behind fd, which it closes.
func (u *usage) count(fd int, name string, depth int) error {
	d := os.NewFile(uintptr(fd), name)
	defer d.Close()
	if depth == 0 {
		return ErrTooDeep
	}
	for u.sum <= u.enough {
		if u.ctx.Err() != nil {
			return context.Cause(u.ctx)
		}
		names, err := d.Readdirnames(256)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, n := range names {
			if err := u.add(fd, n, depth); err != nil || u.sum > u.enough {
				return err
			}
		}
	}
	return nil
}

func (u *usage) add(dir int, name string, depth int) error {
	if u.entries--; u.entries < 0 {
		return ErrTooMany
	}
	var st unix.Stat_t
	err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) || err == nil && st.Dev != u.dev {
		return nil // just removed, or mounted there
	}
	if err != nil {
		return err
	}
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	size := st.Blocks * 512 // stat(2)
	if !isDir {
		u.sum += size / max(1, int64(st.Nlink))
		return nil
	}
	u.sum += size
	fd, err := unix.Openat(dir, name, dirFlags, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) { // changed during the walk
		return nil
	}
	if err != nil {
		return err
	}
	return u.count(fd, name, depth-1)
}
