package connect

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netns"
)

// Outside is a control group that is not below Config.Cgroup, with processes of a Pod of this node: the packet filter translates the
// connections of these.
type Outside struct {
	// Group is its path below the top of the hierarchy, as /proc/PID/cgroup has it for this process.
	Group string
	// PID is one of the processes, Addrs are the Pod's addresses.
	PID   int
	Addrs []netip.Addr
}

// FindOutside returns the control groups with processes of this node's Pods that the programs are not for, sorted by path. A Pod is what
// Clients takes for one: a network namespace whose only way out is the node, which is the namespace of the calling thread. What was
// found is returned with any error, such as that of a process outside whose namespace this one may not see. Processes that start at
// the same time may be missing.
func FindOutside(cfg Config) ([]Outside, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	home, err := os.Open(ownNamespace)
	if err != nil {
		return nil, fmt.Errorf("open the node's network namespace: %w", err)
	}
	defer func() { _ = home.Close() }()
	all, unseen, err := inPods(home)
	if err != nil || len(all)+len(unseen) == 0 {
		return nil, err
	}
	covered := map[int]bool{} // read after the others: a process that is missing there is outside, or has ended
	if err := addProcesses(cfg.Cgroup, covered); err != nil {
		return nil, err
	}
	for pid, why := range unseen {
		if !covered[pid] && alive(pid) {
			err = fmt.Errorf("cannot look at the network namespace of process %d (root can, with CAP_SYS_PTRACE and CAP_SYS_ADMIN): %w", pid, why)
		}
	}
	found := map[string]Outside{}
	for pid, ns := range all {
		if covered[pid] {
			continue
		}
		if group := groupOf(pid); group != "" && alive(pid) {
			if was, known := found[group]; !known || pid < was.PID {
				found[group] = Outside{group, pid, ns.Addrs}
			}
		}
	}
	out := make([]Outside, 0, len(found))
	for _, one := range found {
		out = append(out, one)
	}
	slices.SortFunc(out, func(a, b Outside) int { return cmp.Compare(a.Group, b.Group) })
	return out, err
}

// alive reports whether a process has not ended. One that has ended and that its parent has not waited for still names its control
// group, and has no network namespace.
func alive(pid int) bool {
	_, err := netns.Inode(netns.Of(pid))
	return err == nil
}

// inPods returns the processes whose network namespace is a Pod's of the node whose namespace is home, and why it cannot look at others.
func inPods(home *os.File) (out map[int]*Namespace, unseen map[int]error, err error) {
	own, err := netns.Inode(ownNamespace)
	if err != nil {
		return nil, nil, err
	}
	names, err := os.ReadDir("/proc")
	if err != nil {
		return nil, nil, fmt.Errorf("cannot list processes: %w", err)
	}
	out, unseen = map[int]*Namespace{}, map[int]error{}
	known, failed := map[uint64]*Namespace{own: nil}, map[uint64]error{}
	for _, name := range names {
		pid, err := strconv.Atoi(name.Name())
		if err != nil {
			continue
		}
		id, err := netns.Inode(netns.Of(pid))
		ns, looked := known[id]
		if err == nil && !looked {
			if err = failed[id]; err == nil {
				ns, err = namespaceOf(home, pid)
			}
		}
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH): // it has ended
			continue
		case err != nil:
			unseen[pid] = err
			if id != 0 {
				failed[id] = err
			}
			continue
		}
		known[id] = ns
		if ns != nil {
			out[pid] = ns
		}
	}
	return out, unseen, nil
}

// addProcesses notes the processes of a control group and of all groups below it, as far as they are in this process's PID namespace.
func addProcesses(dir string, in map[int]bool) error {
	text, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	switch {
	case err == nil:
		for word := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(word); err == nil {
				in[pid] = true
			}
		}
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV): // the group has gone
		return nil
	case !errors.Is(err, unix.EOPNOTSUPP): // of threads: its processes are in a group above
		return err
	}
	below, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range below {
		if !e.IsDir() {
			continue
		}
		if err := addProcesses(filepath.Join(dir, e.Name()), in); err != nil {
			return err
		}
	}
	return nil
}

// groupOf returns the control group of version 2 of a process, "" if it has ended.
func groupOf(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSpace(name)
		}
	}
	return ""
}

// namedGroups bounds how many groups Uncovered names.
const namedGroups = 3

// Uncovered names the groups of FindOutside in one line, for messages.
func Uncovered(cfg Config, all []Outside) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Pods have processes outside of the control group %s that --connect-time-cgroup names: in ", cfg.Cgroup)
	for i, one := range all[:min(len(all), namedGroups)] {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s (process %d)", one.Group, one.PID)
	}
	if more := len(all) - namedGroups; more > 0 {
		fmt.Fprintf(&b, ", and %d more groups", more)
	}
	return b.String()
}

// CoverRemedy returns what to do where FindOutside has found groups.
func CoverRemedy(cfg Config) string {
	top := filepath.Clean(cfg.Cgroup)
	for dir := filepath.Dir(top); dir != top && checkGroup(dir) == nil; dir = filepath.Dir(dir) {
		top = dir
	}
	if top == filepath.Clean(cfg.Cgroup) {
		return "mount the machine's /sys/fs/cgroup into the container, and name that with --connect-time-cgroup: above " + top +
			" no control group is mounted here"
	}
	return "name " + top + " with --connect-time-cgroup, or another group that has all groups of Pods below it"
}
