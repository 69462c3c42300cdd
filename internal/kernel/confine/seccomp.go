package confine

import (
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The offsets in struct seccomp_data (seccomp(2)). Arguments are little-endian on all
// machines that Go has Linux and this filter for.
const (
	dataNr   = 0
	dataArch = 4
	dataArg0 = 16
)

// newNamespaces are the flags of clone(2) and unshare(2) that make namespaces.
const newNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID |
	unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP

// afVsock are sockets to the hypervisor.
const afVsock = 40

// denied are the system calls that the default profile of containerd and Docker
// denies, by the capability that allows them; -1 for none.
func denied() map[int][]uint32 {
	const none = -1
	calls := map[int][]uint32{
		none: {
			unix.SYS_ADD_KEY, unix.SYS_KEYCTL, unix.SYS_REQUEST_KEY, unix.SYS_USERFAULTFD, unix.SYS_NFSSERVCTL, unix.SYS_MOVE_PAGES,
			unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER,
		},
		capSysAdmin: {
			unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_SETNS, unix.SYS_UNSHARE, unix.SYS_QUOTACTL, unix.SYS_QUOTACTL_FD,
			unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_OPEN_TREE, unix.SYS_MOVE_MOUNT,
			unix.SYS_MOUNT_SETATTR, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_LOOKUP_DCOOKIE, unix.SYS_FANOTIFY_INIT,
			unix.SYS_SETHOSTNAME, unix.SYS_SETDOMAINNAME,
		},
		capSysModule:     {unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE},
		capSysBoot:       {unix.SYS_REBOOT, unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD},
		capSysPacct:      {unix.SYS_ACCT},
		capSysTime:       {unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_CLOCK_ADJTIME},
		capSyslog:        {unix.SYS_SYSLOG},
		capBPF:           {unix.SYS_BPF},
		capPerfmon:       {unix.SYS_PERF_EVENT_OPEN},
		capSysPtrace:     {unix.SYS_KCMP},
		capSysNice:       {unix.SYS_SET_MEMPOLICY, unix.SYS_MBIND, unix.SYS_MIGRATE_PAGES},
		capDacReadSearch: {unix.SYS_OPEN_BY_HANDLE_AT},
		capSysChroot:     {unix.SYS_CHROOT},
		capSysTTYConfig:  {unix.SYS_VHANGUP},
	}
	for capability, more := range deniedHere {
		calls[capability] = append(calls[capability], more...)
	}
	return calls
}

// Capabilities that allow system calls.
const (
	capDacReadSearch = 2
	capSysModule     = 16
	capSysChroot     = 18
	capSysPtrace     = 19
	capSysPacct      = 20
	capSysAdmin      = 21
	capSysBoot       = 22
	capSysNice       = 23
	capSysTime       = 25
	capSysTTYConfig  = 26
	capSyslog        = 34
	capPerfmon       = 38
	capBPF           = 39
)

// Filter returns the program that denies (EPERM) what the default profile of container
// runtimes denies to who has the capabilities have at most, and does not know (ENOSYS)
// calls newer than itself and clone3, whose flags a filter cannot read: the C libraries
// fall back to clone.
func Filter(have []int) []unix.SockFilter {
	const (
		load  = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		least = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
		set   = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		ret   = unix.BPF_RET | unix.BPF_K
		eperm = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
		enos  = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	)
	var p []unix.SockFilter
	add := func(code uint16, k uint32, jt, jf uint8) {
		p = append(p, unix.SockFilter{Code: code, Jt: jt, Jf: jf, K: k})
	}
	// when returns answer if the comparison with the accumulator holds.
	when := func(code uint16, k, answer uint32) {
		add(code, k, 0, 1)
		add(ret, answer, 0, 0)
	}
	add(load, dataArch, 0, 0)
	add(equal, auditArch, 1, 0)
	add(ret, eperm, 0, 0)
	add(load, dataNr, 0, 0)
	when(least, lastCall+1, enos) // x32's numbers, too
	when(equal, unix.SYS_CLONE3, enos)
	for capability, calls := range denied() {
		if slices.Contains(have, capability) {
			continue
		}
		for _, nr := range calls {
			when(equal, nr, eperm)
		}
	}
	if !slices.Contains(have, capSysAdmin) {
		add(equal, unix.SYS_CLONE, 0, 4)
		add(load, dataArg0, 0, 0)
		when(set, newNamespaces, eperm)
		add(load, dataNr, 0, 0)
	}
	add(equal, unix.SYS_SOCKET, 0, 4)
	add(load, dataArg0, 0, 0)
	when(equal, afVsock, eperm)
	add(load, dataNr, 0, 0)
	// personality(2): what it is, Linux, 32 bits, UNAME26, and both.
	add(equal, unix.SYS_PERSONALITY, 0, 7)
	add(load, dataArg0, 0, 0)
	add(equal, 0, 5, 0)
	add(equal, 0x8, 4, 0)
	add(equal, 0x20000, 3, 0)
	add(equal, 0x20008, 2, 0)
	add(equal, 0xffffffff, 1, 0)
	add(ret, eperm, 0, 0)
	add(ret, unix.SECCOMP_RET_ALLOW, 0, 0)
	return p
}

// lastCall is the newest call that the profile was made for, lsm_list_modules of Linux
// 6.8: from 424 on all architectures have the same numbers.
const lastCall = 461

// installFilter puts the calling thread under a filter.
func installFilter(p []unix.SockFilter) error {
	prog := unix.SockFprog{Len: uint16(len(p)), Filter: &p[0]}
	_, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(p)
	if e != 0 {
		return e
	}
	return nil
}
