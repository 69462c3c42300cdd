package podnet

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/svc"
)

// paths decides how each other node is reached. What it found out of the machine's routes
// is kept until forget.
type paths struct {
	mode       Mode
	encrypt    bool // by WireGuard, whatever mode is
	plain      bool // nodes without a key are reached as mode has it
	neighbours map[netip.Addr]bool
}

func newPaths(o Options) *paths {
	return &paths{mode: o.Mode, encrypt: o.WireGuard != nil, plain: o.Plain, neighbours: map[netip.Addr]bool{}}
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

// overlays reports whether packets to a node without a key go by the overlay.
func (p *paths) overlays(node netip.Addr) bool {
	if p.mode == Auto {
		direct, err := p.neighbour(node)
		return !direct && err == nil
	}
	return p.mode == VXLAN
}

// way is how the pods of a node are reached: by a route to it, or by an overlay.
func (p *paths) way(own, other nodeFacts, pods netip.Prefix) (via, overlay netip.Addr, err error) {
	i := slices.IndexFunc(other.ips, func(a netip.Addr) bool { return a.Is4() == pods.Addr().Is4() })
	switch hasKey := other.key != (link.Key{}); {
	case p.encrypt && hasKey:
	case p.encrypt && !p.plain:
		return via, overlay, fmt.Errorf("it has no public key of WireGuard, and nothing is sent to its pods: start its agent with --encrypt "+
			"(annotation %s)", svc.PublicKeyAnnotation)
	case p.mode == None || i < 0 && p.mode != VXLAN:
		return via, overlay, nil
	case p.mode == Auto:
		direct, err := p.neighbour(other.ips[i])
		if direct || err != nil {
			return other.ips[i], overlay, err
		}
	case p.mode != VXLAN:
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
