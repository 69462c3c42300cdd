package parts

import (
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

func TestHubbleListenAddress(t *testing.T) {
	for _, c := range []struct{ listen, path string }{ // without a path it is an error
		{"unix:///run/x.sock", "/run/x.sock"},
		{"unix:/run//y/../x.sock", "/run/x.sock"},
		{"unix:" + "/" + strings.Repeat("x", maxSocketPath-1), "/" + strings.Repeat("x", maxSocketPath-1)},
		{"unix:" + "/" + strings.Repeat("x", maxSocketPath), ""},
		{"unix:rel", ""},
		{"unix:///", ""},
		{"unix:", ""},
		{"tcp://:4244", ""},
		{":4244", ""},
		{"/run/x.sock", ""},
	} {
		f := hubbleFlags{listen: c.listen}
		if err := f.check(); f.path != c.path || (err == nil) != (c.path != "") {
			t.Errorf("%s: %q, %v; want %q", c.listen, f.path, err, c.path)
		}
	}
	f := hubbleFlags{path: "/before"}
	if err := f.check(); err != nil || f.path != "" {
		t.Errorf("without an address: %q, %v", f.path, err)
	}
}

// A socket that no process listens at is replaced, and nothing else. Other users get nothing, even if the mode lets them in.
func TestListenForRoot(t *testing.T) {
	dir, err := os.MkdirTemp("", "flows-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // other users can enter it
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listenForRoot(file, log); err == nil || !strings.Contains(err.Error(), "is not a socket") {
		t.Errorf("a file: %v", err)
	}
	at := filepath.Join(dir, "s")
	dead, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	dead.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := listenForRoot(at, log)
	if err != nil {
		t.Fatalf("a socket of a process that has ended: %v", err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("flows"))
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	if _, err := listenForRoot(at, log); err == nil || !strings.Contains(err.Error(), "another process listens") {
		t.Errorf("a socket in use: %v", err)
	}
	asOther(t, at)
	c, err := net.Dial("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got, err := io.ReadAll(c); err != nil || string(got) != "flows" {
		t.Errorf("the own user gets %q, %v", got, err)
	}
}

// asOther dials a socket as another user, once as it is and once when its mode lets all in.
func asOther(t *testing.T, at string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Log("not root: cannot ask as another user")
		return
	}
	dial := func() (string, error) {
		var got []byte
		err := make(chan error)
		go func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
			if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, 65534, 65534, 65534); e != 0 {
				err <- e
				return
			}
			c, e := net.Dial("unix", at)
			if e == nil {
				got, e = io.ReadAll(c)
				_ = c.Close()
			}
			err <- e
		}()
		e := <-err
		return string(got), e
	}
	if _, err := dial(); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("another user: %v", err)
	}
	if err := os.Chmod(at, 0o666); err != nil {
		t.Fatal(err)
	}
	if out, err := dial(); out != "" || err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("another user at an open socket: %q, %v", out, err)
	}
}
