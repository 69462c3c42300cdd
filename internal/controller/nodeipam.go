package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"math/big"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// nodeIPAM gives each Node its part of the cluster's pod ranges.
type nodeIPAM struct {
	*shared
	loop *loop[string]

	mu      sync.Mutex
	ranges  []*cidrRange
	held    map[string][]netip.Prefix // by Node, also while being written
	waiting map[string]bool           // Nodes for which nothing was left
	told    map[string]string         // the last complaint about each Node
}

// DefaultClusterCIDRs are the pod ranges of a cluster that names none.
func DefaultClusterCIDRs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")}
}

func newNodeIPAM(s *shared) (func(ctx context.Context), error) {
	c := &nodeIPAM{shared: s, held: map[string][]netip.Prefix{}, waiting: map[string]bool{}, told: map[string]string{}}
	cidrs := s.options.ClusterCIDRs
	if len(cidrs) == 0 {
		cidrs = DefaultClusterCIDRs()
	}
	for _, p := range cidrs {
		mask := s.options.NodeMask4
		if p.Addr().Is6() {
			mask = s.options.NodeMask6
		}
		r, err := newCIDRRange(p, mask)
		if err != nil {
			return nil, err
		}
		if len(c.ranges) == 1 && c.ranges[0].base.Addr().Is4() == p.Addr().Is4() || len(c.ranges) > 1 {
			return nil, fmt.Errorf("cluster CIDRs %v: want one range, or one of each family", cidrs)
		}
		c.ranges = append(c.ranges, r)
	}
	c.loop = newLoop(s, NodeIPAMName, min(4, s.options.Workers), c.sync)
	return c.loop.run, s.handle(s.informers.Core().V1().Nodes().Informer(), cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { c.nodeChanged(o.(*corev1.Node)) },
		UpdateFunc: func(_, o any) { c.nodeChanged(o.(*corev1.Node)) },
		DeleteFunc: func(o any) {
			if node, ok := final[*corev1.Node](o); ok {
				c.nodeGone(node.Name)
			}
		},
	})
}

// nodeChanged takes note of the ranges a Node has before anything is given out.
func (c *nodeIPAM) nodeChanged(node *corev1.Node) {
	if has := podCIDRs(node); len(has) > 0 {
		c.occupy(node, has)
		return
	}
	c.loop.queue.Add(node.Name)
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
	if slices.Equal(c.held[node.Name], has) {
		c.mu.Unlock()
		return // every heartbeat comes by here
	}
	complaint := ""
	for _, p := range c.held[node.Name] { // reserved, and then it turned out otherwise
		for _, r := range c.ranges {
			r.release(p, node.Name)
		}
	}
	c.held[node.Name] = has
	delete(c.waiting, node.Name)
	for _, p := range has {
		for _, r := range c.ranges {
			if other := r.occupy(p, node.Name); other != "" {
				complaint = fmt.Sprintf("the pod range %s overlaps with that of node %s; delete one of the two nodes and let it register again", p, other)
			}
		}
	}
	news := c.told[node.Name] != complaint
	if complaint == "" {
		delete(c.told, node.Name)
	} else {
		c.told[node.Name] = complaint
	}
	c.mu.Unlock()
	if news && complaint != "" {
		c.events.Event(node, corev1.EventTypeWarning, "CIDROverlap", complaint)
		c.log.Error("pod ranges overlap", "node", node.Name, "reason", complaint)
	}
}

func (c *nodeIPAM) nodeGone(name string) {
	c.mu.Lock()
	for _, p := range c.held[name] {
		for _, r := range c.ranges {
			r.release(p, name)
		}
	}
	delete(c.held, name)
	delete(c.waiting, name)
	delete(c.told, name)
	var again []string
	for node := range c.waiting {
		again = append(again, node)
	}
	c.mu.Unlock()
	for _, node := range again {
		c.loop.queue.Add(node)
	}
}

func (c *nodeIPAM) sync(ctx context.Context, name string) error {
	node, err := c.informers.Core().V1().Nodes().Lister().Get(name)
	if err != nil || len(podCIDRs(node)) > 0 {
		return nil
	}
	give, news := c.reserve(name)
	if give == nil {
		if news {
			c.events.Event(node, corev1.EventTypeWarning, "CIDRNotAvailable", "no pod range is left to give to this node; give the server a larger --cluster-cidr, or delete nodes that are gone")
		}
		return nil
	}
	texts := make([]string, len(give))
	for i, p := range give {
		texts[i] = p.String()
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": node.UID},
		"spec":     map[string]any{"podCIDR": texts[0], "podCIDRs": texts},
	})
	if err != nil {
		return err
	}
	_, err = c.client.CoreV1().Nodes().Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	if err == nil || apierrors.IsNotFound(err) {
		return nil
	}
	// The Node may have got ranges from somebody else, or these after all.
	if now, getErr := c.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{}); getErr == nil {
		if has := podCIDRs(now); len(has) > 0 {
			c.occupy(now, has)
			return nil
		}
	}
	return fmt.Errorf("pod ranges of node %s: %w", name, err)
}

// reserve returns what the Node is to get: what was reserved for it before, or
// the next free of each range. It returns nil if there is nothing left, and
// whether that is news.
func (c *nodeIPAM) reserve(name string) (give []netip.Prefix, news bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if have := c.held[name]; have != nil {
		return have, false
	}
	for _, r := range c.ranges {
		p, ok := r.next(name)
		if !ok {
			for _, taken := range give {
				for _, r := range c.ranges {
					r.release(taken, name)
				}
			}
			news = !c.waiting[name]
			c.waiting[name] = true
			return nil, news
		}
		give = append(give, p)
	}
	c.held[name] = give
	return give, false
}

// cidrRange divides a range into equal parts. What was given back is given out
// again as late as possible, since others may remember it.
type cidrRange struct {
	base   netip.Prefix
	mask   int
	size   uint64 // number of parts
	cursor uint64
	taken  map[uint64]map[string]bool // part → who says to have it
}

// maxNodeBits bounds the number of parts to 65,536, as in Kubernetes.
const maxNodeBits = 16

func newCIDRRange(p netip.Prefix, mask int) (*cidrRange, error) {
	bits := mask - p.Bits()
	if !p.IsValid() || bits < 0 || mask > p.Addr().BitLen() || bits > maxNodeBits {
		return nil, fmt.Errorf("cluster CIDR %s cannot be divided into node ranges of /%d: the node mask must be at least as long, by at most %d", p, mask, maxNodeBits)
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

// occupy notes that a Node has a prefix and returns another one that has part
// of it.
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
