package runner

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// ErrRunning is the error where an agent uses the state directory.
var ErrRunning = errors.New("in use by another fairlead agent")

// lockFile is the file of a state directory that its agent has locked, knownDir is KnownDir.
const (
	lockFile = "lock"
	knownDir = "known"
)

// lockDir locks the state directory against a second agent.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	if err := fileio.Lock(f); err != nil {
		_ = f.Close()
		if errors.Is(err, fileio.ErrLocked) {
			err = ErrRunning
		}
		return nil, fmt.Errorf("%s is %w: stop that one or choose another directory", dir, err)
	}
	return f, nil
}

// podsDir has a directory for each Pod.
func podsDir(stateDir string) string { return filepath.Join(stateDir, "pods") }
