package dialect

import "net/netip"

// Annotations of Services of type LoadBalancer.
const (
	// LBAddresses asks for addresses, comma separated, at most one of each family.
	LBAddresses = lbPrefix + "addresses"
	// LBPool names the IPAddressPool of the Service's addresses.
	LBPool = lbPrefix + "pool"
	// LBSharingKey lets Services with an equal one share an address.
	LBSharingKey = lbPrefix + "sharing-key"
	// LBInternal, "true", asks for an address of an internal pool.
	LBInternal = lbPrefix + "internal"
)

// LoadBalancer is what a Service asks about its address.
type LoadBalancer struct {
	// Addresses are the addresses that it asks for, at most one of each family.
	Addresses []netip.Addr `json:"addresses,omitempty"`
	// Pool is the name of its pool, and SharingKey what it shares an address by; empty
	// for none.
	Pool       string `json:"pool,omitempty"`
	SharingKey string `json:"sharingKey,omitempty"`
	// Internal asks for an internal load balancer.
	Internal bool `json:"internal"`
}
