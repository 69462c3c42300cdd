package shim

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/mount"
)

// showPrograms returns the binds of the container with those of its programs, whose copies it makes. A copy stays for later
// attempts, so a running Pod keeps its program when the original changes.
func (c Container) showPrograms() ([]mount.Bind, error) {
	var binds []mount.Bind
	for _, p := range c.Programs {
		if err := os.MkdirAll(filepath.Dir(p.Copy), 0o700); err != nil {
			return nil, err
		}
		if _, err := os.Stat(p.Copy); errors.Is(err, fs.ErrNotExist) {
			err = fileio.CopyExecutable(p.Path, p.Copy, p.SHA256, fileio.MaxExecutable)
			if errors.Is(err, fileio.ErrOtherContent) {
				return nil, fmt.Errorf("command %s: on this node there is no executable file of at most %d MiB with the SHA-256 that the "+
					"Pod names; after a change of the program use 'fairlead run' again", p.Path, fileio.MaxExecutable>>20)
			}
			if err != nil {
				return nil, fmt.Errorf("copy %s for the Pod: %w", p.Path, err)
			}
		}
		binds = append(binds, mount.Bind{Source: p.Copy, Target: p.Path, ReadOnly: true, MakeFile: true})
	}
	return append(binds, c.Binds...), nil
}

// hidden explains why a confined container does not find a program.
func (c Container) hidden(path string, err error) error {
	if c.Confinement == nil || !errors.Is(err, fs.ErrNotExist) || !c.Confinement.Mount.Hides(path) {
		return err
	}
	return fmt.Errorf("command %s is hidden from Pods that are not privileged: start it with 'fairlead run', which shows them the "+
		"program, or install it in a directory that they see, such as /usr/local/bin or /opt", path)
}
