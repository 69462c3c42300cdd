package runner

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/svc"
)

// PodNetwork is how packets get to pods of other nodes.
type PodNetwork string

// PodNetworkAuto leads to neighbours directly and to other nodes by VXLAN (what Calico calls
// CrossSubnet), PodNetworkHostGateway to all directly, PodNetworkVXLAN to all by VXLAN.
// PodNetworkNone leaves it to the network.
const (
	PodNetworkAuto        PodNetwork = "auto"
	PodNetworkHostGateway PodNetwork = "hostgw"
	PodNetworkVXLAN       PodNetwork = "vxlan"
	PodNetworkNone        PodNetwork = "none"
)

// PodNetworks are the values of PodNetwork.
func PodNetworks() []string {
	return []string{
		string(PodNetworkAuto), string(PodNetworkHostGateway), string(PodNetworkVXLAN), string(PodNetworkNone),
	}
}

// PublicKey is this node's value of svc.PublicKeyAnnotation, "" if it does not encrypt.
func (r *Runner) PublicKey() string {
	if r.o.WireGuard == nil {
		return ""
	}
	return r.o.WireGuard.PublicKey().String()
}

// paths decides how each other node is reached. What it found out of the machine's routes
// is kept until forget.
type paths struct {
	mode       PodNetwork
	encrypt    bool // all by WireGuard, whatever mode is
	neighbours map[netip.Addr]bool
}

func (p *paths) forget() { p.neighbours = map[netip.Addr]bool{} }

// neighbour reports whether no router is between this node and another. It fails if
// there is no route at all.
func (p *paths) neighbour(node netip.Addr) (bool, error) {
	if known, ok := p.neighbours[node]; ok {
		return known, nil
	}
	is, err := link.Neighbour(node)
	if err != nil {
		return false, err
	}
	p.neighbours[node] = is
	return is, nil
}

// way is how the pods of a node are reached: by a route to it, or by an overlay.
func (p *paths) way(own, other nodeFacts, pods netip.Prefix) (via, overlay netip.Addr, err error) {
	i := slices.IndexFunc(other.ips, func(a netip.Addr) bool { return a.Is4() == pods.Addr().Is4() })
	switch {
	case p.encrypt:
		if other.key == (link.Key{}) {
			return via, overlay, fmt.Errorf("it has no public key of WireGuard, and nothing is sent to its pods: start its agent with --encrypt "+
				"(annotation %s)", svc.PublicKeyAnnotation)
		}
	case p.mode == PodNetworkNone || i < 0 && p.mode != PodNetworkVXLAN:
		return via, overlay, nil
	case p.mode == PodNetworkAuto:
		direct, err := p.neighbour(other.ips[i])
		if direct || err != nil {
			return other.ips[i], overlay, err
		}
	case p.mode != PodNetworkVXLAN:
		return other.ips[i], overlay, nil
	}
	for _, is4 := range []bool{true, false} {
		family := func(a netip.Addr) bool { return a.Is4() == is4 }
		if at := slices.IndexFunc(other.ips, family); at >= 0 && slices.ContainsFunc(own.ips, family) {
			_, err := p.neighbour(other.ips[at])
			return via, other.ips[at], err
		}
	}
	return via, overlay, errors.New("this node and that one have no InternalIP of the same family")
}

// carry has WireGuard or VXLAN carry packets to the pods of peers, and returns the routes
// for that.
func (n *network) carry(own nodeFacts, peers []link.Peer) (routes []link.Route, err error) {
	gateways, pods := n.r.ipam.gateways(), append(slices.Clone(n.r.o.ClusterCIDRs), own.cidrs...)
	wg := n.r.o.WireGuard
	if wg == nil {
		if routes, err = n.overlay.Set(peers, own.ips, gateways, pods); err != nil {
			err = fmt.Errorf("pods of nodes on other networks: %w", err)
		}
		n.mtu.Store(int64(n.overlay.MTU()))
		return routes, err
	}
	_, old := n.overlay.Set(nil, own.ips, gateways, pods) // of an agent that did not encrypt
	if routes, err = wg.Set(peers, own.ips, gateways, pods); err != nil {
		err = fmt.Errorf("encryption of what goes to other nodes' pods: %w", err)
	}
	n.mtu.Store(int64(wg.MTU()))
	return append(routes, n.unreachable()...), errors.Join(old, err)
}

// unreachable are the routes by which what has none to a peer, as when the device is gone, does
// not leave in plain text.
func (n *network) unreachable() (routes []link.Route) {
	for _, c := range n.r.o.ClusterCIDRs {
		routes = append(routes, link.Route{Dst: c})
	}
	return routes
}

// failClosed keeps what pods send to those of other nodes from leaving in plain text before
// the nodes are known.
func (n *network) failClosed() error {
	if n.r.o.WireGuard == nil {
		return nil
	}
	return n.routes.Add(n.unreachable())
}
