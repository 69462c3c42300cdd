package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// bpfFS is where programs are pinned.
const bpfFS = "/sys/fs/bpf"

// controlGroup is a control group of version 2, in which programs can be attached
// that the machine's own processes never meet, and a BPF file system to pin them in.
type controlGroup struct{ dir, outside string }

// needsBPF is what a run needs that attaches BPF programs.
const needsBPF = "the machine's root and control groups of version 2"

// canAttach reports whether BPF programs can be attached here: by root in the
// machine's first user namespace, where the hierarchy is mounted.
func canAttach() bool {
	ids, err := os.ReadFile("/proc/self/uid_map")
	_, top := topGroup()
	return err == nil && os.Getuid() == 0 && strings.Contains(string(ids), "4294967295") && top == nil
}

// topGroup is where the hierarchy is mounted.
func topGroup() (string, error) {
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			return dir, nil
		}
	}
	return "", errors.New("control groups of version 2 are not mounted")
}

// newControlGroup makes a group at the top of the hierarchy.
func newControlGroup() (*controlGroup, error) {
	top, err := topGroup()
	if err != nil {
		return nil, err
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	g := &controlGroup{dir: filepath.Join(top, fmt.Sprintf("fairlead-bench-%d", time.Now().UnixNano()))}
	for line := range strings.Lines(string(own)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			g.outside = filepath.Join(top, name)
		}
	}
	if err := unix.Mount("bpf", bpfFS, "bpf", 0, ""); err != nil {
		return nil, fmt.Errorf("mount %s: %w", bpfFS, err)
	}
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		return nil, errors.Join(err, unix.Unmount(bpfFS, unix.MNT_DETACH))
	}
	return g, nil
}

// in calls f with this process in the group.
func (g *controlGroup) in(f func() error) error {
	if err := enter(g.dir); err != nil {
		return err
	}
	return errors.Join(f(), enter(g.outside))
}

func enter(dir string) error {
	return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0) // 0 is the writer's own process
}

// remove takes the group away, and with it the programs.
func (g *controlGroup) remove() error {
	return errors.Join(unix.Unmount(bpfFS, unix.MNT_DETACH), os.Remove(g.dir))
}
