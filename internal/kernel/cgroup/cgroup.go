// Package cgroup limits, measures and kills groups of processes by control groups,
// version 2 (Documentation/admin-guide/cgroup-v2.rst of Linux).
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrUnavailable is the error where this process may make no groups, or where the
// kernel's controllers belong to version 1.
var ErrUnavailable = errors.New("no control groups to limit processes with")

// controllers are the controllers that a Tree has.
var controllers = []string{"cpu", "memory", "pids"}

// agentGroup is where a process moves that stands in the way: a group whose
// controllers its children have must have no processes itself.
const agentGroup = "agent"

// Tree is a group whose groups this process makes and removes.
type Tree struct {
	dir string
	// unit is the group of systemd's unit that this process was started in, if the tree is
	// in it: empty for a tree at the top, and where DelegateSubgroup= keeps the two apart.
	unit string
}

// Open returns the tree named name: below the top of the hierarchy, as kubelet's, or
// else below the group of this process, if that is delegated to it. Two processes may
// have one tree, if they name groups differently. A process whose tree is in its own unit
// calls Release before it ends.
func Open(name string) (*Tree, error) {
	top, err := hierarchy()
	if err != nil {
		return nil, err
	}
	own, err := ownGroup()
	if err != nil {
		return nil, err
	}
	own = filepath.Join(top, own)
	root := delegated(own)
	var errs []error
	for _, parent := range slices.Compact([]string{top, root}) {
		t := &Tree{dir: filepath.Join(parent, name)}
		if parent != top && (own == root || filepath.Base(own) == agentGroup) {
			t.unit = parent
		}
		err := enable(parent)
		if (errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EOPNOTSUPP)) && parent == root {
			if err = evacuate(parent); err == nil {
				err = enable(parent)
			}
		}
		if err == nil {
			err = os.MkdirAll(t.dir, 0o755)
		}
		if err == nil {
			err = enable(t.dir)
		}
		if err == nil { // another process may have made it all
			err = unix.Access(t.dir, unix.W_OK)
		}
		if err == nil {
			return t, nil
		}
		errs = append(errs, err)
	}
	return nil, fmt.Errorf("%w: %w; run as root, or in a unit with Delegate=yes", ErrUnavailable, errors.Join(errs...))
}

// delegated returns the group that belongs to the process of the group own: the one above, if
// systemd has delegated that, and own is no unit but a part of it (DelegateSubgroup=, or
// evacuate), and else own itself.
func delegated(own string) string {
	above := filepath.Dir(own)
	switch filepath.Ext(own) {
	case ".service", ".scope", ".slice":
		return own
	}
	// https://systemd.io/CGROUP_DELEGATION; Linux lets only root read the second one.
	for _, name := range []string{"user.delegate", "trusted.delegate"} {
		value := make([]byte, 8)
		if n, err := unix.Getxattr(above, name, value); err == nil && string(value[:n]) == "1" {
			return above
		}
	}
	return own
}

// Release takes the controllers, and with them the limits, from the groups of a tree in this
// process's own unit, and of those beside it. Their processes go on, and the next process of the unit makes the groups
// again with their limits. Without that systemd starts none while they live: it puts it into
// the unit's group, from which these controllers keep processes out (219/CGROUP; with
// DelegateSubgroup=, since systemd 254, it puts it elsewhere). Other trees are not changed.
func (t *Tree) Release() error {
	if t.unit == "" {
		return nil
	}
	return disable(t.unit)
}

// disable takes the controllers from the groups in dir, the innermost first, since a group has
// none that its parent does not have.
func disable(dir string) error {
	var errs []error
	for _, name := range (Group{dir}).Names() {
		errs = append(errs, disable(filepath.Join(dir, name)))
	}
	file := filepath.Join(dir, "cgroup.subtree_control")
	var text []string
	for _, c := range words(file) {
		text = append(text, "-"+c)
	}
	if len(text) > 0 {
		errs = append(errs, os.WriteFile(file, []byte(strings.Join(text, " ")), 0))
	}
	return errors.Join(errs...)
}

// Supported returns why the kernel has no groups to limit processes with. Open
// may fail even so, by the rights of this process.
func Supported() error {
	_, err := hierarchy()
	return err
}

// hierarchy returns where cgroup v2 is mounted, which has all controllers.
func hierarchy() (string, error) {
	top, err := mountPoint()
	if err != nil {
		return "", err
	}
	have := words(filepath.Join(top, "cgroup.controllers"))
	if i := slices.IndexFunc(controllers, func(c string) bool { return !slices.Contains(have, c) }); i >= 0 {
		return "", fmt.Errorf("%w: controller %s is not in cgroup v2 (%s has %q); boot with systemd.unified_cgroup_hierarchy=1",
			ErrUnavailable, controllers[i], top, have)
	}
	return top, nil
}

// mountPoint returns where cgroup v2 is mounted.
func mountPoint() (string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		// proc_pid_mountinfo(5): the type comes after a lone hyphen.
		before, after, _ := strings.Cut(line, " - ")
		if f := strings.Fields(before); len(f) > 4 && strings.HasPrefix(after, "cgroup2 ") {
			return f[4], nil
		}
	}
	return "", fmt.Errorf("%w: cgroup v2 is not mounted", ErrUnavailable)
}

// ownGroup returns the group of this process, relative to the mount point.
func ownGroup() (string, error) {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSpace(path), nil
		}
	}
	return "", fmt.Errorf("%w: this process is in no group of cgroup v2", ErrUnavailable)
}

func words(file string) []string {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	return strings.Fields(string(b))
}

// enable gives the groups in dir the controllers, all at once: one that threads may share
// (cpu, pids) is enabled beside processes too, and makes dir a threaded domain, which
// rejects the others with EOPNOTSUPP instead of EBUSY.
func enable(dir string) error {
	file := filepath.Join(dir, "cgroup.subtree_control")
	have := words(file)
	var missing []string
	for _, c := range controllers {
		if !slices.Contains(have, c) {
			missing = append(missing, "+"+c)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return os.WriteFile(file, []byte(strings.Join(missing, " ")), 0)
}

// evacuate moves the processes of dir into a group in it.
func evacuate(dir string) error {
	to := filepath.Join(dir, agentGroup)
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for range 10 { // also processes forked in between
		pids := words(filepath.Join(dir, "cgroup.procs"))
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			if err := os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(pid), 0); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
	}
	return fmt.Errorf("%s does not get empty", dir)
}

// Limits are the limits of a group; zero means no limit.
type Limits struct {
	// Memory is in bytes; what is over it is not swapped, but killed with the
	// whole group.
	Memory int64
	// CPU is in thousandths of a processor.
	CPU int64
	// Weight is the share of processors when they are short, 1 to 10,000.
	Weight int64
	PIDs   int64
}

// Beside opens another tree next to t. Its groups share what it is given.
func (t *Tree) Beside(name string, l Limits) (*Tree, error) {
	o := *t
	o.dir = filepath.Join(filepath.Dir(t.dir), name)
	return &o, Group{o.dir}.Make(l, true)
}

// Group is one group of processes.
type Group struct{ dir string }

// At returns the group at dir, a path that Dir returned.
func At(dir string) Group { return Group{dir} }

// Dir is the directory of the group.
func (g Group) Dir() string { return g.dir }

// Group returns the group of that name, which need not exist.
func (t *Tree) Group(name string) Group { return Group{filepath.Join(t.dir, name)} }

// Below returns the group of that name in g, which need not exist.
func (g Group) Below(name string) Group { return Group{filepath.Join(g.dir, name)} }

// Names lists the groups of the tree.
func (t *Tree) Names() []string { return Group{t.dir}.Names() }

// Names lists the groups in g, none if there is no g.
func (g Group) Names() []string {
	entries, _ := os.ReadDir(g.dir)
	var out []string
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, e.Name())
		}
	}
	return out
}

// Close removes the tree if it has no groups but empty ones.
func (t *Tree) Close() {
	for _, name := range t.Names() {
		_ = os.Remove(filepath.Join(t.dir, name))
	}
	_ = os.Remove(t.dir)
	_ = os.Remove(filepath.Join(filepath.Dir(t.dir), agentGroup))
}

// Make makes the group, if need be, and sets its limits. inner is a group that has
// groups, and no processes.
func (g Group) Make(l Limits, inner bool) error {
	if err := os.MkdirAll(g.dir, 0o755); err != nil {
		return err
	}
	if inner {
		if err := enable(g.dir); err != nil {
			return err
		}
	}
	return g.Limit(l)
}

// period is that of cpu.max, in microseconds.
const period = 100_000

// Limit sets the limits.
func (g Group) Limit(l Limits) error {
	limit := func(n int64) string {
		if n <= 0 {
			return "max"
		}
		return strconv.FormatInt(n, 10)
	}
	set := map[string]string{"memory.max": limit(l.Memory), "pids.max": limit(l.PIDs)}
	if l.Memory > 0 {
		set["memory.oom.group"] = "1"
		set["memory.swap.max"] = "0"
	}
	cpu := limit(l.CPU)
	if l.CPU > 0 {
		cpu = strconv.FormatInt(max(l.CPU*period/1000, 1000), 10)
	}
	set["cpu.max"] = fmt.Sprintf("%s %d", cpu, period)
	if l.Weight > 0 {
		set["cpu.weight"] = strconv.FormatInt(min(max(l.Weight, 1), 10_000), 10)
	}
	for file, value := range set {
		err := os.WriteFile(filepath.Join(g.dir, file), []byte(value), 0)
		// Kernels without swap or CFS bandwidth lack the file; a limit that is none
		// is no loss then.
		lacking := errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission)
		if err != nil && (!lacking || file != "memory.swap.max" && !strings.HasPrefix(value, "max")) {
			return fmt.Errorf("limit the group of processes: %w", err)
		}
	}
	return nil
}

// Open returns the directory, for SysProcAttr.CgroupFD.
func (g Group) Open() (*os.File, error) { return os.Open(g.dir) }

// Exists reports whether the group is there.
func (g Group) Exists() bool {
	_, err := os.Stat(g.dir)
	return err == nil
}

// Kill ends every process of the group and of groups in it with SIGKILL, and processes
// that they fork until then, and waits until none is left or ctx is done. A group that
// does not exist has none.
func (g Group) Kill(ctx context.Context) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		if !g.populated() {
			return nil
		}
		if err := os.WriteFile(filepath.Join(g.dir, "cgroup.kill"), []byte("1"), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("kill the group of processes: %w", err)
		} else if err != nil { // Linux 5.14 has it
			g.killEach()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes of %s outlive SIGKILL: %w", g.dir, ctx.Err())
		case <-time.After(wait):
		}
	}
}

func (g Group) killEach() {
	_ = filepath.WalkDir(g.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil //nolint:nilerr // it has just been removed
		}
		for _, w := range words(filepath.Join(path, "cgroup.procs")) {
			if pid, err := strconv.Atoi(w); err == nil && pid > 0 {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
		return nil
	})
}

// populated reports whether a process lives in the group or below it.
func (g Group) populated() bool { return g.value("cgroup.events", "populated") == 1 }

// OOMKills is how often the kernel killed in the group because its memory was full.
func (g Group) OOMKills() int64 { return g.value("memory.events", "oom_kill") }

// value returns the number after key in a file of lines of two words, or that of a
// file of one number for key "".
func (g Group) value(file, key string) int64 {
	b, err := os.ReadFile(filepath.Join(g.dir, file))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if key == "" && len(f) == 1 || len(f) == 2 && f[0] == key {
			n, _ := strconv.ParseInt(f[len(f)-1], 10, 64)
			return n
		}
	}
	return 0
}

// Remove removes the group and the groups in it; their processes must have ended.
func (g Group) Remove() error {
	entries, err := os.ReadDir(g.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if e.IsDir() {
			errs = append(errs, Group{filepath.Join(g.dir, e.Name())}.Remove())
		}
	}
	if err := os.Remove(g.dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Usage is what a group and the groups in it use.
type Usage struct {
	CPU time.Duration
	// Memory is in bytes, with the page cache; WorkingSet without what the kernel
	// would drop first (kubelet's definition: inactive_file).
	Memory, WorkingSet int64
	PIDs               int64
}

// Usage reads the present usage.
func (g Group) Usage() Usage {
	u := Usage{
		CPU:    time.Duration(g.value("cpu.stat", "usage_usec")) * time.Microsecond,
		Memory: g.value("memory.current", ""), PIDs: g.value("pids.current", ""),
	}
	u.WorkingSet = max(0, u.Memory-g.value("memory.stat", "inactive_file"))
	return u
}
