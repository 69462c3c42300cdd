package connect

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

// The top of the hierarchy is found beside one of version 1, too, and not where there is none, or where it begins at a group.
func TestTopGroup(t *testing.T) {
	group := testbed.Group(t)
	const usual = "/sys/fs/cgroup"
	own := t.TempDir() // the group survives the mounts above it
	if err := unix.Mount(group.Dir, own, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	unified := filepath.Join(usual, "unified")
	t.Cleanup(func() { _ = unix.Unmount(own, unix.MNT_DETACH) })
	t.Run("hybrid", func(t *testing.T) {
		check := func(want, wantErr string) {
			t.Helper()
			top, err := topGroup()
			if top != want || (err == nil) != (wantErr == "") || err != nil && !strings.Contains(err.Error(), wantErr) {
				t.Errorf("the top is %q, %v; want %q, %q", top, err, want, wantErr)
			}
		}
		mountIn := func(kind, at string) {
			t.Helper()
			if err := unix.Mount(kind, at, kind, 0, ""); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
		}
		mountIn("tmpfs", usual)
		check("", "are not mounted at")
		if err := os.Mkdir(unified, 0o755); err != nil {
			t.Fatal(err)
		}
		mountIn("cgroup2", unified)
		check(unified, "")
		if err := unix.Mount(own, unified, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(unified, unix.MNT_DETACH) })
		check("", unified+" is not the top")
	})
}
