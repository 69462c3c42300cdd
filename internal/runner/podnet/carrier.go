package podnet

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/fairlead/fairlead/internal/kernel/link"
)

// carrier is the target that carries packets to the peers of a plan, by VXLAN or by WireGuard. Its write sets
// plan.carried, to the routes of the last good write after an error.
type carrier interface {
	target
	// MTU is that of new Pods, 0 for the default. It is safe for concurrent use.
	MTU() int
	// unreachable are the routes that keep packets without a route to a peer, as when the device is gone, from
	// leaving in plain text.
	unreachable() []link.Route
}

// carried is what both carriers remember.
type carried struct {
	cluster []netip.Prefix
	routes  []link.Route // of the last good write
	mtu     atomic.Int64
}

// MTU implements carrier.
func (c *carried) MTU() int { return int(c.mtu.Load()) }

// pods are the ranges of Pods of the cluster and of this node.
func (c *carried) pods(p *plan) []netip.Prefix {
	return append(slices.Clone(c.cluster), p.own.cidrs...)
}

// overlay carries packets by VXLAN.
type overlay struct {
	carried
	kernel *link.Overlay
}

func newOverlay(o Options) *overlay {
	return &overlay{carried: carried{cluster: o.ClusterCIDRs}, kernel: link.NewOverlay(o.Overlay)}
}

func (v *overlay) forget()                   { v.kernel.Forget() }
func (v *overlay) close() error              { return v.kernel.Close() }
func (v *overlay) unreachable() []link.Route { return nil }

func (v *overlay) write(p *plan) error {
	routes, err := v.kernel.Set(p.peers, p.own.ips, p.gateways, v.pods(p))
	v.mtu.Store(int64(v.kernel.MTU()))
	if err == nil {
		v.routes = routes
	} else {
		err = fmt.Errorf("set up the overlay to nodes on other networks: %w", err)
	}
	p.carried = v.routes
	return err
}

// encryption carries packets by WireGuard to peers with a key.
type encryption struct {
	carried
	kernel *link.WireGuard
	// overlay carries packets to peers without a key, where these are reached. Else it removes that of an agent that did not encrypt.
	overlay *link.Overlay
	plain   bool   // nodes without a key are reached
	paths   *paths // how
}

func newEncryption(o Options, p *paths) *encryption {
	return &encryption{
		carried: carried{cluster: o.ClusterCIDRs}, kernel: o.WireGuard, overlay: link.NewOverlay(o.Overlay),
		plain: o.Plain, paths: p,
	}
}

func (e *encryption) forget() {
	e.overlay.Forget()
	e.kernel.Forget()
}

func (e *encryption) close() error { return errors.Join(e.overlay.Close(), e.kernel.Close()) }

func (e *encryption) unreachable() (routes []link.Route) {
	if e.plain && e.paths.mode == None {
		return nil // the network itself leads to nodes without a key
	}
	for _, c := range e.cluster {
		routes = append(routes, link.Route{Dst: c})
	}
	return routes
}

func (e *encryption) write(p *plan) error {
	withKey, without := e.split(p.peers)
	plain, err := e.overlay.Set(without, p.own.ips, p.gateways, e.pods(p))
	routes, encryptErr := e.kernel.Set(withKey, p.own.ips, p.gateways, e.pods(p))
	mtu := e.kernel.MTU()
	if other := e.overlay.MTU(); other != 0 && other < mtu {
		mtu = other
	}
	e.mtu.Store(int64(mtu))
	if encryptErr != nil {
		err = errors.Join(err, fmt.Errorf("encrypt packets to other nodes' pods: %w", encryptErr))
	} else {
		e.routes = slices.Concat(routes, plain, e.unreachable())
	}
	p.carried = e.routes
	return err
}

// split divides the peers between WireGuard and the overlay. A peer with a key that is reached by the overlay without it is one of
// the overlay as well, without Pods: until it knows this node's key, it sends by the overlay.
func (e *encryption) split(peers []link.Peer) (withKey, without []link.Peer) {
	for _, p := range peers {
		switch {
		case p.Key == (link.Key{}):
			without = append(without, p)
		case e.plain && e.paths.overlays(p.Addr):
			without = append(without, link.Peer{Addr: p.Addr})
			fallthrough
		default:
			withKey = append(withKey, p)
		}
	}
	return withKey, without
}
