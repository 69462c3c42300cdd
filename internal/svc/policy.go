package svc

// TrafficPolicy is which endpoints a frontend may use.
type TrafficPolicy uint8

// Cluster: every endpoint. Local: only endpoints of the node the packet is on
// (behaviour 102).
const (
	PolicyCluster TrafficPolicy = iota
	PolicyLocal
)

// String returns "Cluster" or "Local", the spelling of the Kubernetes API.
func (p TrafficPolicy) String() string {
	if p == PolicyLocal {
		return "Local"
	}
	return "Cluster"
}
