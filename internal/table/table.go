// Package table turns the API's objects into the Table of one node: for every
// frontend of every Service, the endpoints a packet may go to. Traffic policy,
// topology, readiness, the fallback to terminating endpoints and session
// affinity are decided here and nowhere else; a data plane only writes what
// is decided.
package table

import (
	"iter"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// Endpoint is one backend of a service port.
type Endpoint struct {
	// Addr is where the backend listens.
	Addr netip.AddrPort
	// Local reports that the backend runs on this node.
	Local bool
	// Weight is its share of new connections, compared with that of others; 0 is 1. Only
	// mode ipvs can do otherwise than evenly.
	Weight uint16
}

// FrontendKind is how traffic of a frontend enters and what it may need on
// the way.
type FrontendKind uint8

// The kinds of frontend.
const (
	// ClusterIP is the virtual IP that clients inside the cluster use.
	ClusterIP FrontendKind = iota
	// ExternalIP is one of spec.externalIPs (behaviour 156), or the hostIP of a Pod's port.
	ExternalIP
	// LoadBalancerIP is one of status.loadBalancer.ingress with ipMode VIP
	// (behaviour 97).
	LoadBalancerIP
	// NodePort is a port on the addresses of this node (behaviour 86), or a Pod's host port. Its Addr
	// has the unspecified address of the family: which addresses count is the
	// Table's NodePortAddrs.
	NodePort
)

// String returns the word Kubernetes uses for the kind.
func (k FrontendKind) String() string {
	return [...]string{"ClusterIP", "ExternalIP", "LoadBalancerIP", "NodePort"}[k]
}

// Frontend is one address of a service port with the endpoints decided for it.
type Frontend struct {
	Kind FrontendKind
	Addr netip.AddrPort
	// Endpoints a new connection may be sent to, sorted by address, already
	// narrowed by traffic policy, topology and readiness. Frontends of one
	// ServicePort may share the slice; it is never written to.
	Endpoints []Endpoint
	// LocalClients are the endpoints for clients on this node (the node itself
	// and Table.LocalCIDRs) where they differ: their traffic to an external address
	// of a Service with externalTrafficPolicy Local goes to any endpoint. Nil means
	// the same as Endpoints.
	LocalClients []Endpoint
	// Masquerade reports that the source address of a forwarded connection is
	// replaced by this node's, so that the reply comes back this way (behaviour 52).
	// It is not set for LocalClients.
	Masquerade bool
	// SourceRanges are the clients let in, sorted; nil lets everybody in, an
	// empty list no client (behaviour 101).
	SourceRanges []netip.Prefix
	// Drop reports that without endpoints packets are dropped rather than
	// rejected: the Service has endpoints elsewhere, but policy Local hides
	// them from this node.
	Drop bool
	// Hops are the nodes between which new flows of clients outside are divided, sorted by name, if the Service asks for
	// direct return. What another node gets is passed on to it as it is; Endpoints are the ones here, also for what another
	// node has passed on. Nil passes nothing on.
	Hops []Hop
}

// MaxEndpoints is how many endpoints one list of a Frontend can have.
const MaxEndpoints = 1<<16 - 1

// ServicePort is one port of one Service, for one address family.
type ServicePort struct {
	ID       svc.PortName
	Family   svc.Family
	Protocol svc.Protocol
	// Frontends are sorted by kind, then address.
	Frontends []Frontend
	// Serving are all endpoints that serve, sorted by address: the endpoints that a flow of
	// UDP or SCTP may keep. New ones go to fewer of them, as policy, topology and
	// termination have it; an endpoint that is only not preferred any more loses no
	// flow by that (as with kube-proxy since v1.32). It may be a Frontend's slice,
	// and is nil for TCP, whose connections stay by themselves.
	Serving []Endpoint
	// Affinity is how long a client sticks to its endpoint after its last
	// connection; 0 is no affinity (behaviours 61, 62).
	Affinity time.Duration
	// Scheduler is how the Service wants endpoints to be chosen, by its name in
	// IPVS; empty leaves it to the mode, and only mode ipvs can do otherwise.
	Scheduler string
	// HealthCheckNodePort is the port on which this node answers for its local
	// endpoints, 0 if none (behaviour 103); LocalReady is how many it has.
	HealthCheckNodePort uint16
	LocalReady          int
}

// Key identifies a ServicePort in a Table.
type Key struct {
	ID     svc.PortName
	Family svc.Family
}

// Key returns the port's key.
func (p *ServicePort) Key() Key { return Key{ID: p.ID, Family: p.Family} }

// Table is what one node must do, immutable once built.
type Table struct {
	// NodePortAddrs are the addresses of this node on which node ports answer,
	// in address order.
	NodePortAddrs []netip.Addr
	// Loopback reports whether a frontend has an address of 127.0.0.0/8. Only clients of this node
	// may reach it.
	Loopback bool
	// ClusterCIDRs are the ranges pods have. With them set, traffic to a
	// ClusterIP from outside of them is masqueraded.
	ClusterCIDRs []netip.Prefix
	// LocalCIDRs are the ranges this node's own pods have: the clients, besides the
	// node itself, that Frontend.LocalClients is for.
	LocalCIDRs []netip.Prefix
	// PodInterfaces are the interfaces that traffic of this node's own Pods comes from. Such traffic counts as both
	// of ClusterCIDRs and of LocalCIDRs.
	PodInterfaces []Interface
	// MasqueradeAll asks to masquerade all traffic to ClusterIPs.
	MasqueradeAll bool
	// ServiceCIDRs are the ranges of ClusterIPs, sorted. What is sent to an address
	// there that no Service has is dropped instead of leaving this node.
	ServiceCIDRs []netip.Prefix
	// ForwardsDirectly reports whether a Service asks for direct return, also while none of its frontends has Hops.
	ForwardsDirectly bool

	ports shards
}

// Get returns the service port with key k, or nil. The caller does not change
// it.
func (t *Table) Get(k Key) *ServicePort { return t.ports.get(k) }

// Len is the number of service ports.
func (t *Table) Len() int { return t.ports.len() }

// All yields every service port in no particular order.
func (t *Table) All() iter.Seq[*ServicePort] { return t.ports.all() }

// Destinations returns where clients send to f: a node port answers on several
// addresses of the node. They are named one by one, since packets to the
// same port of a foreign address may pass through this machine.
func (t *Table) Destinations(f *Frontend) []netip.AddrPort {
	if f.Kind != NodePort {
		return []netip.AddrPort{f.Addr}
	}
	var out []netip.AddrPort
	for _, a := range t.NodePortAddrs {
		if a.Is4() == f.Addr.Addr().Is4() {
			out = append(out, netip.AddrPortFrom(a, f.Addr.Port()))
		}
	}
	return out
}

// WithPortsFrom returns t with the ports that keys yields as they are in before (nil:
// not there at all).
func (t *Table) WithPortsFrom(before *Table, keys iter.Seq[Key]) *Table {
	next, edit := *t, t.ports.edit()
	for k := range keys {
		var p *ServicePort
		if before != nil {
			p = before.Get(k)
		}
		edit.set(k, p)
	}
	next.ports = edit.done()
	return &next
}

// New returns a Table of the given ports, for callers that need none of the
// Builder's bookkeeping.
func New(ports ...*ServicePort) *Table {
	t := &Table{}
	for _, p := range ports {
		t.ports = t.ports.with(p.Key(), p)
	}
	return t
}
