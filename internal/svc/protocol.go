package svc

import "fmt"

// Protocol is a transport protocol by its IANA number, so that it can be put
// into a packet match as it is.
type Protocol uint8

// The transports a Service port may have (behaviours 11, 170 to 174).
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// String returns "TCP", "UDP" or "SCTP", the spelling of the Kubernetes API.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	}
	return fmt.Sprintf("protocol(%d)", uint8(p))
}

// ParseProtocol reads the spelling of the Kubernetes API; empty means TCP
// (behaviour 11).
func ParseProtocol(s string) (Protocol, error) {
	switch s {
	case "", "TCP":
		return TCP, nil
	case "UDP":
		return UDP, nil
	case "SCTP":
		return SCTP, nil
	}
	return 0, fmt.Errorf("protocol %q is not one of TCP, UDP, SCTP", s)
}

// Family is an IP address family.
type Family uint8

// The two families, numbered as in the IP header.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// String returns "IPv4" or "IPv6", the spelling of the Kubernetes API.
func (f Family) String() string {
	if f == IPv6 {
		return "IPv6"
	}
	return "IPv4"
}
