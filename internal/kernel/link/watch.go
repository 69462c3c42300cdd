package link

import "golang.org/x/sys/unix"

// WatchAddresses calls changed whenever an interface gets or loses an address, or
// may have, in the network namespace of the calling thread, until stop is called.
// changed is called from one goroutine, which has ended when stop returns.
func WatchAddresses(changed func()) (stop func(), err error) {
	return watch(changed, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
}
