package connect

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

// cleanupAs calls Cleanup on a thread that setup changes and that ends afterwards.
func cleanupAs(t *testing.T, fs string, setup func() error) error {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked
		if err := setup(); err != nil {
			t.Errorf("take the rights of a thread: %v", err)
		}
		done <- Cleanup(fs)
	}()
	return <-done
}

// asOther makes the calling thread another user's for files, without the rights of root to them.
func asOther() error { return unix.Setfsuid(65534) }

// withoutCapabilities leaves the calling thread root's.
func withoutCapabilities() error {
	var none [2]unix.CapUserData
	return unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0])
}

// Who may not look into the BPF file system, or may not use BPF, has no programs to remove. That is no error: the proxy starts.
func TestCleanupWithoutRights(t *testing.T) {
	group, fs := testbed.Group(t), testbed.BPFFS(t)
	for dir, mode := range map[string]os.FileMode{fs: 0o700, filepath.Dir(fs): 0o755} {
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
	}
	for name, setup := range map[string]func() error{"another user": asOther, "no capabilities": withoutCapabilities} {
		if err := cleanupAs(t, fs, setup); err != nil {
			t.Errorf("%s, nothing is pinned: %v", name, err)
		}
	}
	p, err := Open(Config{Cgroup: group.Dir, FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Attach(); err != nil {
		t.Fatal(err)
	}
	dir := p.dir
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cleanupAs(t, fs, asOther); err != nil {
		t.Errorf("another user, root's programs are pinned: %v", err)
	}
	if links, _ := filepath.Glob(filepath.Join(dir, "link-*")); len(links) != len(hooks) {
		t.Errorf("%d links are left, want %d", len(links), len(hooks))
	}
	if err := Cleanup(fs); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(dir); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", dir, err)
	}
}
