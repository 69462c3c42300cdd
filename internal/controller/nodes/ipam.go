package nodes

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/loop"
)

// nodeIPAM gives each Node its part of the cluster's pod ranges.
type nodeIPAM struct {
	*kit.Kit
	loop *loop.Loop[string]

	mu       sync.Mutex
	ranges   []*cidrRange
	assigned map[string][]netip.Prefix // by Node, also while being written
	waiting  map[string]bool           // Nodes for which no range was left
	overlaps map[string]string         // by Node: the overlap that was recorded last
}

// IPAMOptions are what NewIPAM needs beside a Kit.
type IPAMOptions struct {
	// ClusterCIDRs are the pod ranges of the cluster, one or one of each family.
	ClusterCIDRs []netip.Prefix
	// Mask4 and Mask6 are the prefix lengths of a Node's part.
	Mask4, Mask6 int
}

// Check returns an error if the pod ranges cannot be divided.
func (o IPAMOptions) Check() error {
	_, err := o.ranges()
	return err
}

func (o IPAMOptions) ranges() (out []*cidrRange, err error) {
	for _, p := range o.ClusterCIDRs {
		mask := o.Mask4
		if p.Addr().Is6() {
			mask = o.Mask6
		}
		r, err := newCIDRRange(p, mask)
		if err != nil {
			return nil, err
		}
		if len(out) == 1 && out[0].base.Addr().Is4() == p.Addr().Is4() || len(out) > 1 {
			return nil, fmt.Errorf("cluster CIDRs %v: want one range, or one of each family", o.ClusterCIDRs)
		}
		out = append(out, r)
	}
	return out, nil
}

// NewIPAM returns the controller that gives each Node its part of the cluster's pod ranges.
func NewIPAM(k *kit.Kit, name string, o IPAMOptions) (kit.Task, error) {
	ranges, err := o.ranges()
	if err != nil {
		return nil, err
	}
	c := &nodeIPAM{
		Kit: k, ranges: ranges, assigned: map[string][]netip.Prefix{}, waiting: map[string]bool{}, overlaps: map[string]string{},
	}
	c.loop = loop.New(k.Log, name, min(4, k.Workers), c.sync)
	return c.loop.Run, k.Handle(k.Informers.Core().V1().Nodes().Informer(), kit.Handlers(c.nodeChanged, c.nodeDeleted))
}

// nodeChanged records the ranges that a Node has, or queues it to get some.
func (c *nodeIPAM) nodeChanged(node *corev1.Node) {
	if has := podCIDRs(node); len(has) > 0 {
		c.occupy(node, has)
		return
	}
	c.loop.Queue.Add(node.Name)
}

func podCIDRs(node *corev1.Node) []netip.Prefix {
	texts := node.Spec.PodCIDRs
	if len(texts) == 0 && node.Spec.PodCIDR != "" {
		texts = []string{node.Spec.PodCIDR}
	}
	var out []netip.Prefix
	for _, text := range texts {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

func (c *nodeIPAM) occupy(node *corev1.Node, has []netip.Prefix) {
	c.mu.Lock()
	if slices.Equal(c.assigned[node.Name], has) {
		c.mu.Unlock()
		return // the case of every heartbeat
	}
	overlap := ""
	for _, p := range c.assigned[node.Name] { // reserved, but the Node got others
		for _, r := range c.ranges {
			r.release(p, node.Name)
		}
	}
	c.assigned[node.Name] = has
	delete(c.waiting, node.Name)
	for _, p := range has {
		for _, r := range c.ranges {
			if other := r.occupy(p, node.Name); other != "" {
				overlap = fmt.Sprintf("the pod range %s overlaps with that of node %s; delete one of the two nodes and let it register again", p, other)
			}
		}
	}
	isNew := c.overlaps[node.Name] != overlap
	if overlap == "" {
		delete(c.overlaps, node.Name)
	} else {
		c.overlaps[node.Name] = overlap
	}
	c.mu.Unlock()
	if isNew && overlap != "" {
		c.Events.Event(node, corev1.EventTypeWarning, "CIDROverlap", overlap)
		c.Log.Error("pod ranges overlap", "node", node.Name, "reason", overlap)
	}
}

func (c *nodeIPAM) nodeDeleted(node *corev1.Node) {
	name := node.Name
	c.mu.Lock()
	for _, p := range c.assigned[name] {
		for _, r := range c.ranges {
			r.release(p, name)
		}
	}
	delete(c.assigned, name)
	delete(c.waiting, name)
	delete(c.overlaps, name)
	retry := slices.Collect(maps.Keys(c.waiting))
	c.mu.Unlock()
	for _, node := range retry {
		c.loop.Queue.Add(node)
	}
}

func (c *nodeIPAM) sync(ctx context.Context, name string) error {
	node, err := c.Informers.Core().V1().Nodes().Lister().Get(name)
	if err != nil || len(podCIDRs(node)) > 0 {
		return nil
	}
	assign, isNew := c.reserve(name)
	if assign == nil {
		if isNew {
			c.Events.Event(node, corev1.EventTypeWarning, "CIDRNotAvailable",
				"no pod range is left for this node; give the server a larger --cluster-cidr, or delete nodes that no longer exist")
		}
		return nil
	}
	texts := make([]string, len(assign))
	for i, p := range assign {
		texts[i] = p.String()
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": node.UID},
		"spec":     map[string]any{"podCIDR": texts[0], "podCIDRs": texts},
	})
	if err != nil {
		return err
	}
	_, err = c.Client.CoreV1().Nodes().Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	if err == nil || apierrors.IsNotFound(err) {
		return nil
	}
	// Another client may have assigned ranges, or the answer to this was lost.
	if now, getErr := c.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{}); getErr == nil {
		if has := podCIDRs(now); len(has) > 0 {
			c.occupy(now, has)
			return nil
		}
	}
	return fmt.Errorf("pod ranges of node %s: %w", name, err)
}

// reserve returns what the Node is to get: what was reserved for it before, or
// the next free of each range. It returns nil if none is left, and reports
// whether that is new.
func (c *nodeIPAM) reserve(name string) (assign []netip.Prefix, isNew bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if have := c.assigned[name]; have != nil {
		return have, false
	}
	for _, r := range c.ranges {
		p, ok := r.next(name)
		if !ok {
			for _, taken := range assign {
				for _, r := range c.ranges {
					r.release(taken, name)
				}
			}
			isNew = !c.waiting[name]
			c.waiting[name] = true
			return nil, isNew
		}
		assign = append(assign, p)
	}
	c.assigned[name] = assign
	return assign, false
}

// cidrRange divides a range into equal parts. A released part is assigned again
// as late as possible, since others may still have routes to it.
type cidrRange struct {
	base   netip.Prefix
	mask   int
	size   uint64 // number of parts
	cursor uint64
	taken  map[uint64]map[string]bool // part → the Nodes that have it
}

// maxNodeBits bounds the number of parts to 65,536, as in Kubernetes.
const maxNodeBits = 16

func newCIDRRange(p netip.Prefix, mask int) (*cidrRange, error) {
	bits := mask - p.Bits()
	if !p.IsValid() || bits < 0 || mask > p.Addr().BitLen() || bits > maxNodeBits {
		return nil, fmt.Errorf("the range %s cannot be divided into node ranges of /%d: want /%d to /%d",
			p, mask, p.Bits(), min(p.Bits()+maxNodeBits, p.Addr().BitLen()))
	}
	return &cidrRange{base: p.Masked(), mask: mask, size: 1 << bits, taken: map[uint64]map[string]bool{}}, nil
}

func (r *cidrRange) part(i uint64) netip.Prefix {
	n := new(big.Int).SetBytes(r.base.Addr().AsSlice())
	n.Add(n, new(big.Int).Lsh(new(big.Int).SetUint64(i), uint(r.base.Addr().BitLen()-r.mask)))
	raw := n.FillBytes(make([]byte, r.base.Addr().BitLen()/8))
	a, _ := netip.AddrFromSlice(raw)
	return netip.PrefixFrom(a, r.mask)
}

// parts returns the first and last part that a prefix touches.
func (r *cidrRange) parts(p netip.Prefix) (first, last uint64, ok bool) {
	if !r.base.Overlaps(p) {
		return 0, 0, false
	}
	if p.Bits() <= r.base.Bits() {
		return 0, r.size - 1, true
	}
	n := new(big.Int).SetBytes(p.Addr().AsSlice())
	n.Sub(n, new(big.Int).SetBytes(r.base.Addr().AsSlice()))
	n.Rsh(n, uint(r.base.Addr().BitLen()-r.mask))
	first, last = n.Uint64(), n.Uint64()
	if p.Bits() < r.mask {
		last += 1<<(r.mask-p.Bits()) - 1
	}
	return first, last, true
}

// occupy marks a prefix as a Node's and returns another Node that has part of
// it, or "".
func (r *cidrRange) occupy(p netip.Prefix, node string) (other string) {
	first, last, ok := r.parts(p)
	for i := first; ok && i <= last; i++ {
		if r.taken[i] == nil {
			r.taken[i] = map[string]bool{}
		}
		r.taken[i][node] = true
		for name := range r.taken[i] {
			if name != node {
				other = name
			}
		}
	}
	return other
}

func (r *cidrRange) release(p netip.Prefix, node string) {
	first, last, ok := r.parts(p)
	for i := first; ok && i <= last; i++ {
		delete(r.taken[i], node)
		if len(r.taken[i]) == 0 {
			delete(r.taken, i)
		}
	}
}

func (r *cidrRange) next(node string) (netip.Prefix, bool) {
	for range r.size {
		i := r.cursor
		r.cursor = (r.cursor + 1) % r.size
		if len(r.taken[i]) == 0 {
			r.taken[i] = map[string]bool{node: true}
			return r.part(i), true
		}
	}
	return netip.Prefix{}, false
}
