package table

import (
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/svc"
)

// apiService is the Service whose endpoints are the API servers.
var apiService = svc.Name{Namespace: "default", Name: "kubernetes"}

// reserver is who answers at an address and port where no other Service may have an
// external or load balancer IP: nodes would send to that Service what they, or the
// API server, need to go on (CVE-2020-8554). All other ports of a node's address are
// free: many clusters have their nodes' addresses as external or load balancer IPs.
type reserver int

const (
	reservedAPI    reserver = iota // the endpoints of apiService
	reservedServer                 // where this node reaches its API server
	reservedAgent                  // where the API server reaches this node, for logs and exec
	reservedPeers                  // where the etcd of a server on this machine may answer others
	reservers
)

// String completes "ADDRESS is …".
func (r reserver) String() string {
	return [...]string{"where an API server answers", "where this node reaches its API server",
		"where this node's agent answers", "where the etcd of this machine's API server answers its peers"}[r]
}

// reserved is what each reserver has.
type reserved [reservers][]svc.Frontend

// by returns who has at.
func (r *reserved) by(at svc.Frontend) (reserver, bool) {
	for who := range reservers {
		if slices.Contains(r[who], at) {
			return who, true
		}
	}
	return 0, false
}

// reserve takes over what who has now, and touches the Services that want what it
// has gained or left.
func (b *Builder) reserve(who reserver, now []svc.Frontend) {
	before := b.node.reserved[who]
	if slices.Equal(before, now) {
		return
	}
	b.node.reserved[who] = now
	b.touchHosts()
	for _, at := range before {
		if !slices.Contains(now, at) {
			b.touchClaimants(at, nil)
		}
	}
	for _, at := range now {
		if !slices.Contains(before, at) {
			b.touchClaimants(at, nil)
		}
	}
}

// endpointsOf returns where the endpoints of s answer.
func endpointsOf(s *service) (out []svc.Frontend) {
	for _, slice := range s.slices {
		for _, p := range slice.ports {
			for _, ep := range slice.endpoints {
				out = append(out, svc.Frontend{Protocol: p.proto, Addr: netip.AddrPortFrom(ep.addr, p.number)})
			}
		}
	}
	return out
}

// SetServers tells where this node reaches its API server, which may be a load
// balancer before the API servers. No Service gets an external or load balancer IP
// there.
func (b *Builder) SetServers(addrs []netip.AddrPort) {
	var at []svc.Frontend
	for _, a := range addrs {
		at = append(at, svc.Frontend{Protocol: svc.TCP, Addr: netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())})
	}
	b.reserve(reservedServer, at)
}
