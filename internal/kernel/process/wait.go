package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Wait returns nil when the process has ended, whoever started it, and else the error of
// ctx. It needs Linux 5.10 (pidfd_open(2) with PIDFD_NONBLOCK).
func (id ID) Wait(ctx context.Context) error {
	if id.Pid <= 0 {
		return nil
	}
	fd, err := unix.PidfdOpen(id.Pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("wait for process %d: %w", id.Pid, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	// The pidfd pins the process: if the start time still fits, it is ours.
	if !id.Alive() {
		return nil
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("wait for process %d: %w", id.Pid, err)
	}
	defer context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })()
	err = conn.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		return err == nil && n > 0
	})
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return fmt.Errorf("wait for process %d: %w", id.Pid, err)
}
