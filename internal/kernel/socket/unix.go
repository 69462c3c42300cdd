package socket

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Peer returns the process at the other end of a connection, and its effective
// user, as they were when the connection was made (SO_PEERCRED).
func Peer(c *net.UnixConn) (pid, uid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, credErr); err != nil {
		return 0, 0, fmt.Errorf("peer of a connection: %w", err)
	}
	return int(cred.Pid), int(cred.Uid), nil
}

// FilesSpace returns the size of a control message with n files.
func FilesSpace(n int) int { return unix.CmsgSpace(n * 4) }

// PackFiles returns the control message that passes files to the other end of a
// connection (SCM_RIGHTS), nil for none.
func PackFiles(files ...*os.File) []byte {
	if len(files) == 0 {
		return nil
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	return unix.UnixRights(fds...)
}

// PackConn calls f with the control message that passes a socket (SCM_RIGHTS). It stays as it is: File.Fd would
// make it block.
func PackConn(c syscall.Conn, f func(rights []byte) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = f(unix.UnixRights(int(fd))) })
	return errors.Join(err, failed)
}

// UnpackFiles returns the files of a control message. The caller closes them, also
// after an error.
func UnpackFiles(control []byte) ([]*os.File, error) {
	msgs, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, fmt.Errorf("passed files: %w", err)
	}
	var files []*os.File
	for _, m := range msgs {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return files, fmt.Errorf("passed files: %w", err)
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	return files, nil
}
