package shim

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"
)

// maxMessage bounds one message: a container's environment may be 2 MiB (the
// kernel's limit for exec) and grows by quoting.
const maxMessage = 16 << 20

// sameUser reports whether the peer runs as the same user. The directory is closed
// to others anyway.
func sameUser(c *net.UnixConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	ok := false
	err = raw.Control(func(fd uintptr) {
		cred, err := syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
		ok = err == nil && int(cred.Uid) == os.Geteuid()
	})
	return err == nil && ok
}

// send writes a message: its length, then JSON; files are passed with the first
// byte.
func send(c *net.UnixConn, m any, files ...*os.File) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(b) > maxMessage {
		return fmt.Errorf("message of %d bytes is longer than %d", len(b), maxMessage)
	}
	b = append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = syscall.UnixRights(fds...)
	}
	n, _, err := c.WriteMsgUnix(b, rights, nil)
	if err == nil && n < len(b) {
		_, err = c.Write(b[n:])
	}
	return err
}

// reply writes a response; a peer that does not read it in 10 s is given up.
func reply(c *net.UnixConn, r response) error {
	_ = c.SetWriteDeadline(time.Now().Add(10 * time.Second))
	return send(c, r)
}

// receive reads the request of a connection and its files, as stdin, stdout,
// stderr with nil for absent ones.
func receive(c *net.UnixConn) (request, []*os.File, error) {
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	head := make([]byte, 4)
	oob := make([]byte, syscall.CmsgSpace(3*4))
	n, oobn, _, _, err := c.ReadMsgUnix(head, oob)
	if err != nil {
		return request{}, nil, err
	}
	got, err := parseFiles(oob[:oobn])
	if err != nil {
		return request{}, got, err
	}
	var req request
	if err := readBody(c, head, n, &req); err != nil {
		return req, got, err
	}
	_ = c.SetReadDeadline(time.Time{})
	files := make([]*os.File, 3)
	rest := got
	for i, want := range []bool{req.Stdin, req.Stdout, req.Stderr} {
		if !want {
			continue
		}
		if len(rest) == 0 {
			return req, got, errors.New("fewer files than announced")
		}
		files[i], rest = rest[0], rest[1:]
	}
	for _, f := range rest {
		_ = f.Close()
	}
	return req, files, nil
}

func parseFiles(oob []byte) ([]*os.File, error) {
	msgs, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("files of a request: %w", err)
	}
	var files []*os.File
	for _, m := range msgs {
		fds, err := syscall.ParseUnixRights(&m)
		if err != nil {
			return files, fmt.Errorf("files of a request: %w", err)
		}
		for _, fd := range fds {
			syscall.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	return files, nil
}

// readMessage reads the next message into m.
func readMessage(c *net.UnixConn, m any) error {
	return readBody(c, make([]byte, 4), 0, m)
}

// readBody reads the message whose first n bytes of four are in head.
func readBody(c *net.UnixConn, head []byte, n int, m any) error {
	if err := readFull(c, head[n:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(head)
	if size > maxMessage {
		return fmt.Errorf("message of %d bytes is longer than %d", size, maxMessage)
	}
	b := make([]byte, size)
	if err := readFull(c, b); err != nil {
		return err
	}
	return json.Unmarshal(b, m)
}

func readFull(c *net.UnixConn, b []byte) error {
	for len(b) > 0 {
		n, err := c.Read(b)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}
