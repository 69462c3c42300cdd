package testbed

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

var groups atomic.Int64

// ControlGroup is a control group of version 2 that has the process of a test in it.
type ControlGroup struct {
	// Dir is its folder.
	Dir    string
	t      testing.TB
	before string // where the process was
}

// Group makes a control group and moves the process of the test into it until the test ends. Programs are attached there, so that
// the machine's own processes never meet them. Where the process may not do that the test is skipped: that takes root.
func Group(t testing.TB) *ControlGroup {
	t.Helper()
	if os.Getuid() != 0 || !initialUser() {
		t.Skip("control groups and BPF take the machine's root")
	}
	top, own := hierarchy(t)
	dir := filepath.Join(top, fmt.Sprintf("fairlead-test-%d-%d", os.Getpid(), groups.Add(1)))
	must(t, os.Mkdir(dir, 0o755), "make a control group")
	g := &ControlGroup{Dir: dir, t: t, before: filepath.Join(top, own)}
	t.Cleanup(func() {
		g.move(g.before)
		// What the test has started leaves when it is waited for.
		Until(t, "the control group to be empty", func() error { return os.Remove(dir) })
	})
	g.move(dir)
	return g
}

// Outside calls f with the process outside of the group.
func (g *ControlGroup) Outside(f func()) {
	g.move(g.before)
	defer g.move(g.Dir)
	f()
}

func (g *ControlGroup) move(dir string) {
	err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
	must(g.t, err, "move to control group %s", dir)
}

// initialUser reports whether this process is in the machine's first user namespace.
func initialUser() bool {
	b, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && strings.Contains(string(b), "4294967295")
}

// hierarchy returns where version 2 is mounted, and the group of this process below it.
func hierarchy(t testing.TB) (top, own string) {
	t.Helper()
	f, err := os.Open("/proc/self/cgroup")
	must(t, err, "read the own control group")
	defer func() { _ = f.Close() }()
	for s := bufio.NewScanner(f); s.Scan(); {
		if name, ok := strings.CutPrefix(s.Text(), "0::"); ok {
			own = name
		}
	}
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			return dir, own
		}
	}
	t.Skip("control groups of version 2 are not mounted")
	return "", ""
}

// BPFFS mounts a BPF file system for the test, which must run in a mount namespace made by Main, and returns where.
func BPFFS(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	err := unix.Mount("bpf", dir, "bpf", 0, "")
	if errors.Is(err, unix.EPERM) {
		t.Skip("BPF takes the machine's root")
	}
	must(t, err, "mount a BPF file system")
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("testbed: unmount the BPF file system: %v", err)
		}
	})
	return dir
}
