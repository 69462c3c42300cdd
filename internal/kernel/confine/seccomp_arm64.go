package confine

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_AARCH64

// deniedHere are calls that only this architecture has.
var deniedHere = map[int][]uint32{}
