package confine

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_X86_64

// deniedHere are calls that only this architecture has.
var deniedHere = map[int][]uint32{
	-1: {
		unix.SYS_CREATE_MODULE, unix.SYS_GET_KERNEL_SYMS, unix.SYS_QUERY_MODULE, unix.SYS_USELIB, unix.SYS_USTAT, unix.SYS_SYSFS,
		unix.SYS__SYSCTL, unix.SYS_AFS_SYSCALL, unix.SYS_TUXCALL, unix.SYS_SECURITY, unix.SYS_VSERVER, unix.SYS_GETPMSG, unix.SYS_PUTPMSG,
		unix.SYS_EPOLL_CTL_OLD, unix.SYS_EPOLL_WAIT_OLD,
	},
	17: {unix.SYS_IOPL, unix.SYS_IOPERM}, // CAP_SYS_RAWIO
}
