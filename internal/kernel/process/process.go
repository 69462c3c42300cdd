// Package process identifies, watches and ends processes that this program did
// not necessarily start itself: a process is a pid together with its start
// time, so a pid that was used again is never mistaken for the old one.
package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ID identifies a process of this boot. The zero ID is no process.
type ID struct {
	Pid int `json:"pid"`
	// Start is the start time in clock ticks since boot, field 22 of proc(5)
	// stat.
	Start uint64 `json:"start"`
}

// Find returns the ID of the process that has pid now.
func Find(pid int) (ID, error) {
	s, err := ReadStat(pid)
	if err != nil {
		return ID{}, err
	}
	return ID{Pid: pid, Start: s.Start}, nil
}

// living is Find for processes that are not zombies.
func living(pid int) (ID, bool) {
	s, err := ReadStat(pid)
	return ID{Pid: pid, Start: s.Start}, err == nil && s.State != Zombie
}

// Alive reports whether the process runs and is not a zombie.
func (id ID) Alive() bool {
	if id.Pid <= 0 {
		return false
	}
	now, ok := living(id.Pid)
	return ok && now == id
}

// Signal sends sig to exactly this process, through a pidfd (Linux 5.1). It is
// no error if the process has ended.
func (id ID) Signal(sig unix.Signal) error {
	fd, err := unix.PidfdOpen(id.Pid, 0)
	if errors.Is(err, unix.ESRCH) || id.Pid <= 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("signal process %d: %w", id.Pid, err)
	}
	defer unix.Close(fd)
	// The pidfd pins the process: if the start time still fits, it is ours.
	if now, err := Find(id.Pid); err != nil || now.Start != id.Start {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal process %d: %w", id.Pid, err)
	}
	return nil
}

// InMountNamespace lists the processes whose mount namespace has this inode,
// ended ones left out. The work is proportional to the processes of the
// machine.
func InMountNamespace(inode uint64) []ID {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	var out []ID
	for _, n := range names {
		pid, err := strconv.Atoi(n)
		if err != nil {
			continue
		}
		var st unix.Stat_t
		if unix.Stat("/proc/"+n+"/ns/mnt", &st) != nil || st.Ino != inode {
			continue
		}
		if id, ok := living(pid); ok {
			out = append(out, id)
		}
	}
	return out
}

// KillMountNamespace ends every process in the mount namespace with SIGKILL,
// and again processes forked in between, until none is left or ctx is done.
func KillMountNamespace(ctx context.Context, inode uint64) error {
	if inode == 0 {
		return nil
	}
	return killAll(ctx, func() []ID { return InMountNamespace(inode) })
}

// killAll ends what find finds with SIGKILL until it finds none or ctx is done.
func killAll(ctx context.Context, find func() []ID) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		left := find()
		if len(left) == 0 {
			return nil
		}
		for _, id := range left {
			if err := id.Signal(unix.SIGKILL); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d processes outlive SIGKILL, the first is %d: %w", len(left), left[0].Pid, ctx.Err())
		case <-time.After(wait):
		}
	}
}

// KillMountedFrom ends every process that has something of dir mounted, and
// again processes forked in between, except the caller. It is for processes whose mount
// namespace is no longer held open: its inode may belong to another one by then.
func KillMountedFrom(ctx context.Context, dir string) error {
	return killAll(ctx, func() []ID { return mountedFrom(dir) })
}

// mountedFrom finds processes by the fourth field of proc(5) mountinfo, which is
// relative to the file system that dir is on.
func mountedFrom(dir string) []ID {
	return withMount(func(f []string) bool {
		root, _, found := strings.Cut(f[3]+"/", "/"+filepath.Base(dir)+"/")
		return len(f[3]) > 1 && found && strings.HasSuffix(filepath.Dir(dir), root)
	})
}

// MountedAt reports whether another process has something mounted at dir or below, in whatever
// mount namespace. Where none has, dir may be removed: that takes away the mounts at it
// everywhere (Linux 3.18, rmdir(2)).
func MountedAt(dir string) bool {
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	return len(withMount(func(f []string) bool { return f[4] == dir || strings.HasPrefix(f[4], dir+"/") })) > 0
}

// withMount finds the other processes that have a mount whose fields in proc(5) mountinfo are
// as is says.
func withMount(is func(fields []string) bool) []ID {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var out []ID
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) < 5 || !is(f) {
				continue
			}
			if id, ok := living(pid); ok {
				out = append(out, id)
			}
			break
		}
	}
	return out
}

// BootID returns the kernel's name for this boot, "" if there is none; IDs of
// another boot mean nothing.
func BootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// KillGroup ends all processes of a process group with SIGKILL.
func KillGroup(pgid int) error { return unix.Kill(-pgid, unix.SIGKILL) }

// SetHostname sets the host name of the UTS namespace of the calling thread.
func SetHostname(name string) error { return unix.Sethostname([]byte(name)) }

// SetOOMScoreAdj sets how readily the kernel kills a process when memory is short,
// from -1000, never, to 1000 (proc_pid_oom_score_adj(5)). Less than it has needs
// CAP_SYS_RESOURCE of the machine.
func SetOOMScoreAdj(pid, score int) error {
	return os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.Itoa(score)), 0)
}

// BecomeSubreaper makes orphaned descendants children of the caller instead of
// init, so that they can be waited for and found.
func BecomeSubreaper() error {
	return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
}

// ReapOrphan waits, without blocking, for one ended child for which known returns
// false: no other code waits for it. It returns false if there is none or if a
// known one comes before it; then try again a little later.
func ReapOrphan(known func(pid int) bool) bool {
	var info unix.Siginfo
	if unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil) != nil {
		return false
	}
	// si_pid is the first of the union after three ints, which begins at a
	// pointer's alignment (siginfo_t in sigaction(2)).
	at := (3*4 + unsafe.Sizeof(uintptr(0)) - 1) / unsafe.Sizeof(uintptr(0)) * unsafe.Sizeof(uintptr(0))
	pid := int(*(*int32)(unsafe.Add(unsafe.Pointer(&info), at)))
	if pid <= 0 || known(pid) {
		return false
	}
	_, err := unix.Wait4(pid, nil, unix.WNOHANG, nil)
	return err == nil
}

// Children lists the living children of a process. It needs a kernel with
// CONFIG_PROC_CHILDREN, as all distributions have; without it the list is empty.
func Children(pid int) []ID {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil
	}
	var out []ID
	for _, t := range tasks {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, t.Name()))
		if err != nil {
			continue
		}
		for f := range strings.FieldsSeq(string(b)) {
			child, err := strconv.Atoi(f)
			if err != nil {
				continue
			}
			if id, ok := living(child); ok {
				out = append(out, id)
			}
		}
	}
	return out
}
