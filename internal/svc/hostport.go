package svc

import "net/netip"

// HostPorts are the ports of a node that lead to one of its Pods.
type HostPorts struct {
	Pod Name
	// UID is that of the Pod.
	UID string
	// IPs are the Pod's addresses, one a family at most.
	IPs   []netip.Addr
	Ports []HostPort
}

// HostPort is one port of a container with hostPort.
type HostPort struct {
	Protocol Protocol
	// HostIP is the Pod's hostIP as written: the one address of the node that answers. Empty is
	// every address; 0.0.0.0 and :: are every one of their family.
	HostIP string
	// Port is the node's, To the container's.
	Port, To uint16
}
