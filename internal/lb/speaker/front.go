package speaker

import (
	"context"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// Front serves the Services of the proxied way on this node.
type Front interface {
	// SetService records a Service of type LoadBalancer, of either way.
	SetService(*corev1.Service)
	// DropService records that a Service is deleted, or is no load balancer.
	DropService(svc.Name)
	// SetMesh records that routes name Services as their parents.
	SetMesh()
	// NoMesh returns why this node does not serve these, "" if it does.
	NoMesh() string
	// SetClaim records which Services have an address, none if it is not claimed.
	SetClaim(netip.Addr, []svc.Name)
	// SetNode records the Node of this machine, nil if it is deleted.
	SetNode(*corev1.Node)
	// Listed is called when all of the above have been listed, perhaps more than once.
	Listed()
	// Serves reports whether a Service takes the proxied way, and Ready whether that way lets its addresses be announced.
	Serves(svc.Name) bool
	Ready(svc.Name) bool
	// Absent returns the endpoints that get no new clients of the proxied way. The list does not change.
	Absent() []v1.AbsentEndpoint
	// Gateways returns the Gateways that this node serves, nil before it knows which there are.
	Gateways() *v1.ServedGateways
	// Run serves until ctx ends.
	Run(ctx context.Context)
}

// forwarding is what this node forwards.
type forwarding struct {
	front Front
	// programmed is Options.Programmed.
	programmed func(id svc.PortName, family svc.Family, addr netip.Addr) bool
}

// has reports whether the node forwards connections to an address, as far as the speaker can know.
func (f *forwarding) has(a *address) bool {
	return f.ready(a) && (f.assumed(a) || slices.ContainsFunc(a.ports, func(p svc.PortName) bool { return f.port(p, a.addr) }))
}

// hasAll reports whether it does so for every port of the address's Services.
func (f *forwarding) hasAll(a *address) bool {
	return f.ready(a) && (f.assumed(a) || !slices.ContainsFunc(a.ports, func(p svc.PortName) bool { return !f.port(p, a.addr) }))
}

// ready reports whether the proxied way lets an address be announced.
func (f *forwarding) ready(a *address) bool {
	return !slices.ContainsFunc(a.services, func(n svc.Name) bool { return !f.front.Ready(n) })
}

// assumed reports whether the speaker cannot ask the proxy for an address, or need not.
func (f *forwarding) assumed(a *address) bool {
	return f.programmed == nil || slices.ContainsFunc(a.services, f.front.Serves)
}

func (f *forwarding) port(p svc.PortName, addr netip.Addr) bool {
	return f.programmed(p, svc.FamilyOf(addr), addr)
}
