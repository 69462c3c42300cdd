package runner

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/netns"
)

// network keeps the node's side of the pods' network in line with the Node
// objects: the node's addresses, the routes to pods of other nodes, masquerading.
type network struct {
	r    *Runner
	wake chan struct{}

	mu      sync.Mutex
	own     nodeFacts
	others  map[string]nodeFacts
	synced  bool // all nodes are known: routes may be removed
	applied bool // the node's own addresses are set
	err     error
	up      chan struct{} // closed when applied is first set
	last    []netip.Prefix
}

// nodeFacts is what the network needs of a Node.
type nodeFacts struct {
	cidrs []netip.Prefix
	ips   []netip.Addr
}

func factsOf(n *corev1.Node) nodeFacts {
	var f nodeFacts
	cidrs := n.Spec.PodCIDRs
	if len(cidrs) == 0 && n.Spec.PodCIDR != "" {
		cidrs = []string{n.Spec.PodCIDR}
	}
	for _, c := range cidrs {
		if p, err := netip.ParsePrefix(c); err == nil && (p.Addr().Is4() || link.HasIPv6()) {
			f.cidrs = append(f.cidrs, p.Masked())
		}
	}
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			f.ips = append(f.ips, parseAddrs(a.Address)...)
		}
	}
	return f
}

// parseAddrs returns the address in s, or none.
func parseAddrs(s string) []netip.Addr {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return nil
	}
	return []netip.Addr{a.Unmap()}
}

func (f nodeFacts) equal(o nodeFacts) bool {
	return slices.Equal(f.cidrs, o.cidrs) && slices.Equal(f.ips, o.ips)
}

func newNetwork(r *Runner) *network {
	return &network{r: r, wake: make(chan struct{}, 1), up: make(chan struct{}), others: map[string]nodeFacts{}}
}

func (n *network) set(node *corev1.Node) {
	f := factsOf(node)
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case node.Name != n.r.o.NodeName:
		if old, ok := n.others[node.Name]; ok && old.equal(f) {
			return // a heartbeat
		}
		n.others[node.Name] = f
	case n.own.equal(f):
		return
	default:
		n.own = f
	}
	n.nudge()
}

func (n *network) unset(node *corev1.Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.others, node.Name)
	n.nudge()
}

func (n *network) setSynced() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.synced = true
	n.nudge()
}

func (n *network) nudge() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

func (n *network) ready() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.applied
}

func (n *network) healthy() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.applied && n.err == nil {
		return errors.New("no range of pod addresses is known for this node yet (spec.podCIDRs of its Node)")
	}
	return n.err
}

func (n *network) hostIPs() []netip.Addr {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.own.ips)
}

// Intervals of network.run.
const (
	networkRetry  = 5 * time.Second
	networkResync = time.Minute
)

func (n *network) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.wake:
		case <-timer.C:
		}
		again := networkResync
		err := n.apply()
		n.mu.Lock()
		n.err = err
		n.mu.Unlock()
		if err != nil {
			again = networkRetry
			n.r.o.Log.Error("cannot set up the pods' network; retrying", "err", err, "after", again)
		}
		timer.Reset(again)
	}
}

// apply brings the kernel in line with the Nodes.
func (n *network) apply() error {
	n.mu.Lock()
	own, synced, applied := n.own, n.synced, n.applied
	var routes []link.Route
	for _, o := range n.others {
		routes = append(routes, routesTo(o)...)
	}
	n.mu.Unlock()
	if len(own.cidrs) == 0 {
		n.r.each((*worker).nudge) // pods on the host network need only addresses
		return nil
	}
	n.r.ipam.setRanges(own.cidrs)
	var errs []error
	if !applied || !slices.Equal(n.last, own.cidrs) {
		if err := link.EnsureNode(n.r.o.Device, n.r.ipam.gateways()); err != nil {
			return err // the rest depends on it
		}
		if err := link.Masquerade(own.cidrs, append(slices.Clone(n.r.o.ClusterCIDRs), own.cidrs...)); err != nil {
			errs = append(errs, err)
		} else {
			n.last = own.cidrs
		}
		n.mu.Lock()
		if !n.applied {
			n.applied = true
			close(n.up)
		}
		n.mu.Unlock()
		n.r.each((*worker).nudge)
	}
	if synced {
		errs = append(errs, link.SyncRoutes(routes))
	}
	return errors.Join(errs...)
}

// routesTo are the routes to the pods of another node, by its address of the
// same family.
func routesTo(o nodeFacts) []link.Route {
	var out []link.Route
	for _, c := range o.cidrs {
		i := slices.IndexFunc(o.ips, func(a netip.Addr) bool { return a.Is4() == c.Addr().Is4() })
		if i >= 0 {
			out = append(out, link.Route{Dst: c, Via: o.ips[i]})
		}
	}
	return out
}

// remove removes the node's side.
func (n *network) remove() error { return link.Cleanup() }

// deviceName is the name of the node's end of a pod's network: at most 15
// characters, the same after a restart.
func deviceName(uid types.UID) string {
	sum := sha256.Sum256([]byte(uid))
	return "fl" + hex.EncodeToString(sum[:5])
}

// connect joins the pod's network namespace to the node.
func (w *worker) connect() error {
	if w.rec.HostNetwork {
		return nil
	}
	return link.AddPod(link.Pod{
		Device: w.rec.Device, Name: w.String(), Netns: netns.Of(w.sandbox.id.Pid),
		Addrs: w.rec.IPs, Gateways: w.r.ipam.gateways(),
	})
}

// disconnect removes the node's end.
func (w *worker) disconnect() {
	if w.rec.Device == "" {
		return
	}
	if err := link.DelPod(w.rec.Device); err != nil {
		w.log.Error("cannot remove the pod's network", "err", err)
	}
}
