package proxied

import "syscall"

// errReset is how a connection ends of which bytes were not read.
const errReset = syscall.ECONNRESET
