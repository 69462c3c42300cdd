package shim

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
)

// A shim that dies while a request is being sent is an error, not a connection.
func TestShimDiesDuringTheRequest(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, socketName))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err == nil {
			_ = c.Close() // most of the request does not fit into the socket
		}
	}()
	_, err = Client{Dir: dir}.Exec(t.Context(), Exec{Args: []string{strings.Repeat("x", maxMessage/2)}}, Streams{}, func() {
		t.Error("it counts as started")
	})
	if err == nil {
		t.Error("no error")
	}
}
