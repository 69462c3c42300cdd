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

// systemTimeout is the least after which Linux gives up bytes without an acknowledgement (net.ipv4.tcp_retries2 = 15).
const systemTimeout = 924 * time.Second

// UserTimeoutOf returns the bound of SetUserTimeout for a connection that may be idle for so long: bytes without an
// acknowledgement were not carried. It is not shorter, as a peer that lives may keep its window closed, and 0 if the system's bounds are.
func UserTimeoutOf(idle time.Duration) time.Duration {
	if idle >= systemTimeout {
		return 0
	}
	return idle
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
