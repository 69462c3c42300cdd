package podnet

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/link"
)

// ranges are the ranges and addresses that ranges of Nodes are checked against: a client that can write a Node must
// only be able to move packets to the Node's own Pods.
type ranges struct {
	cluster, services []netip.Prefix
	server            []netip.Addr
}

// checkOwn returns why this node cannot use its own ranges.
func (l ranges) checkOwn(own nodeFacts) error {
	for _, c := range own.cidrs {
		if err := l.check(c, own.ips); err != nil {
			return fmt.Errorf("the range of this node's pods is rejected: %w; delete the Node: the agent registers it again with another range", err)
		}
	}
	return nil
}

// check returns why no Node may have c as the range of its pods.
func (l ranges) check(c netip.Prefix, here []netip.Addr) error {
	within := func(p netip.Prefix) bool { return p.Overlaps(c) && p.Bits() <= c.Bits() }
	if !slices.ContainsFunc(l.cluster, within) {
		return fmt.Errorf("%s is outside of the cluster's pod ranges %s", c, list(l.cluster))
	}
	if i := slices.IndexFunc(l.services, c.Overlaps); i >= 0 {
		return fmt.Errorf("%s overlaps with the range of ClusterIPs %s", c, l.services[i])
	}
	if i := slices.IndexFunc(l.server, c.Contains); i >= 0 {
		return fmt.Errorf("%s contains the API server's address %s", c, l.server[i])
	}
	if i := slices.IndexFunc(here, c.Contains); i >= 0 {
		return fmt.Errorf("%s contains the address %s of the node that reports this", c, here[i])
	}
	return nil
}

// routes returns the routes for the node's own range and to the pods of others, and
// why some of those have none, by the nodes' names, and the nodes that are reached by an
// overlay. Of two nodes whose ranges overlap, or that have one key, the older one has its
// routes, on every node.
func (l ranges) routes(own nodeFacts, others []nodeFacts, paths *paths) (
	routes []link.Route, overlay []link.Peer, problems map[string]string,
) {
	problems = map[string]string{}
	keys := map[link.Key]string{own.key: own.name}
	var taken rangeSet
	for _, c := range own.cidrs {
		routes = append(routes, link.Route{Dst: c})
		taken.add(c, own.name)
	}
	others = slices.SortedFunc(slices.Values(others), func(a, b nodeFacts) int {
		return cmp.Or(a.since.Compare(b.since), strings.Compare(a.name, b.name))
	})
	for _, o := range others {
		if err := l.checkAddresses(o, own); err != nil {
			problems[o.name] = err.Error()
			continue
		}
		if owner, used := keys[o.key]; paths.encrypt && used && o.key != (link.Key{}) {
			problems[o.name] = fmt.Sprintf("its public key of WireGuard is that of node %s", owner)
			continue
		}
		keys[o.key] = o.name
		peer := link.Peer{Key: o.key}
		for _, c := range o.cidrs {
			err := l.check(c, own.ips)
			if other := taken.overlapping(c); err == nil && other != "" {
				err = fmt.Errorf("%s overlaps with the range of node %s", c, other)
			}
			if err != nil {
				problems[o.name] = err.Error()
				continue
			}
			taken.add(c, o.name)
			via, node, err := paths.way(own, o, c)
			switch {
			case err != nil:
				problems[o.name] = err.Error()
			case via.IsValid():
				routes = append(routes, link.Route{Dst: c, Via: via})
			case node.IsValid():
				peer.Addr, peer.Pods = node, append(peer.Pods, c)
			}
		}
		if len(peer.Pods) > 0 {
			overlay = append(overlay, peer)
		}
	}
	return routes, overlay, problems
}

// checkAddresses returns why the addresses of another node cannot be gateways.
func (l ranges) checkAddresses(o, own nodeFacts) error {
	for _, a := range o.ips {
		if slices.Contains(own.ips, a) {
			return fmt.Errorf("it has the address %s of node %s; delete it if it no longer exists, or give one of the two another --node-ip",
				a, own.name)
		}
		for _, p := range slices.Concat(l.cluster, l.services) {
			if p.Contains(a) {
				return fmt.Errorf("its InternalIP %s lies in the range %s of pods or Services; name its own address with --node-ip", a, p)
			}
		}
	}
	return nil
}

func list(ps []netip.Prefix) string {
	out := make([]string, len(ps))
	for i, p := range ps {
		out[i] = p.String()
	}
	return strings.Join(out, ", ")
}

// rangeSet is a set of ranges that do not overlap, in order, each with its node.
type rangeSet []nodeRange

type nodeRange struct {
	netip.Prefix
	node string
}

// search returns where c is, or belongs.
func (s rangeSet) search(c netip.Prefix) int {
	i, _ := slices.BinarySearchFunc(s, c.Addr(), func(r nodeRange, a netip.Addr) int { return r.Addr().Compare(a) })
	return i
}

// overlapping returns the node of a range that overlaps with c, "" if there is none.
func (s rangeSet) overlapping(c netip.Prefix) string {
	i := s.search(c)
	for _, r := range s[max(0, i-1):min(len(s), i+1)] {
		if r.Overlaps(c) {
			return r.node
		}
	}
	return ""
}

// add adds c, which must overlap with no range of s.
func (s *rangeSet) add(c netip.Prefix, node string) {
	*s = slices.Insert(*s, s.search(c), nodeRange{c, node})
}
