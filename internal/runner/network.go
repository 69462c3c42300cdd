package runner

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/svc"
)

// network keeps the node's side of the pods' network in line with the Node
// objects: the node's addresses, the routes to pods of other nodes, masquerading.
type network struct {
	r    *Runner
	wake chan struct{}

	mu         sync.Mutex
	own        nodeFacts
	others     map[string]nodeFacts
	synced     bool // all nodes are known: routes may be removed
	applied    bool // the node's own addresses are set
	earlierSet bool // static pods may have addresses of the ranges of an earlier run
	err        error
	problems   map[string]string // by the name of the other node
	up         chan struct{}     // closed when applied is first set
	last       []netip.Prefix
	// masquerade is of the goroutine of run alone, as are last and masqueradeRetry.
	masquerade      *link.Masquerade
	masqueradeRetry nftables.Retry
	// unmasqueraded is why the kernel cannot masquerade, nil where it can.
	unmasqueraded *nftables.UnsupportedError
	// deleted are routes to pods here that another program has deleted, and tampered
	// holds a token after it did anything of that kind.
	deleted  []link.PodRoute
	tampered chan struct{}
	flushed  bool // the masquerading, too

	// routes, paths, overlay and its routes are of the goroutine of run alone; mtu is that of
	// new pods, 0 for the default.
	routes  link.Routes
	paths   paths
	overlay *link.Overlay
	carried []link.Route
	mtu     atomic.Int64
}

// nodeFacts is what the network needs of a Node.
type nodeFacts struct {
	name  string
	uid   types.UID
	since time.Time // its creation
	cidrs []netip.Prefix
	ips   []netip.Addr
	key   link.Key // its public key for WireGuard, if it has one
}

func factsOf(n *corev1.Node) nodeFacts {
	f := nodeFacts{name: n.Name, uid: n.UID, since: n.CreationTimestamp.Time}
	cidrs := n.Spec.PodCIDRs
	if len(cidrs) == 0 && n.Spec.PodCIDR != "" {
		cidrs = []string{n.Spec.PodCIDR}
	}
	for _, c := range cidrs {
		if p, err := netip.ParsePrefix(c); err == nil && (p.Addr().Is4() || link.HasIPv6()) {
			f.cidrs = append(f.cidrs, p.Masked())
		}
	}
	if key, err := link.ParseKey(n.Annotations[svc.PublicKeyAnnotation]); err == nil {
		f.key = key
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
	return f.uid == o.uid && f.key == o.key && slices.Equal(f.cidrs, o.cidrs) && slices.Equal(f.ips, o.ips)
}

func newNetwork(r *Runner) *network {
	return &network{
		r: r, wake: make(chan struct{}, 1), tampered: make(chan struct{}, 1), up: make(chan struct{}), others: map[string]nodeFacts{},
		paths:   paths{mode: r.o.PodNetwork, encrypt: r.o.WireGuard != nil, neighbours: map[netip.Addr]bool{}},
		overlay: link.NewOverlay(r.o.Overlay),
	}
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

// usable reports whether there are ranges for a pod that waits for no API server.
func (n *network) usable() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.applied || n.earlierSet
}

// ownUID is the UID of this node's Node, "" before it is known.
func (n *network) ownUID() types.UID {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.own.uid
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
	// networkSettle is how long routes may go on being deleted before they are put back.
	networkSettle = 200 * time.Millisecond
)

// watch has what other programs remove put back at once, until stop is called.
// Without notifications routes are compared periodically.
func (n *network) watch() (stop func()) {
	stop, err := link.WatchRoutes(func(pods []link.PodRoute) {
		n.mu.Lock()
		n.deleted = append(n.deleted, pods...)
		n.mu.Unlock()
		n.tamper()
	})
	if err != nil {
		n.r.o.Log.Warn("cannot watch routes; they are compared periodically", "err", err, "period", networkResync)
		return func() {}
	}
	return stop
}

func (n *network) tamper() {
	select {
	case n.tampered <- struct{}{}:
	default:
	}
}

// restore puts back the routes to pods here that another program has deleted.
func (n *network) restore() {
	n.mu.Lock()
	deleted := n.deleted
	n.deleted = nil
	if n.flushed {
		n.flushed, n.last = false, nil
	}
	n.mu.Unlock()
	for _, r := range deleted {
		if err := r.Restore(); err != nil {
			n.r.o.Log.Error("cannot put back a route to a pod", "err", err)
		}
	}
}

func (n *network) run(ctx context.Context) {
	if n.r.o.WireGuard == nil {
		if err := link.RemoveWireGuard(); err != nil { // of an agent that encrypted
			n.r.o.Log.Warn("cannot remove the device of WireGuard", "err", err)
		}
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	defer n.watch()()
	defer func() {
		if n.masquerade != nil {
			_ = n.masquerade.Close()
		}
		_ = n.overlay.Close()
		if n.r.o.WireGuard != nil {
			_ = n.r.o.WireGuard.Close()
		}
	}()
	settling := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.tampered:
			if !settling {
				settling = true
				timer.Reset(networkSettle)
			}
			continue
		case <-n.wake:
		case <-timer.C:
			n.routes.Forget()
			n.paths.forget()
			n.overlay.Forget()
			if n.r.o.WireGuard != nil {
				n.r.o.WireGuard.Forget()
			}
		}
		settling = false
		n.restore()
		again := networkResync
		rejected, err := n.apply()
		n.mu.Lock()
		changed := (n.err == nil) != (err == nil) || !maps.Equal(n.problems, rejected)
		known := n.err != nil && err != nil && n.err.Error() == err.Error()
		before, others := n.problems, maps.Clone(n.others)
		n.err, n.problems = err, rejected
		n.mu.Unlock()
		for name, problem := range rejected {
			if before[name] != problem {
				n.report(others[name], problem)
			}
		}
		if err != nil || len(rejected) > 0 {
			again = networkRetry
		}
		var lacking *nftables.UnsupportedError
		permanent := errors.As(err, &lacking) // until the kernel has a module more
		if permanent {
			again = networkResync
		}
		if err != nil && !(known && permanent) {
			n.r.o.Log.Error("cannot set up the pods' network; retrying", "err", err, "after", again)
		}
		if changed {
			n.r.notify()
		}
		timer.Reset(again)
	}
}

// apply brings the kernel in line with the Nodes. It returns what keeps this node
// from reaching the pods of others, by their nodes' names, and what keeps it from
// running pods of its own.
func (n *network) apply() (problems map[string]string, err error) {
	n.mu.Lock()
	own, synced, applied := n.own, n.synced, n.applied
	others := slices.Collect(maps.Values(n.others))
	n.mu.Unlock()
	if len(own.cidrs) == 0 {
		err := n.applyEarlier()
		n.r.nudgeAll() // pods on the host network need only addresses
		return nil, err
	}
	limits := limits{cluster: n.r.o.ClusterCIDRs, services: n.r.o.ServiceCIDRs, server: n.r.o.ServerAddrs}
	if err := limits.checkOwn(own); err != nil {
		return nil, err
	}
	n.r.ipam.setRanges(own.cidrs)
	var errs []error
	if !applied || !slices.Equal(n.last, own.cidrs) || n.masqueradeDue() {
		// The rest depends on these.
		if err := errors.Join(n.failClosed(), link.EnsureNode(n.r.o.Device, n.r.ipam.gateways())); err != nil {
			return nil, err
		}
		if err := n.masqueraded(own.cidrs); err != nil {
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
		n.remember(own.cidrs)
		n.r.notify()
		n.r.nudgeAll()
	}
	if !synced {
		return nil, errors.Join(errs...)
	}
	routes, far, problems := limits.routes(own, others, &n.paths)
	carried, err := n.carry(own, far)
	if err != nil {
		carried = n.carried // those of before lead where they led
	}
	n.carried = carried
	errs = append(errs, err)
	failed, err := n.routes.Set(append(routes, carried...))
	errs = append(errs, err)
	for _, c := range own.cidrs {
		errs = append(errs, failed[c])
	}
	for _, o := range others {
		for _, c := range o.cidrs {
			if err := failed[c]; err != nil && problems[o.name] == "" {
				problems[o.name] = err.Error()
			}
		}
	}
	return problems, errors.Join(errs...)
}

// report records that the pods of another node are not reached from here, on that
// Node.
func (n *network) report(other nodeFacts, problem string) {
	n.r.o.Log.Warn("the pods of another node are not reached from here; retrying", "node", other.name, "reason", problem)
	n.r.rec.Event(nodeRef(other.name), corev1.EventTypeWarning, reasonRouteRejected, fmt.Sprintf("node %s has no route to pods of node %s: %s",
		n.r.o.NodeName, other.name, problem))
}

// nodeRef is a Node as Events refer to it: with its name in place of the UID, as a kubelet's.
func nodeRef(name string) *corev1.ObjectReference {
	return &corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: name, UID: types.UID(name)}
}

// PodsRouted is the Node condition that is True while the node has a route to the
// pods of each other node.
const PodsRouted corev1.NodeConditionType = "fairlead.dev/PodsRouted"

const reasonRouteRejected = "RouteRejected"

// maxReported bounds how many other nodes the condition names.
const maxReported = 5

// condition returns the Node condition PodsRouted.
func (n *network) condition() corev1.NodeCondition {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := corev1.NodeCondition{Type: PodsRouted, Status: corev1.ConditionTrue, Reason: "Routed", Message: "all other nodes' pods have routes"}
	switch names := slices.Sorted(maps.Keys(n.problems)); {
	case len(names) > 0:
		var texts []string
		for _, name := range names[:min(len(names), maxReported)] {
			texts = append(texts, fmt.Sprintf("node %s: %s", name, n.problems[name]))
		}
		if more := len(names) - len(texts); more > 0 {
			texts = append(texts, fmt.Sprintf("and %d more nodes", more))
		}
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, reasonRouteRejected, strings.Join(texts, "; ")
	case !n.synced || !n.applied:
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, "Starting", "waiting for the Nodes"
	}
	return c
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
		Addrs: w.rec.IPs, Gateways: w.r.ipam.gateways(), MTU: int(w.r.network.mtu.Load()),
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

func (n *network) rangesFile() string { return filepath.Join(n.r.o.StateDir, "ranges.json") }

// remember records the node's ranges for a start without the API server.
func (n *network) remember(cidrs []netip.Prefix) {
	n.r.static.mirrors.nudge() // the Node is known
	b, err := json.Marshal(cidrs)
	if err == nil {
		err = fileio.Replace(n.rangesFile(), b, 0o600)
	}
	if err != nil {
		n.r.o.Log.Warn("cannot record the node's ranges; static pods will wait for the API server after a restart", "err", err)
	}
}

// applyEarlier lets static pods have addresses of the ranges of an earlier run while the
// Node is not known.
func (n *network) applyEarlier() error {
	b, err := os.ReadFile(n.rangesFile())
	if n.r.o.StaticDir == "" || n.usable() || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var cidrs []netip.Prefix
	if err == nil {
		err = json.Unmarshal(b, &cidrs)
	}
	if err != nil {
		return fmt.Errorf("read the node's ranges of an earlier run: %w", err)
	}
	n.r.ipam.setRanges(cidrs)
	if err := errors.Join(n.failClosed(), link.EnsureNode(n.r.o.Device, n.r.ipam.gateways())); err != nil {
		return err
	}
	if err := n.masqueraded(cidrs); err != nil {
		return err
	}
	n.mu.Lock()
	n.earlierSet = true
	n.mu.Unlock()
	return nil
}
