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
func makeTarget(target string) error {
	err := os.MkdirAll(target, 0o755)
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
	return os.MkdirAll(target, 0o755)
}

// makeFile makes the file target if it does not exist. Below one of own, directories that
// are not the machine's, it is simply made; elsewhere the deepest directory above that
// exists is covered, and joins own.
func makeFile(target string, own []string) ([]string, error) {
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
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return own, err
	}
	file, err := os.OpenFile(target, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return own, err
	}
	return own, file.Close()
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
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("mode=%o", st.Mode().Perm())); err != nil {
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
