package testbed

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// WithoutSockDiag has the calling thread do without NETLINK_SOCK_DIAG, as on a kernel without CONFIG_INET_DIAG. The caller keeps the
// goroutine on the thread, and lets the thread end: nothing takes that back.
func WithoutSockDiag() error {
	const (
		load, equal, end = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
		number           = 0      // struct seccomp_data, seccomp(2)
		family, protocol = 16, 32 // its first and third argument
	)
	filter := []unix.SockFilter{
		{Code: load, K: number},
		{Code: equal, K: unix.SYS_SOCKET, Jf: 5},
		{Code: load, K: family},
		{Code: equal, K: unix.AF_NETLINK, Jf: 3},
		{Code: load, K: protocol},
		{Code: equal, K: unix.NETLINK_INET_DIAG, Jf: 1},
		{Code: end, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPROTONOSUPPORT)},
		{Code: end, K: unix.SECCOMP_RET_ALLOW},
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("testbed: PR_SET_NO_NEW_PRIVS: %w", err)
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if _, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog))); e != 0 {
		return fmt.Errorf("testbed: install a seccomp filter: %w", e)
	}
	return nil
}

// WithoutNetAdmin takes the capability CAP_NET_ADMIN from the calling thread, as WithoutSockDiag takes a protocol.
func WithoutNetAdmin() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("testbed: read capabilities: %w", err)
	}
	if data[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return errors.New("testbed: there is no CAP_NET_ADMIN to take away")
	}
	data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("testbed: set capabilities: %w", err)
	}
	return nil
}
