package link

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"

	wire "github.com/fairlead/fairlead/internal/kernel/netlink"
)

// WatchAddresses calls changed whenever an interface gets or loses an address, or
// may have, in the network namespace of the calling thread, until stop is called.
// changed is called from one goroutine, which has ended when stop returns.
func WatchAddresses(changed func()) (stop func(), err error) {
	sub, err := wire.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return nil, err
	}
	var ended sync.WaitGroup
	ended.Go(func() {
		for {
			// After dropped messages nobody knows what has changed.
			if err := sub.Receive(func(uint16, []byte) {}); err != nil && !errors.Is(err, unix.ENOBUFS) {
				return
			}
			changed()
		}
	})
	return func() {
		_ = sub.Close()
		ended.Wait()
	}, nil
}
