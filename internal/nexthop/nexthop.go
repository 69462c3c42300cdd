// Package nexthop finds out how this node passes packets on to other nodes as they are, for direct return
// (docs/design/024-direct-return.md).
package nexthop

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// The machine's routes are read again after settleTime when they change, and every resyncInterval.
const (
	settleTime     = 100 * time.Millisecond
	resyncInterval = 30 * time.Second
)

// Finder follows the Nodes and this machine's routes, from the first call of Get on. Its methods are safe for concurrent use.
type Finder struct {
	client  kubernetes.Interface
	self    string
	changed func()
	log     *slog.Logger
	wanted  loop.Signal
	wake    loop.Signal

	mu     sync.Mutex
	nodes  map[string]node
	listed bool
	hops   map[string]table.NextHop // nil before the Nodes are listed
}

// node is what counts of a Node: its first InternalIP and range of Pods of each family.
type node struct {
	ips  [2]netip.Addr
	pods [2]netip.Prefix
}

// New returns a Finder for the node called self. changed is called when Get returns something else than before; it does not
// block.
func New(client kubernetes.Interface, self string, log *slog.Logger, changed func()) *Finder {
	return &Finder{
		client: client, self: self, changed: changed, log: log, wanted: loop.NewSignal(), wake: loop.NewSignal(), nodes: map[string]node{},
	}
}

// Get returns how each other node is reached, nil while that is not known. The caller does not change it.
func (f *Finder) Get() map[string]table.NextHop {
	f.wanted.Set()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hops
}

// Run follows until ctx ends, in the network namespace of the process. Before the first Get it only waits.
func (f *Finder) Run(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-f.wanted:
	}
	var watching sync.WaitGroup
	defer watching.Wait()
	watching.Go(func() {
		reflector.Run(ctx, "nexthop/nodes", reflector.From(f.client.CoreV1().Nodes(), metav1.ListOptions{}), f.sink())
	})
	stop, err := link.WatchRoutes(func(link.RouteChange) { f.wake.Set() })
	if err != nil {
		f.log.Warn("cannot watch routes; reading the ways to other nodes periodically", "err", err, "period", resyncInterval)
		stop = func() {}
	}
	defer stop()
	resync := time.NewTicker(resyncInterval)
	defer resync.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.wanted: // of later calls
			continue
		case <-f.wake:
		case <-resync.C:
		}
		f.look()
		select {
		case <-ctx.Done():
		case <-time.After(settleTime):
		}
	}
}

func (f *Finder) sink() reflector.Sink[*corev1.Node] {
	return reflector.Sink[*corev1.Node]{
		Replace: func(all []*corev1.Node) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.nodes, f.listed = map[string]node{}, true
			for _, n := range all {
				f.take(n)
			}
			f.wake.Set()
		},
		Set: func(n *corev1.Node) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.take(n)
		},
		Delete: func(n *corev1.Node) {
			f.mu.Lock()
			defer f.mu.Unlock()
			delete(f.nodes, n.Name)
			f.wake.Set()
		},
	}
}

// take takes over what counts of a Node. The caller holds mu.
func (f *Finder) take(obj *corev1.Node) {
	if obj.Name == f.self {
		return
	}
	var n node
	for _, a := range obj.Status.Addresses {
		ip, err := netip.ParseAddr(a.Address)
		if err != nil || a.Type != corev1.NodeInternalIP || ip.IsLoopback() || ip.Zone() != "" {
			continue
		}
		if at := &n.ips[index(ip)]; !at.IsValid() {
			*at = ip.Unmap()
		}
	}
	for _, text := range obj.Spec.PodCIDRs {
		if p, err := netip.ParsePrefix(text); err == nil && !n.pods[index(p.Addr())].IsValid() {
			n.pods[index(p.Addr())] = p
		}
	}
	if f.nodes[obj.Name] != n {
		f.nodes[obj.Name] = n
		f.wake.Set()
	}
}

func index(a netip.Addr) int {
	if svc.FamilyOf(a) == svc.IPv6 {
		return 1
	}
	return 0
}

// look asks the kernel for the way to each node.
func (f *Finder) look() {
	f.mu.Lock()
	nodes, listed := maps.Clone(f.nodes), f.listed
	f.mu.Unlock()
	if !listed {
		return
	}
	hops := make(map[string]table.NextHop, len(nodes))
	for name, n := range nodes {
		hops[name] = table.NextHop{IPv4: link.NextHop(n.ips[0], n.pods[0]), IPv6: link.NextHop(n.ips[1], n.pods[1])}
	}
	f.mu.Lock()
	same := f.hops != nil && maps.Equal(hops, f.hops)
	f.hops = hops
	f.mu.Unlock()
	if !same {
		f.changed()
	}
}
