// Package confine takes rights from the process that calls it: user and groups,
// capabilities (capabilities(7)), new privileges, and system calls (seccomp(2)). What is
// taken stays taken, also from the program that it becomes.
package confine

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Spec is what a program is to run as.
type Spec struct {
	UID    uint32   `json:"uid"`
	GID    uint32   `json:"gid"`
	Groups []uint32 `json:"groups,omitempty"`
	// KeepGroups leaves the supplementary groups: in a user namespace without the right
	// to set them.
	KeepGroups bool `json:"keepGroups,omitempty"`
	// Bounding are the capabilities that the program can ever have, and has as user 0.
	// AllCapabilities leaves all.
	Bounding        []int `json:"bounding,omitempty"`
	AllCapabilities bool  `json:"allCapabilities,omitempty"`
	// Ambient are those, of Bounding, that it has as another user.
	Ambient []int `json:"ambient,omitempty"`
	// NoNewPrivs keeps programs from getting more by the setuid bit or file
	// capabilities.
	NoNewPrivs bool `json:"noNewPrivs,omitempty"`
	// Seccomp only allows the system calls of Filter.
	Seccomp bool `json:"seccomp,omitempty"`
	// Pdeathsig is the signal that comes when the parent's thread ends, 0 for none.
	Pdeathsig int `json:"pdeathsig,omitempty"`
}

// Exec confines the calling thread and turns the process into path. It needs the
// rights of root in its user namespace, and returns only an error.
func Exec(s Spec, path string, args, env []string) error {
	runtime.LockOSThread() // the others end with execve
	if err := s.enter(); err != nil {
		return err
	}
	return unix.Exec(path, args, env)
}

func (s Spec) enter() error {
	if !s.AllCapabilities {
		if err := bound(s.Bounding); err != nil {
			return err
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	if s.Seccomp { // before the capability goes that it needs without NoNewPrivs
		if err := installFilter(Filter(s.Bounding)); err != nil {
			return fmt.Errorf("install the filter of system calls: %w", err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("keep capabilities: %w", err)
	}
	if err := s.identity(); err != nil {
		return err
	}
	if err := s.capabilities(); err != nil {
		return err
	}
	if s.NoNewPrivs {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("set no_new_privs: %w", err)
		}
	}
	// Changed credentials have cleared it.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(s.Pdeathsig), 0, 0, 0); err != nil {
		return fmt.Errorf("set the parent-death signal: %w", err)
	}
	return nil
}

// identity sets groups and user of this thread only: package syscall would do it for
// all threads, some of which have gone on to other things.
func (s Spec) identity() error {
	if !s.KeepGroups {
		var list *uint32
		if len(s.Groups) > 0 {
			list = &s.Groups[0]
		}
		if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(s.Groups)), uintptr(unsafe.Pointer(list)), 0); e != 0 {
			return fmt.Errorf("set supplementary groups %v: %w", s.Groups, e)
		}
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(s.GID), uintptr(s.GID), uintptr(s.GID)); e != 0 {
		return fmt.Errorf("set group %d: %w", s.GID, e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(s.UID), uintptr(s.UID), uintptr(s.UID)); e != 0 {
		return fmt.Errorf("set user %d: %w", s.UID, e)
	}
	return nil
}

// capabilities sets the sets of this thread.
func (s Spec) capabilities() error {
	if s.AllCapabilities && s.UID == 0 {
		return nil // execve gives them
	}
	permitted := s.Bounding
	if s.UID != 0 {
		permitted = s.Ambient
	}
	var data [2]unix.CapUserData
	for _, c := range permitted {
		data[c/32].Permitted |= 1 << (c % 32)
		data[c/32].Effective |= 1 << (c % 32)
		if s.UID != 0 {
			data[c/32].Inheritable |= 1 << (c % 32)
		}
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := unix.Capset(&head, &data[0]); err != nil {
		return fmt.Errorf("set capabilities: %w", err)
	}
	if s.UID == 0 {
		return nil
	}
	for _, c := range permitted {
		if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, uintptr(c), 0, 0); err != nil {
			return fmt.Errorf("raise %s: %w", CapabilityName(c), err)
		}
	}
	return nil
}

// bound drops all capabilities but keep from the bounding set.
func bound(keep []int) error {
	kept := map[int]bool{}
	for _, c := range keep {
		kept[c] = true
	}
	for c := range 64 {
		if kept[c] {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0)
		if err == unix.EINVAL { //nolint:errorlint // the kernel's last one was the one before
			return nil
		}
		if err != nil {
			return fmt.Errorf("drop %s: %w", CapabilityName(c), err)
		}
	}
	return nil
}

// OneUser reports whether the caller's user namespace has a single user, or few: there
// are none to give to others.
func OneUser() bool {
	sum := uint64(0)
	for _, m := range maps("uid") {
		sum += m.size
	}
	return sum > 0 && sum < 1<<17
}

// Mapped reports whether the caller's user namespace has all users and groups from first
// to last, as one of Linux's maps.
func Mapped(first, last uint32) bool {
	for _, kind := range []string{"uid", "gid"} {
		all := maps(kind)
		if len(all) > 0 && !slices.ContainsFunc(all, func(m idMap) bool { return m.first <= uint64(first) && uint64(last) < m.first+m.size }) {
			return false
		}
	}
	return true
}

type idMap struct{ first, size uint64 }

// maps are the maps of the caller's user namespace (user_namespaces(7)), none if they
// cannot be read.
func maps(kind string) []idMap {
	b, err := os.ReadFile("/proc/self/" + kind + "_map")
	if err != nil {
		return nil
	}
	var out []idMap
	for line := range strings.Lines(string(b)) {
		var m idMap
		var outside uint64
		if _, err := fmt.Sscan(line, &m.first, &outside, &m.size); err == nil {
			out = append(out, m)
		}
	}
	return out
}
