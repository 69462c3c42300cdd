package socket

import "golang.org/x/sys/unix"

// MaxFiles returns how many files the process may have open: RLIMIT_NOFILE, 1 << 30 at most.
func MaxFiles() int {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil { // of valid arguments: see getrlimit(2)
		return 1024
	}
	return int(min(r.Cur, 1<<30))
}
