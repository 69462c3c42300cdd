package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

const (
	// lockFileVariable is the environment variable by which the programs of the legacy
	// variant take another file for their lock, and lockFile the file they take without it.
	lockFileVariable = "XTABLES_LOCKFILE"
	lockFile         = "/run/xtables.lock"
	// ownLockFile is the lock of a program that runs while this process has the real one:
	// the file it is given beside its standard ones, which nothing else can lock.
	ownLockFile = "/proc/self/fd/3"
	// lockPoll is how often the lock is tried while another program has it.
	lockPoll = 5 * time.Millisecond
)

// lock takes the lock of the programs of the legacy variant, so that none of them
// changes a table until unlock is called. It waits as long as they do.
func lock(ctx context.Context) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, lockWait*time.Second)
	defer cancel()
	path := os.Getenv(lockFileVariable)
	if path == "" {
		path = lockFile
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := fileio.Lock(f)
		if err == nil {
			return func() { _ = fileio.Unlock(f) }, nil
		}
		if !errors.Is(err, fileio.ErrLocked) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("lock %s: %w: %w", path, fileio.ErrLocked, context.Cause(ctx)), f.Close())
		case <-time.After(lockPoll):
		}
	}
}

// newLockFile makes a file that only this process and its children can open.
func newLockFile() (*os.File, error) {
	fd, err := unix.MemfdCreate("xtables.lock", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return os.NewFile(uintptr(fd), "xtables.lock"), nil
}

// takesLockFile reports whether a program of the legacy variant looks at
// lockFileVariable: it fails with a file that cannot be there, before it has changed
// anything.
func takesLockFile(ctx context.Context, restore []string) bool {
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	const nowhere = "/dev/null/lock"
	cmd := exec.CommandContext(ctx, restore[0], append(restore[1:len(restore):len(restore)], "--noflush", "-w", "1")...)
	cmd.Env = append(cmd.Environ(), lockFileVariable+"="+nowhere)
	cmd.Stdin = strings.NewReader("*filter\nCOMMIT\n")
	out, err := cmd.CombinedOutput()
	return err != nil && strings.Contains(string(out), nowhere)
}
