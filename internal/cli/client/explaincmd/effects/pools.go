package effects

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/owners"
	"github.com/fairlead/fairlead/internal/lb/pool"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// Balancing is what decides about the addresses of Services beside their pools.
type Balancing struct {
	Claims   []claim.Claim
	Speakers []v1.Speaker
	Nodes    []*corev1.Node
	// Local are the nodes with a ready endpoint of each Service with the policy Local.
	Local map[svc.Name][]string
}

// Pools returns what changes for the Services that have addresses: which addresses are in no pool any more, or in another one, and which
// nodes no longer announce them.
func (b *Balancing) Pools(was, is []v1.IPAddressPool) (out []explain.Change) {
	announced := owners.Of(b.Speakers, owners.Silent(b.Nodes))
	nodes := map[string]*corev1.Node{}
	for _, n := range b.Nodes {
		nodes[n.Name] = n
	}
	wereIn, areIn := allocatorOf(was), allocatorOf(is)
	for _, c := range b.Claims {
		before, after := named(was, wereIn.PoolOf(c.Addr)), named(is, areIn.PoolOf(c.Addr))
		if c.Pool != "" && before == nil { // it was outside of its pool already
			before = named(was, c.Pool)
		}
		var lines []explain.Change
		switch {
		case before == nil || after != nil && after.Name == before.Name:
		case after == nil:
			lines = append(lines, explain.Change{Text: fmt.Sprintf("its address %s is in no pool any more: "+
				"the Service keeps it, with the Warning %s", c.Addr, pool.Outside)})
		default:
			lines = append(lines, explain.Change{Text: fmt.Sprintf("its address %s moves from pool %s to pool %s", c.Addr, before.Name, after.Name)})
		}
		// What a pool says about nodes counts for the addresses that it has given, as long as it exists.
		lines = append(lines, b.silenced(&c, named(was, c.Pool), named(is, c.Pool), announced[c.Addr.String()], nodes)...)
		for _, n := range c.Services {
			for _, l := range lines {
				l.Service = n.String()
				out = append(out, l)
			}
		}
	}
	return out
}

// silenced returns the nodes that announce an address and may not with the new pool.
func (b *Balancing) silenced(
	c *claim.Claim, was, is *v1.IPAddressPool, list []owners.Owner, nodes map[string]*corev1.Node,
) (out []explain.Change) {
	if was == nil || is != nil && equality.Semantic.DeepEqual(was.Spec, is.Spec) {
		return nil
	}
	a := c.Addr
	before := owners.Wanted{Addr: a, Pool: was, Local: len(c.Services) > 0}
	for _, n := range c.Services { // which share it only with the same policy
		nodes, local := b.Local[n]
		before.Local, before.Nodes, before.Service = before.Local && local, append(before.Nodes, nodes...), n.String()
	}
	after := before
	after.Pool = is
	var left []string
	for i := range b.Speakers {
		s := &b.Speakers[i]
		announces := slices.ContainsFunc(list, func(o owners.Owner) bool { return o.Node == s.Name && !o.Stale })
		barred, _ := before.Bar(s, nodes[s.Name])
		why, _ := after.Bar(s, nodes[s.Name])
		if why == "" {
			left = append(left, s.Name)
		}
		if announces && barred == "" && why != "" {
			out = append(out, explain.Change{Nodes: []string{s.Name}, Text: fmt.Sprintf("node %s no longer announces %s: %s", s.Name, a, why)})
		}
	}
	for i := range out {
		out[i].Cuts = "connections through that node end: no node may announce the address"
		if len(left) > 0 {
			slices.Sort(left)
			out[i].Cuts = "connections through that node come to another one, which may choose other endpoints: " +
				strings.Join(left[:min(len(left), 5)], ", ")
		}
	}
	return out
}

// allocatorOf returns what tells which pool has an address: of several pools the oldest. One that does not exist yet is the newest, and
// one with a text that cannot be parsed has none.
func allocatorOf(pools []v1.IPAddressPool) *pool.Allocator {
	byAge := slices.Clone(pools)
	slices.SortFunc(byAge, func(a, b v1.IPAddressPool) int {
		x, y := a.CreationTimestamp, b.CreationTimestamp
		switch {
		case x.IsZero() && !y.IsZero():
			return 1
		case y.IsZero() && !x.IsZero():
			return -1
		}
		return cmp.Or(x.Compare(y.Time), strings.Compare(a.Name, b.Name))
	})
	var list []pool.Pool
	for i := range byAge {
		if ranges, ok := rangesOf(&byAge[i]); ok {
			list = append(list, pool.Pool{Name: byAge[i].Name, Ranges: ranges, AvoidBuggy: byAge[i].Spec.AvoidBuggyIPs})
		}
	}
	out := pool.New()
	out.SetPools(list)
	return out
}

// rangesOf returns the ranges of a pool, and whether all texts can be parsed.
func rangesOf(p *v1.IPAddressPool) (out []pool.Range, ok bool) {
	for _, text := range p.Spec.Addresses {
		r, err := pool.Parse(text)
		if err != nil {
			return nil, false
		}
		out = append(out, r)
	}
	return out, true
}

func named(pools []v1.IPAddressPool, name string) *v1.IPAddressPool {
	i := slices.IndexFunc(pools, func(p v1.IPAddressPool) bool { return p.Name == name })
	if i < 0 {
		return nil
	}
	return &pools[i]
}
