package svc

import "net/netip"

// OwnPod is what a node has found out about one of its Pods by probes, whether or not a server
// has been told.
type OwnPod struct {
	// Ready is the Pod's condition Ready.
	Ready bool
	// IPs are the Pod's addresses; none if they are not known yet.
	IPs []netip.Addr
}
