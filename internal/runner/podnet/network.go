package podnet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/loop"
)

// Network keeps the node's side of the Pods' network in line with the Node objects. Its methods are safe for
// concurrent use.
type Network struct {
	o         Options
	addresses *addresses
	wake      loop.Signal
	// tampered is set after another program has removed something, linked after an event before which routes may have
	// been lost, or after which what failed may work.
	tampered, linked loop.Signal
	ready            chan struct{} // closed when applied is first set
	routed           *routed

	mu     sync.Mutex
	own    nodeFacts
	others map[string]nodeFacts
	synced bool // all Nodes are known: routes may be removed
	// applied reports that the node's own addresses are set, early that the addresses of an earlier run are.
	applied, early bool
	err            error
	problems       map[string]string // by the name of the other node
	deleted        []link.PodRoute   // routes to Pods here that another program has deleted

	// Sources drops what Pods send with other addresses than their own.
	Sources *Sources

	// The goroutine of Run owns the rest.
	pace       pace
	seen       sightings
	device     *device
	masquerade *masquerade
	carrier    carrier
	routes     *routes
}

// New returns a Network that writes nothing before Run.
func New(o Options) *Network {
	n := &Network{
		o: o, addresses: newAddresses(), wake: loop.NewSignal(), tampered: loop.NewSignal(), linked: loop.NewSignal(),
		ready: make(chan struct{}), routed: newRouted(), others: map[string]nodeFacts{}, seen: sightings{},
	}
	ways := newPaths(o)
	n.carrier = newOverlay(o)
	if o.WireGuard != nil {
		n.carrier = newEncryption(o, ways)
	}
	n.routes = &routes{paths: ways, carrier: n.carrier}
	n.device = &device{name: o.Device, barrier: n.routes}
	n.masquerade = newMasquerade(o, n.tampered)
	n.Sources = newSources(o)
	return n
}

// Set takes in a Node, Unset its deletion, and Synced that all Nodes have been set.
func (n *Network) Set(node *corev1.Node) {
	f := factsOf(node)
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case node.Name != n.o.NodeName:
		if old, ok := n.others[node.Name]; ok && old.equal(f) {
			return // a heartbeat
		}
		n.others[node.Name] = f
	case n.own.equal(f):
		return
	default:
		n.own = f
	}
	n.wake.Set()
}

// Unset takes in the deletion of a Node.
func (n *Network) Unset(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.others, name)
	n.wake.Set()
}

// Synced reports that every Node has been set.
func (n *Network) Synced() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.synced = true
	n.wake.Set()
}

// Applied reports whether the node's own addresses are set, so that Pods can be connected.
func (n *Network) Applied() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.applied
}

// Ready is closed when Applied first holds.
func (n *Network) Ready() <-chan struct{} { return n.ready }

// Usable reports whether a Pod that does not wait for the API server can be connected.
func (n *Network) Usable() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.applied || n.early
}

// NodeUID is the UID of this node's Node, "" before it is known.
func (n *Network) NodeUID() types.UID {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.own.uid
}

// HostIPs are the InternalIPs of this node's Node, none before it is known.
func (n *Network) HostIPs() []netip.Addr {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.own.ips)
}

// Run keeps the kernel in line with the Nodes until ctx ends.
func (n *Network) Run(ctx context.Context) {
	var checks sync.WaitGroup
	defer checks.Wait()
	checks.Go(func() { n.Sources.run(ctx) })
	if n.o.WireGuard == nil {
		checks.Go(func() { removeEncryption(ctx, n.routed, n.o.Log) })
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	defer n.watch()()
	defer func() {
		for _, t := range n.targets() {
			_ = t.close()
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.tampered:
			n.pace.deleted(time.Now())
		case <-n.linked:
			n.pace.linked(time.Now())
		case <-n.wake:
			n.restore()
			failed, permanent := n.reconcile()
			n.pace.written(time.Now(), failed, permanent)
		case <-timer.C:
			for _, t := range n.targets() {
				t.forget()
			}
			n.restore()
			failed, permanent := n.reconcile()
			n.pace.compared(time.Now(), failed, permanent)
		}
		timer.Reset(n.pace.wait(time.Now()))
	}
}

// watch has removed routes put back at once, and routes by a device that went down when it
// is up again, until stop is called. Without notifications routes are compared periodically.
func (n *Network) watch() (stop func()) {
	stop, err := link.WatchRoutes(func(c link.RouteChange) {
		n.mu.Lock()
		n.deleted = append(n.deleted, c.Pods...)
		failing := n.err != nil || len(n.problems) > 0
		n.mu.Unlock()
		if c.Deleted {
			n.tampered.Set()
		}
		if c.Link || c.Foreign && failing {
			n.linked.Set()
		}
	})
	if err != nil {
		n.o.Log.Warn("cannot watch routes; comparing them periodically", "err", err, "period", resyncInterval)
		return func() {}
	}
	return stop
}

// restore puts back the routes to Pods here that another program has deleted.
func (n *Network) restore() {
	n.mu.Lock()
	deleted := n.deleted
	n.deleted = nil
	n.mu.Unlock()
	for _, r := range deleted {
		if err := r.Restore(); err != nil {
			n.o.Log.Error("cannot put back a route to a pod", "err", err)
		}
	}
}

// reconcile brings the kernel in line with the Nodes once, and reports the outcome. permanent is set if it can only be
// another one when the kernel has another module.
func (n *Network) reconcile() (failed, permanent bool) {
	p := n.plan()
	err := n.apply(p)
	n.mu.Lock()
	oldErr, oldProblems := n.err, n.problems
	n.err, n.problems = err, p.problems
	n.mu.Unlock()
	n.seen.follow(time.Now(), p.problems, n.report)
	if (oldErr == nil) != (err == nil) || !maps.Equal(oldProblems, p.problems) {
		defer n.o.Changed()
	}
	var unsupported *nftables.UnsupportedError
	permanent = errors.As(err, &unsupported)
	if repeated := oldErr != nil && err != nil && oldErr.Error() == err.Error(); err != nil && !repeated {
		n.o.Log.Error("cannot set up the pods' network; retrying", "err", err)
	}
	return err != nil || len(p.problems) > 0, permanent
}

// plan returns the desired state of the kernel, by the Nodes that were set.
func (n *Network) plan() *plan {
	n.mu.Lock()
	defer n.mu.Unlock()
	return &plan{own: n.own, others: slices.Collect(maps.Values(n.others)), synced: n.synced}
}

// apply has the targets write a plan, and adds the problems of other nodes to it. The error is why this node cannot
// run Pods.
func (n *Network) apply(p *plan) error {
	if len(p.own.cidrs) == 0 {
		err := n.applyEarlier()
		n.o.Usable() // Pods on the host network need only addresses
		return err
	}
	ranges := ranges{cluster: n.o.ClusterCIDRs, services: n.o.ServiceCIDRs, server: n.o.ServerAddrs}
	if err := ranges.checkOwn(p.own); err != nil {
		return err
	}
	p.gateways = n.addresses.setRanges(p.own.cidrs)
	local := n.device.pending(p) || n.masquerade.pending(p) || !n.Applied()
	if err := n.device.write(p); err != nil { // the other targets depend on it
		return err
	}
	err := n.masquerade.write(p)
	if local {
		n.setApplied(p.own.cidrs)
	}
	if !p.synced {
		return err
	}
	n.routes.decide(p, ranges)
	err = errors.Join(err, n.carrier.write(p), n.routes.write(p))
	if err == nil && n.routed.set(p) && n.o.Plain {
		n.o.Changed()
	}
	return err
}

// setApplied reports that the node's own addresses are set, and records its ranges.
func (n *Network) setApplied(cidrs []netip.Prefix) {
	n.mu.Lock()
	if !n.applied {
		n.applied = true
		close(n.ready)
	}
	n.mu.Unlock()
	b, err := json.Marshal(cidrs)
	if err == nil {
		err = fileio.Replace(n.rangesFile(), b, 0o600)
	}
	if err != nil {
		n.o.Log.Warn("cannot record the node's ranges; static pods will wait for the API server after a restart", "err", err)
	}
	n.o.Changed()
	n.o.Usable()
}

// applyEarlier lets Pods have addresses of the ranges of an earlier run while the Node is not known.
func (n *Network) applyEarlier() error {
	b, err := os.ReadFile(n.rangesFile())
	if !n.o.Early || n.Usable() || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var cidrs []netip.Prefix
	if err == nil {
		err = json.Unmarshal(b, &cidrs)
	}
	if err != nil {
		return fmt.Errorf("read the node's ranges of an earlier run: %w", err)
	}
	p := &plan{own: nodeFacts{cidrs: cidrs}, gateways: n.addresses.setRanges(cidrs)}
	if err := n.device.write(p); err != nil {
		return err
	}
	if err := n.masquerade.write(p); err != nil {
		return err
	}
	n.mu.Lock()
	n.early = true
	n.mu.Unlock()
	return nil
}

func (n *Network) rangesFile() string { return filepath.Join(n.o.StateDir, "ranges.json") }

// report records on the Node of another node that its Pods are not reached from here.
func (n *Network) report(node, problem string) {
	n.o.Log.Warn("cannot reach the pods of another node; retrying", "node", node, "reason", problem)
	n.o.Events.Event(nodeRef(node), corev1.EventTypeWarning, reasonRouteRejected, fmt.Sprintf("node %s has no route to pods of node %s: %s",
		n.o.NodeName, node, problem))
}

// nodeRef is a Node as Events refer to it: with its name in place of the UID, as a kubelet's.
func nodeRef(name string) *corev1.ObjectReference {
	return &corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: name, UID: types.UID(name)}
}

// Remove removes the node's side.
func (n *Network) Remove() error { return link.Cleanup() }
