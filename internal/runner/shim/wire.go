package shim

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// maxMessage bounds one message: a container's environment may be 2 MiB (the
// kernel's limit for exec) and grows by quoting.
const maxMessage = 16 << 20

// sameUser reports whether the peer runs as the same user. The directory is closed
// to others anyway.
func sameUser(c *net.UnixConn) bool {
	_, uid, err := socket.Peer(c)
	return err == nil && uid == os.Geteuid()
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
	n, _, err := c.WriteMsgUnix(b, socket.PackFiles(files...), nil)
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
	oob := make([]byte, socket.FilesSpace(3))
	n, oobn, _, _, err := c.ReadMsgUnix(head, oob)
	if err != nil {
		return request{}, nil, err
	}
	got, err := socket.UnpackFiles(oob[:oobn])
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
