package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// makeTarget makes the directory target. Where this process may not, as root
// of a user namespace on a machine that belongs to another user, the deepest
// directory above it that exists is covered by one that shows the same and in
// which it may.
func makeTarget(target string, confined bool) error {
	err := makePath(target, false, confined)
	if err == nil || !errors.Is(err, fs.ErrPermission) && !errors.Is(err, unix.EROFS) {
		return err
	}
	above := filepath.Dir(target)
	for {
		if _, err := os.Stat(above); err == nil {
			break
		}
		above = filepath.Dir(above)
	}
	// /var/run is a link to /run nearly everywhere.
	real, err := filepath.EvalSymlinks(above)
	if err != nil {
		return err
	}
	if err := cover(real); err != nil {
		return fmt.Errorf("make a place for %s in %s: %w", target, real, err)
	}
	return makePath(target, false, confined)
}

// makePath makes target, a directory or a file, and the directories above it. For a confined
// process no link of /proc is followed on the way (a volume of the Pod may have links, and
// /proc/1/root leads past the confinement), which needs Linux 5.6.
func makePath(target string, file, confined bool) error {
	if !confined {
		dir := target
		if file {
			dir = filepath.Dir(target)
		}
		if err := os.MkdirAll(dir, 0o755); err != nil || !file {
			return err
		}
		f, err := os.OpenFile(target, os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		return f.Close()
	}
	var missing []string
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_MAGICLINKS}
	at := filepath.Clean(target)
	dir, err := unix.Openat2(unix.AT_FDCWD, at, &how)
	for ; errors.Is(err, unix.ENOENT) && at != "/"; dir, err = unix.Openat2(unix.AT_FDCWD, at, &how) {
		missing = append(missing, filepath.Base(at))
		at = filepath.Dir(at)
	}
	for i := len(missing) - 1; err == nil && i >= 0; i-- {
		var next int
		if i == 0 && file {
			next, err = unix.Openat(dir, missing[i], unix.O_CREAT|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
		} else if err = unix.Mkdirat(dir, missing[i], 0o755); err == nil || errors.Is(err, unix.EEXIST) {
			next, err = unix.Openat(dir, missing[i], unix.O_PATH|unix.O_NOFOLLOW|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		}
		_ = unix.Close(dir)
		dir = next
	}
	if err != nil {
		return &fs.PathError{Op: "make", Path: target, Err: err}
	}
	return unix.Close(dir)
}

// makeFile makes the file target if it does not exist. Below one of own, directories that
// are not the machine's, it is simply made; elsewhere the deepest directory above that
// exists is covered, and joins own.
func makeFile(target string, own []string, confined bool) ([]string, error) {
	target = filepath.Clean(target)
	if _, err := os.Stat(target); !errors.Is(err, fs.ErrNotExist) {
		return own, err
	}
	if !slices.ContainsFunc(own, func(dir string) bool { return strings.HasPrefix(target, filepath.Clean(dir)+"/") }) {
		above := filepath.Dir(target)
		for {
			if _, err := os.Stat(above); err == nil {
				break
			}
			above = filepath.Dir(above)
		}
		real, err := filepath.EvalSymlinks(above)
		if err != nil {
			return own, err
		}
		if real == "/" {
			return own, errors.New("it must lie in a directory of the machine's root that exists")
		}
		if err := cover(real); err != nil {
			return own, err
		}
		own = append(own, above)
	}
	return own, makePath(target, true, confined)
}

// cover lays an empty file system over dir and binds into it what dir had.
// What others make in dir later does not appear.
func cover(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	// The way to what will be covered.
	under, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer under.Close()
	st, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("size=1m,mode=%o", st.Mode().Perm())); err != nil {
		return err
	}
	for _, e := range entries {
		from, to := fmt.Sprintf("/proc/self/fd/%d/%s", under.Fd(), e.Name()), filepath.Join(dir, e.Name())
		switch {
		case e.Type()&fs.ModeSymlink != 0:
			var link string
			if link, err = os.Readlink(from); err == nil {
				err = os.Symlink(link, to)
			}
		case e.IsDir():
			if err = os.Mkdir(to, 0o755); err == nil {
				err = unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, "")
			}
		default:
			if err = os.WriteFile(to, nil, 0o644); err == nil {
				err = unix.Mount(from, to, "", unix.MS_BIND, "")
			}
		}
		// What cannot be shown is left out: it could not be used either.
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("%s: %w", e.Name(), err)
		}
	}
	return nil
}
