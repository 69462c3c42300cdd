package store

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"
)

// HasData reports whether a directory has the data of a server.
func HasData(path string) bool {
	_, err := os.Stat((&Dir{Path: path}).File("version"))
	return err == nil
}

// RemoveData removes what a server keeps in a data directory, the store and the keys
// included, and nothing else that is there. It is an error if a server uses it.
func RemoveData(path string) error {
	if !HasData(path) {
		return nil
	}
	d, err := OpenDir(path)
	if err != nil {
		return err
	}
	defer d.Close()
	errs := []error{removeLeftovers(path, backingUp, 0), removeLeftovers(path, restoring, 0)}
	// The version is last: a directory without one is not found again.
	for _, name := range []string{
		"etcd", "pki", backupDirectory, "node-token", "admin.kubeconfig", "controllers.kubeconfig", "audit-policy.yaml", "version", "lock",
	} {
		if err := os.RemoveAll(d.File(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// RemoveUnused is RemoveData for a server that is about to end: it waits for that until ctx ends.
func RemoveUnused(ctx context.Context, path string) error {
	for {
		err := RemoveData(path)
		var used *inUseError
		if !errors.As(err, &used) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
}
