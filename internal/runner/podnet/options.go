// Package podnet is the node's side of the network of its Pods: their addresses, the routes to Pods of other
// nodes, masquerading, an overlay or encryption, and host ports.
//
// A Network keeps the kernel in line with the Node objects. What it writes is split into targets (see target),
// each of which compares a plan with what it has written. The loop is that of package dataplane without its
// Reconciler, which plans the frontends of Services.
package podnet

import (
	"log/slog"
	"net/netip"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/kernel/link"
)

// Mode is how packets get to Pods of other nodes.
type Mode string

// Auto leads to neighbours directly and to other nodes by VXLAN (what Calico calls CrossSubnet), HostGateway to
// all directly, VXLAN to all by VXLAN. None leaves it to the network.
const (
	Auto        Mode = "auto"
	HostGateway Mode = "hostgw"
	VXLAN       Mode = "vxlan"
	None        Mode = "none"
)

// Modes are the values of Mode.
func Modes() []string {
	return []string{string(Auto), string(HostGateway), string(VXLAN), string(None)}
}

// Options configure a Network.
type Options struct {
	NodeName string
	// StateDir keeps the last addresses of each range, and the node's ranges.
	StateDir string
	// Device holds the node's own addresses among its Pods.
	Device string
	// ClusterCIDRs are the ranges of all Pods, ServiceCIDRs the ranges of ClusterIPs, ServerAddrs the addresses of the API
	// server: a Node whose range lies outside the first, or meets one of the others, gets no routes.
	ClusterCIDRs, ServiceCIDRs []netip.Prefix
	ServerAddrs                []netip.Addr
	Mode                       Mode
	Overlay                    link.OverlayOptions
	// WireGuard encrypts all traffic to Pods of other nodes, in place of Mode; nil disables encryption. Run closes it.
	WireGuard *link.WireGuard
	// Plain has Pods of nodes without a key reached as Mode has it. Without it nothing is sent to them.
	Plain bool
	// Early lets Pods have addresses of the node's last ranges before its Node is known.
	Early  bool
	Events *events.Recorder
	// Usable is called when Pods can be connected, and after each change of the node's ranges. Changed is called
	// when Healthy or a condition may have changed. Neither may block.
	Usable, Changed func()
	Log             *slog.Logger
}
