package socket

import (
	"context"
	"syscall"

	"golang.org/x/sys/unix"
)

// EndWith returns a ControlContext for a net.Dialer whose connections end with ctx. It is for protocols on top that do not look at a
// context: their reads and writes fail then.
func EndWith(ctx context.Context) func(_ context.Context, network, address string, c syscall.RawConn) error {
	return func(_ context.Context, _, _ string, c syscall.RawConn) error {
		context.AfterFunc(ctx, func() {
			_ = c.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) }) // fails once it is closed
		})
		return nil
	}
}
