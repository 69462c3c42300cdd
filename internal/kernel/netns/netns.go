// Package netns runs functions inside the network namespaces of other
// processes without ever letting a borrowed thread back into the scheduler.
package netns

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/thread"
)

// Of names the network namespace of a process, for Do and for the link room.
func Of(pid int) string { return fmt.Sprintf("/proc/%d/ns/net", pid) }

// Do runs f on a thread of its own that is inside the network namespace named
// by path (/proc/PID/ns/net or a bind mount of one) and waits for it. Sockets
// that f opens stay in that namespace for good. f must not start goroutines
// that open sockets: they would run elsewhere.
func Do(path string, f func() error) error {
	ns, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open network namespace: %w", err)
	}
	defer ns.Close()
	return thread.Run(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", path, err)
		}
		return f()
	})
}

// Inode is the identity of the namespace behind path for as long as it lives.
func Inode(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return st.Ino, nil
}
