package socket

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// SetUserTimeout bounds how long what was sent may wait for its acknowledgement before the connection ends (TCP_USER_TIMEOUT, RFC
// 5482), and how long a receiver may keep its window closed; 0 for the system's bounds.
func SetUserTimeout(c *net.TCPConn, d time.Duration) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	}); err != nil {
		return err
	}
	return failed
}

// UserTimeout returns what SetUserTimeout has set.
func UserTimeout(c *net.TCPConn) (d time.Duration, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	if err2 := raw.Control(func(fd uintptr) {
		n := 0
		n, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
		d = time.Duration(n) * time.Millisecond
	}); err2 != nil {
		return 0, err2
	}
	return d, err
}
