package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// layoutVersion is the version of the data directory's layout. It grows when
// an older fairlead could not read what this one writes.
const layoutVersion = 1

// Dir is a data directory, locked against other processes.
type Dir struct {
	Path string
	lock *os.File
}

// OpenDir makes the directory (mode 0700) if it is missing, locks it and checks
// that its layout is known.
func OpenDir(path string) (*Dir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("cannot make the data directory %s: %w; choose another with --data-dir, or make it yourself", path, plain(err))
	}
	lock, err := os.OpenFile(filepath.Join(path, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("cannot use the data directory %s: %w; choose another with --data-dir, or give yourself the rights",
			path, plain(err))
	}
	d := &Dir{Path: path, lock: lock}
	if err := d.take(); err != nil {
		lock.Close()
		return nil, err
	}
	if err := fileio.CheckLayout(d.Path, layoutVersion); err != nil {
		_ = d.Close()
		return nil, err
	}
	return d, nil
}

// take locks the directory. The kernel releases the lock when the process ends.
func (d *Dir) take() error {
	err := fileio.Lock(d.lock)
	if errors.Is(err, fileio.ErrLocked) {
		by := "another process"
		if pid, err := os.ReadFile(d.lock.Name()); err == nil && len(strings.TrimSpace(string(pid))) > 0 {
			by = "process " + strings.TrimSpace(string(pid))
		}
		return &inUseError{d.Path, by}
	}
	if err != nil {
		return fmt.Errorf("cannot lock the data directory %s: %w", d.Path, err)
	}
	if err := d.lock.Truncate(0); err != nil {
		return err
	}
	_, err = d.lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return err
}

// inUseError is that of a data directory that another process has locked.
type inUseError struct{ path, by string }

func (e *inUseError) Error() string {
	return fmt.Sprintf("the data directory %s is in use by %s: stop that one, or choose another directory with --data-dir", e.path, e.by)
}

// File returns the path of a file in the directory.
func (d *Dir) File(name string) string { return filepath.Join(d.Path, name) }

// Close releases the directory.
func (d *Dir) Close() error { return fileio.Unlock(d.lock) }

// plain strips the operation and path of a file error, for messages that name them.
func plain(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}
