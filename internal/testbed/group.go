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

// Group makes a control group of version 2, moves the process of the test into it until the test ends, and returns its
// folder. Programs are attached there, so that the machine's own processes never meet them. Where the process may not do that
// the test is skipped: that takes root.
func Group(t testing.TB) string {
	t.Helper()
	if os.Getuid() != 0 || !initialUser() {
		t.Skip("control groups and BPF take the machine's root")
	}
	top, own := hierarchy(t)
	dir := filepath.Join(top, fmt.Sprintf("fairlead-test-%d-%d", os.Getpid(), groups.Add(1)))
	must(t, os.Mkdir(dir, 0o755), "make a control group")
	pid := []byte(strconv.Itoa(os.Getpid()))
	before := filepath.Join(top, own, "cgroup.procs")
	t.Cleanup(func() {
		if err := os.WriteFile(before, pid, 0); err != nil {
			t.Errorf("testbed: leave the control group: %v", err)
		}
		// What the test has started leaves when it is waited for.
		Until(t, "the control group to be empty", func() error { return os.Remove(dir) })
	})
	must(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), pid, 0), "enter the control group")
	return dir
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
