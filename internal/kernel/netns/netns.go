// Package netns runs functions on dedicated threads, inside other network
// namespaces, and never returns such a thread to the Go scheduler.
package netns

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Of returns the path of a process's network namespace.
func Of(pid int) string { return fmt.Sprintf("/proc/%d/ns/net", pid) }

// Do runs f on a dedicated thread inside the network namespace named
// by path (/proc/PID/ns/net or a bind mount of one) and waits for it. Sockets
// that f opens stay in that namespace for good. f must not start goroutines
// that open sockets: they would run elsewhere.
func Do(path string, f func() error) error {
	ns, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open network namespace: %w", err)
	}
	defer ns.Close()
	return OnThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", path, err)
		}
		return f()
	})
}

// Inode returns the inode of the namespace behind path, which identifies it for
// as long as it exists.
func Inode(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return st.Ino, nil
}

// SameUser reports whether a process is in the caller's user namespace. Of one in
// another user namespace that the caller has no capabilities in, nothing can be
// read, which counts as no.
func SameUser(pid int) bool {
	own, err := Inode("/proc/self/ns/user")
	if err != nil {
		return false
	}
	other, err := Inode(fmt.Sprintf("/proc/%d/ns/user", pid))
	return err == nil && own == other
}
