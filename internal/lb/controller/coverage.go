package controller

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/pool"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// NotAnnounceable is the reason of Events about addresses that no node can announce.
const NotAnnounceable = "NotAnnounceable"

const notAnnounceable pool.Kind = NotAnnounceable

// coverageDelay is how long changes of Speakers are collected: a speaker that restarts is
// away for less.
const coverageDelay = 3 * time.Second

// coverage is what the speakers can announce between them.
type coverage struct {
	// speakers is how many have reported. Without any, addresses may be routed to the nodes by
	// other means.
	speakers int
	// routed is true if a speaker has a BGP session, which takes every address, if its node's addresses are
	// routed by other means, or if it is of a build that does not report what it can announce.
	routed bool
	// anyNetwork is true if a speaker answers for addresses of any network.
	anyNetwork bool
	interfaces map[string]struct{}
	networks   []pool.Range // sorted and disjoint
	// excluded has the reasons why nodes announce nothing.
	excluded []string
	// undecided is why no node may answer ARP or NDP, with the remedy; empty if nothing is known to keep them from it.
	undecided string
	// without is what a pool's spec leaves out, as a part of a message.
	without string
	// all are what it was made of, parts the coverage of pools that not every node announces in every way, by name.
	all   reporters
	parts map[string]*part
}

// part is the coverage of a pool.
type part struct {
	*coverage
	of *v1.IPAddressPool
}

// reporters are the speakers, with the labels of their nodes. silent has the ones whose node does not report or has no Node object.
type reporters struct {
	speakers map[string]*v1.Speaker
	labels   map[string]labels.Set
	silent   map[string]bool
}

// newCoverage computes what speakers can announce.
func newCoverage(all reporters, undecided string) *coverage {
	c := &coverage{interfaces: map[string]struct{}{}, undecided: undecided, all: all}
	for name, s := range all.speakers {
		if len(s.Status.Endpoints) == 0 {
			continue // it has not written its status yet
		}
		c.speakers++
		switch {
		case all.silent[name]:
			c.excluded = append(c.excluded, "node "+name+" does not report")
			continue
		case !s.Status.Eligible:
			c.excluded = append(c.excluded, "node "+name+": "+cmp.Or(s.Status.Reason, "it is not eligible"))
			continue
		}
		c.routed = c.routed || s.Status.Announce == v1.AnnounceNone || s.Status.Announce == "" && len(s.Status.Interfaces) == 0
		c.routed = c.routed || slices.ContainsFunc(s.Status.Peers, func(p v1.PeerStatus) bool { return p.State == v1.PeerEstablished })
		if len(s.Status.Interfaces) == 0 {
			continue
		}
		for _, i := range s.Status.Interfaces {
			c.interfaces[i] = struct{}{}
		}
		c.anyNetwork = c.anyNetwork || s.Status.AnyNetwork
		c.networks = append(c.networks, prefixes(s.Status.Networks)...)
	}
	slices.Sort(c.excluded)
	c.networks = merge(c.networks)
	return c
}

// of returns what the speakers can announce of the addresses of a pool, nil for addresses of no pool: its spec may leave out nodes,
// ways and peers.
func (c *coverage) of(p *v1.IPAddressPool) *coverage {
	if p == nil {
		return c
	}
	s := &p.Spec
	peers, every := s.RoutesTo()
	if s.NodeSelector == nil && s.Takes(v1.AnnounceARP) && s.Takes(v1.AnnounceBGP) && every {
		return c
	}
	if have := c.parts[p.Name]; have != nil && have.of == p {
		return have.coverage
	}
	selects := labels.Everything()
	if s.NodeSelector != nil {
		var err error
		if selects, err = metav1.LabelSelectorAsSelector(s.NodeSelector); err != nil {
			selects = labels.Nothing()
		}
	}
	some := reporters{speakers: map[string]*v1.Speaker{}, labels: c.all.labels, silent: c.all.silent}
	for name, o := range c.all.speakers {
		if !selects.Matches(c.all.labels[name]) {
			continue
		}
		status := o.Status
		status.Peers = slices.DeleteFunc(slices.Clone(status.Peers), func(p v1.PeerStatus) bool {
			return !s.Takes(v1.AnnounceBGP) || !every && !slices.Contains(peers, p.Name)
		})
		if !s.Takes(v1.AnnounceARP) {
			status.Interfaces, status.Networks = nil, nil
		}
		some.speakers[name] = &v1.Speaker{Status: status}
	}
	undecided := c.undecided
	if !s.Takes(v1.AnnounceARP) {
		undecided = ""
	}
	out := newCoverage(some, undecided)
	out.without = left(s, peers, every)
	if out.speakers == 0 && c.speakers > 0 {
		out.speakers, out.excluded = 1, []string{"the pool's nodeSelector selects no node with a speaker"}
	}
	if c.parts == nil {
		c.parts = map[string]*part{}
	}
	c.parts[p.Name] = &part{coverage: out, of: p}
	return out
}

// left describes what a pool's spec leaves out.
func left(s *v1.IPAddressPoolSpec, peers []string, every bool) string {
	var out []string
	if s.NodeSelector != nil {
		out = append(out, "nodeSelector "+metav1.FormatLabelSelector(s.NodeSelector))
	}
	if len(s.Announce) > 0 {
		out = append(out, "announce "+strings.Join(s.Announce, ", "))
	}
	if !every {
		out = append(out, "the peers "+events.Abbreviate(peers))
	}
	return strings.Join(out, " and ")
}

// undecided returns why the voters of a list cannot decide who answers for an address, with the remedy; empty if they can as
// far as is known. The API server does not hear of the nodes for which silent returns true.
func undecided(list quorum.List, silent func(node string) bool) string {
	if len(list.Voters) == 0 || list.Decides(func(v quorum.Voter) bool { return !silent(v.Name) }) {
		return ""
	}
	var names []string
	for _, v := range list.Voters {
		if silent(v.Name) {
			names = append(names, v.Name)
		}
	}
	return fmt.Sprintf("nothing is heard of %d of the %d nodes that decide who answers (%s), and they may still answer themselves; "+
		"make sure that their machines are off, and then: kubectl taint node %s %s=nodeshutdown:NoExecute",
		len(names), len(list.Voters), strings.Join(names, ", "), strings.Join(names, " "), corev1.TaintNodeOutOfService)
}

// merge returns the same addresses as sorted and disjoint ranges.
func merge(list []pool.Range) []pool.Range {
	slices.SortFunc(list, func(a, b pool.Range) int { return a.First.Compare(b.First) })
	var out []pool.Range
	for _, r := range list {
		last := len(out) - 1
		switch {
		case last < 0 || !out[last].Overlaps(r):
			out = append(out, r)
		case out[last].Last.Less(r.Last):
			out[last].Last = r.Last
		}
	}
	return out
}

// gap returns the first addresses of r that no node can announce, given the interfaces that
// their pool names, if any.
func (c *coverage) gap(r pool.Range, interfaces []string) (gap pool.Range, found bool) {
	switch {
	case c.speakers == 0 || c.routed:
		return gap, false
	case c.undecided != "":
		return r, true
	case len(interfaces) > 0:
		return r, !slices.ContainsFunc(interfaces, func(name string) bool { _, has := c.interfaces[name]; return has })
	case c.anyNetwork:
		return gap, false
	}
	// The first network that does not end before r.
	i, _ := slices.BinarySearchFunc(c.networks, r.First, func(n pool.Range, a netip.Addr) int { return n.Last.Compare(a) })
	for ; i < len(c.networks) && c.networks[i].Contains(r.First); i++ {
		if !c.networks[i].Last.Less(r.Last) {
			return gap, false
		}
		r.First = c.networks[i].Last.Next()
	}
	if i < len(c.networks) && c.networks[i].Overlaps(r) {
		r.Last = c.networks[i].First.Prev()
	}
	return r, true
}

// why returns why no node can announce addresses.
func (c *coverage) why(what string, interfaces []string) string {
	text := []string{}
	switch {
	case c.undecided != "":
		return "no node can announce " + what + ": " + c.undecided
	case len(c.excluded) == c.speakers:
	case len(interfaces) > 0:
		text = append(text, "no eligible node has an interface called "+events.Abbreviate(interfaces))
	case len(c.networks) == 0:
		text = append(text, "no eligible node has a BGP session, or a network for ARP and NDP")
	default:
		var networks []string
		for _, n := range c.networks[:min(len(c.networks), events.MaxListed+1)] {
			networks = append(networks, n.String())
		}
		text = append(text, "the eligible nodes are on other networks, "+events.Abbreviate(networks)+", and have no BGP session")
	}
	if len(c.excluded) > 0 {
		text = append(text, events.Abbreviate(c.excluded))
	}
	if c.without != "" {
		text = append(text, "the pool has "+c.without)
	}
	return "no node can announce " + what + ": " + strings.Join(text, "; ")
}

// coverageChanged reports whether two states of a Speaker differ in what it can announce.
func coverageChanged(a, b *v1.Speaker) bool {
	return a.Status.Announce != b.Status.Announce ||
		a.Status.Eligible != b.Status.Eligible || a.Status.Reason != b.Status.Reason || a.Status.AnyNetwork != b.Status.AnyNetwork ||
		!slices.Equal(a.Status.Networks, b.Status.Networks) || !slices.Equal(a.Status.Interfaces, b.Status.Interfaces) ||
		!slices.EqualFunc(a.Status.Peers, b.Status.Peers, func(x, y v1.PeerStatus) bool {
			return x.Name == y.Name && x.State == y.State
		})
}

// keepCoverage recomputes what the speakers can announce when they change, and has the Services synced whose addresses
// have become announceable, or no longer are. It collects changes for delay.
func (t *term) keepCoverage(ctx context.Context, delay time.Duration) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.covers:
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(delay):
		}
		t.mu.Lock()
		before := t.coverage
		t.coverage = t.nodes.coverage(t.list)
		for addr := range t.claims {
			p := t.poolOf(addr)
			if before.lacks(addr, p) != t.coverage.lacks(addr, p) {
				for _, name := range t.alloc.Holders(addr) {
					t.queue(name)
				}
			}
		}
		t.mu.Unlock()
		t.tidy.Set()
	}
}

// poolOf returns the pool of an address, nil if it is of none. The caller holds mu.
func (st *state) poolOf(addr netip.Addr) *v1.IPAddressPool {
	if p := st.pools[st.alloc.PoolOf(addr)]; p != nil {
		return p.object
	}
	return nil
}

// announceProblems returns what is wrong with addresses that no node can announce. The caller holds mu.
func (st *state) announceProblems(addrs []netip.Addr) (out []*pool.Problem) {
	for _, a := range addrs {
		if p := st.poolOf(a); st.coverage.lacks(a, p) {
			out = append(out, &pool.Problem{Kind: notAnnounceable, Message: st.coverage.of(p).why(a.String(), interfacesOf(p))})
		}
	}
	return out
}

// interfacesOf returns the interfaces that a pool names, which may be nil.
func interfacesOf(p *v1.IPAddressPool) []string {
	if p == nil {
		return nil
	}
	return p.Spec.Interfaces
}

// lacks reports whether no node can announce an address of a pool, nil for one of none.
func (c *coverage) lacks(addr netip.Addr, p *v1.IPAddressPool) bool {
	_, found := c.of(p).gap(pool.Range{First: addr, Last: addr}, interfacesOf(p))
	return found
}

// condition returns the condition PoolAnnounceable of a pool.
func (c *coverage) condition(p *usablePool) (status metav1.ConditionStatus, reason, message string) {
	if c.speakers == 0 {
		return metav1.ConditionUnknown, "NoSpeakers", "no speaker runs: route the addresses to the nodes by other means"
	}
	of := c.of(p.object)
	var gaps []string
	for _, r := range p.Ranges {
		if gap, found := of.gap(r, p.object.Spec.Interfaces); found {
			gaps = append(gaps, gap.String())
		}
	}
	if len(gaps) == 0 {
		return metav1.ConditionTrue, "Announceable", ""
	}
	return metav1.ConditionFalse, NotAnnounceable, of.why(events.Abbreviate(gaps), p.object.Spec.Interfaces)
}
