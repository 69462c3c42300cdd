package mount

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// detach puts a copy of its mount into the place of each source, with what may be done
// there now: where the file system is made read-only afterwards, binds are not. It needs
// Linux 5.2.
func detach(sources []source) error {
	for i := range sources {
		s := &sources[i]
		tree, err := s.tree()
		if err != nil {
			return fmt.Errorf("bind %s to %s: %w", s.Source, s.Target, err)
		}
		_ = s.file.Close()
		s.file = tree
	}
	return nil
}

// tree copies the mounts of b and below it; the copy is mounted nowhere yet.
func (b source) tree() (*os.File, error) {
	fd, err := unix.OpenTree(int(b.file.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), b.Source), nil
}
