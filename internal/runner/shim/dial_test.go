package shim_test

import (
	"fmt"
	"net"
	"os"
	"testing"
)

// dial connects to a shim's socket below the client.
func dial(t *testing.T, dir string) net.Conn {
	t.Helper()
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	c, err := net.Dial("unix", fmt.Sprintf("/proc/self/fd/%d/shim.sock", d.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	return c
}
