package preflight

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// policyDrop says of a chain that its policy loses packets.
const policyDrop = "has the policy drop"

// podDevices begins the names of the devices of Pods.
const podDevices = "fl"

// path is packets of new connections that a node cannot do without.
type path struct {
	what                string // for people
	hook                uint32
	source, destination netip.Prefix // destination is invalid for the node's own addresses
	protocol            uint8        // 0 for all
	port                uint16       // the destination's, 0 for all
}

// paths returns where packets of Pods go on each node: to other Pods there, and to the node's DNS server.
func (p Packets) paths() (out []path) {
	for _, pods := range p.Pods {
		out = append(out, path{
			what: fmt.Sprintf("TCP connections between Pods of this node (%s)", pods),
			hook: nftables.Forward, source: pods, destination: pods, protocol: nftables.Protocols()["tcp"],
		})
		if p.DNSPort != 0 {
			out = append(out, path{
				what: fmt.Sprintf("what Pods (%s) ask this node's DNS server (UDP port %d)", pods, p.DNSPort),
				hook: nftables.Input, source: pods, protocol: nftables.Protocols()["udp"], port: p.DNSPort,
			})
		}
	}
	return out
}

// loses returns why the packets of a path are lost at a base chain, "" if some of them may pass. by is the rule, without a handle if
// it is the policy of the chain.
func (w *walk) loses(base nftables.BaseChain, p *path) (by nftables.Decoded, why string) {
	if family := base.Table.Family; family != nftables.Inet && family != familyOf(p.source) {
		return by, ""
	}
	switch by, end := w.fate(base, p, 0); {
	case end == lost:
		return by, by.String() + ", and so " + p.what
	case end == passed && w.all.Dropping[base]:
		policy := nftables.Decoded{Chain: base, Verdict: nftables.Drops}
		return policy, fmt.Sprintf("%s %s, and none of its rules accepts %s", base, policyDrop, p.what)
	}
	return by, ""
}

func familyOf(p netip.Prefix) nftables.Family {
	if p.Addr().Is4() {
		return nftables.IPv4
	}
	return nftables.IPv6
}

// fate is what becomes of all packets of a path in a chain.
type fate int

const (
	passed   fate = iota // no rule decides
	accepted             // at least some of them
	lost                 // all of them
	unsure
)

// match is how many packets of a path meet a rule.
type match int

const (
	none match = iota
	some
	every
)

// fate follows the packets of a path through a chain. by is the rule by which they are lost.
func (w *walk) fate(at nftables.BaseChain, p *path, depth int) (by nftables.Decoded, end fate) {
	for _, r := range w.all.Rules[at] {
		if w.steps--; w.steps < 0 || depth > maxDepth {
			return by, unsure
		}
		m := p.meets(&r)
		if m == none {
			continue
		}
		next, out := r, lost
		switch r.Verdict {
		case "":
			continue
		case nftables.Drops, nftables.Rejects:
		case nftables.Accepts:
			return by, accepted
		case nftables.Jumps:
			if known(r.Target) {
				return by, unsure
			}
			next, out = w.fate(nftables.BaseChain{Table: at.Table, Name: r.Target}, p, depth+1)
			if out == passed && !r.Goto {
				continue
			}
		case nftables.Returns:
			out = passed
		default:
			return by, unsure
		}
		switch {
		case m == every:
			return next, out
		case out != lost:
			return by, unsure
		}
	}
	return by, passed
}

// meets returns how many of the path's packets meet a rule.
func (p *path) meets(r *nftables.Decoded) match {
	out := every
	if r.Opaque {
		out = some
	}
	if r.Family != 0 && r.Family != familyOf(p.source) {
		return none
	}
	out = min(out, within(p.source, r.Source), within(p.destination, r.Destination))
	for i := range r.Conditions {
		out = min(out, p.has(&r.Conditions[i]))
	}
	return out
}

// within returns how many addresses of a are in b, which is invalid for all addresses; a is for unknown ones.
func within(a, b netip.Prefix) match {
	switch {
	case !b.IsValid() || a.IsValid() && covers(b, a):
		return every
	case !a.IsValid() || a.Overlaps(b):
		return some
	}
	return none
}

// has returns how many of the path's packets meet a condition.
func (p *path) has(c *nftables.Condition) match {
	yes := func(b bool) match {
		if b {
			return every
		}
		return none
	}
	switch {
	case c.Field == nftables.Protocol && c.Protocol != 0 && p.protocol != 0:
		return yes(c.Protocol == p.protocol)
	case c.Field == nftables.Port && len(c.Ports) > 0 && p.port != 0:
		return yes(slices.ContainsFunc(c.Ports, func(r [2]uint16) bool { return r[0] <= p.port && p.port <= r[1] }))
	case c.Field == nftables.State && c.Mask != 0:
		return yes(c.Mask&nftables.CtStateNew != 0)
	case c.Field == nftables.Status && c.Mask == nftables.CtStatusDNAT && !p.toNode():
		return none // such packets are sent to the Pod's address
	case c.Field == nftables.OutDevice && p.toNode():
		return none
	case (c.Field == nftables.InDevice || c.Field == nftables.OutDevice) && len(c.Devices) > 0:
		out := none
		for _, d := range c.Devices {
			out = max(out, ofPod(d))
		}
		return out
	}
	return some
}

// toNode reports whether the packets are for the node itself.
func (p *path) toNode() bool { return p.hook == nftables.Input }

// ofPod returns how many devices of Pods have a name, which may end with a * for any rest.
func ofPod(name string) match {
	prefix, any := strings.CutSuffix(name, "*")
	switch {
	case any && strings.HasPrefix(podDevices, prefix):
		return every
	case strings.HasPrefix(prefix, podDevices):
		return some
	}
	return none
}
