package nftables

import (
	"time"

	"golang.org/x/sys/unix"
)

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1

// settleTime is how long Settle waits where the kernel does not do it (ENOSYS, or EINVAL with nohz_full).
const settleTime = 20 * time.Millisecond

// Settle waits until every packet that has passed a hook by the rules before the last Commit has also passed the hooks after it. A
// packet goes from the network device to its socket within one RCU read-side critical section, and membarrier(2) waits until all
// that have begun have ended: milliseconds. On a single processor it need not: no packet is on its way while a program runs.
func Settle() {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		time.Sleep(settleTime)
	}
}
