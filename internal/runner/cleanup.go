package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/runner/confinement"
	"github.com/fairlead/fairlead/internal/runner/pod"
	"github.com/fairlead/fairlead/internal/runner/values"
)

// maxParallel bounds how many pods Cleanup ends at a time.
const maxParallel = 16

// Cleanup ends every pod whose state lies below stateDir, removes that state,
// and what remove does: with RemoveNetwork, every network device, route and rule of
// this package. While an agent runs it changes nothing, and its error is ErrRunning.
// It may be called again, and without any state; a directory that is no agent's is an error.
func Cleanup(ctx context.Context, stateDir string, remove ...func() error) error {
	removeAll := func() error {
		var errs []error
		for _, f := range remove {
			errs = append(errs, f())
		}
		return errors.Join(errs...)
	}
	if _, err := os.Stat(stateDir); errors.Is(err, os.ErrNotExist) {
		return removeAll()
	}
	if !IsState(stateDir) {
		return errors.Join(removeAll(), fmt.Errorf("%s was not made by an agent, and stays: it has no file %s", stateDir, fileio.LayoutFile))
	}
	lock, err := lockDir(stateDir)
	if err != nil {
		return err
	}
	defer func() { _ = fileio.Unlock(lock) }()
	dirs, err := pod.Dirs(podsDir(stateDir))
	if err != nil {
		return err
	}
	groups := confinement.OpenGroups(stateDir, 0)
	var g errgroup.Group
	g.SetLimit(maxParallel)
	for _, d := range dirs {
		g.Go(func() error {
			if err := pod.EndShim(ctx, d.Dir); err != nil {
				return fmt.Errorf("end pod %s: %w", filepath.Base(d.Dir), err)
			}
			if err := process.KillMountedFrom(ctx, d.Dir); err != nil {
				return fmt.Errorf("end pod %s: %w", filepath.Base(d.Dir), err)
			}
			return d.Remove()
		})
	}
	if err := errors.Join(g.Wait(), groups.Sweep(ctx, func(types.UID) bool { return false }), removeAll()); err != nil {
		return err // the state stays, for the next call
	}
	groups.Close()
	// Pods that see this machine's files had tokens mounted there; another agent may have such Pods.
	if !process.MountedAt(values.TokenMountPath) {
		for dir := values.TokenMountPath; filepath.Base(dir) != "run"; dir = filepath.Dir(dir) {
			_ = os.Remove(dir)
		}
	}
	return os.RemoveAll(stateDir)
}

// IsState reports whether a directory is the state of an agent, or empty.
func IsState(stateDir string) bool {
	entries, err := os.ReadDir(stateDir)
	return err == nil && (len(entries) == 0 || slices.ContainsFunc(entries, func(e os.DirEntry) bool {
		return slices.Contains([]string{fileio.LayoutFile, lockFile, knownDir}, e.Name()) // earlier agents have no version
	}))
}

// KnownDir is where in its state an agent keeps the last known state of the API.
func KnownDir(stateDir string) string { return filepath.Join(stateDir, knownDir) }

// RemoveNetwork removes what agents have made of the pods' network in this network
// namespace.
func RemoveNetwork() error { return link.Cleanup() }
