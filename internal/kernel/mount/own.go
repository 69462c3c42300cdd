package mount

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// MakePrivate keeps mounts made later in the mount namespace of the calling thread
// from all others, and theirs from it.
func MakePrivate() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	return nil
}

// Over lays source over target, both files or both directories, in the mount
// namespace of the calling thread.
func Over(source, target string) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("lay %s over %s: %w", source, target, err)
	}
	return nil
}
