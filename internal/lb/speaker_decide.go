package lb

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/lb/announce"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// memberLink is an interface of a speaker's node as it tells the others (quorum.Member.Attrs,
// a list of these as JSON).
type memberLink struct {
	Name     string         `json:"n"`
	MAC      []byte         `json:"m"`
	Networks []netip.Prefix `json:"p,omitempty"`
	// Any is true for an interface of SpeakerOptions: its networks do not matter.
	Any bool `json:"a,omitempty"`
}

// maxLinks and maxNetworks bound what a speaker says of itself.
const (
	maxLinks    = 16
	maxNetworks = 8
)

// encodeLinks returns what a speaker tells of its interfaces: those with a network, and those
// called names. Pods' interfaces have no network, and there may be many.
func encodeLinks(links []link.Interface, anyNetwork bool, names []string) string {
	var out []memberLink
	for _, l := range links {
		if len(out) < maxLinks && (anyNetwork || len(l.Networks) > 0 || slices.Contains(names, l.Name)) {
			out = append(out, memberLink{l.Name, l.MAC[:], l.Networks[:min(len(l.Networks), maxNetworks)], anyNetwork})
		}
	}
	text, _ := json.Marshal(out) // of strings
	return string(text)
}

// attrsLinks returns the interfaces of a member.
func (s *Speaker) attrsLinks(m *quorum.Member) []memberLink {
	if l, known := s.links[m.Attrs]; known {
		return l
	}
	var l []memberLink
	if err := json.Unmarshal([]byte(m.Attrs), &l); err != nil {
		s.log.Warn("cannot read the interfaces of a speaker; it gets no addresses", "node", m.Name, "err", err)
	}
	s.links[m.Attrs] = l
	return l
}

// mayAnnounce reports whether a member's node can and may announce an address.
func (s *Speaker) mayAnnounce(a *address, m *quorum.Member) bool {
	if a.local && !slices.Contains(a.nodes, m.Name) {
		return false
	}
	return slices.ContainsFunc(s.attrsLinks(m), func(l memberLink) bool {
		return l.Any && len(a.ways.interfaces) == 0 ||
			announce.Reaches(link.Interface{Name: l.Name, Networks: l.Networks}, a.addr, a.ways.interfaces)
	})
}

// learn takes what has changed in the API, in the interfaces or in the proxy's health.
func (s *Speaker) learn() {
	node, list := s.known.own()
	attrs, reason := s.eligible(node)
	if s.o.Announce != AnnounceARP {
		attrs = "" // the others must not count on it to answer ARP and NDP
	}
	if attrs != s.attrs {
		s.attrs = attrs
		s.status.poke()
	}
	s.vote(func(now time.Duration) {
		s.node.SetList(now, list)
		s.node.SetAttrs(now, attrs)
	})
	changed := s.known.take(false)
	s.route(node, s.excluded(node), changed)
	s.report(reason == "", reason)
	s.decide(changed)
}

// excluded returns why the node may not announce, empty if it may.
func (s *Speaker) excluded(node *corev1.Node) (reason string) {
	if node == nil {
		return "the node has no Node object"
	}
	if !node.DeletionTimestamp.IsZero() {
		return "the Node object is being deleted"
	}
	if _, excluded := node.Labels[corev1.LabelNodeExcludeBalancers]; excluded {
		return "the node has the label " + corev1.LabelNodeExcludeBalancers
	}
	for _, t := range node.Spec.Taints {
		if t.Key == corev1.TaintNodeOutOfService {
			return "the node has the taint " + t.Key
		}
	}
	if ok, why := s.health.get(); !ok {
		return why
	}
	return ""
}

// eligible returns what the speaker says of itself, empty with a reason if its node
// may not announce.
func (s *Speaker) eligible(node *corev1.Node) (attrs, reason string) {
	if reason := s.excluded(node); reason != "" {
		return "", reason
	}
	links := s.announce.Links()
	if len(links) == 0 {
		if silent := s.announce.Unanswered(); len(silent) > 0 {
			return "", "neither a gateway nor a speaker answers at " + abbreviated(silent) + " yet"
		}
		return "", "the node has no interface to announce at"
	}
	return encodeLinks(links, len(s.o.Interfaces) > 0, s.known.interfaces()), ""
}

// neighbours returns the addresses of the other voters if other nodes may announce, or if it is not known whether
// they may (announce.Options): a node without a majority asks for the witness only when it has an interface.
func (s *Speaker) neighbours() (addrs []netip.Addr, ok bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	members, ok := s.node.Members(s.o.Now())
	if ok && !slices.ContainsFunc(members, func(m quorum.Member) bool { return m.Name != s.o.NodeName }) {
		return nil, true
	}
	for _, v := range s.node.List().Voters {
		if at, err := netip.ParseAddrPort(v.Address); err == nil && v.Name != s.o.NodeName {
			addrs = append(addrs, at.Addr())
		}
	}
	return addrs, ok
}

// reportInterfaces adds to a status the interfaces at which the speaker answers.
func (s *Speaker) reportInterfaces(status *v1.SpeakerStatus) {
	if s.attrs == "" {
		return
	}
	for _, l := range s.attrsLinks(&quorum.Member{Name: s.o.NodeName, Attrs: s.attrs}) {
		status.Interfaces = append(status.Interfaces, l.Name)
		status.AnyNetwork = status.AnyNetwork || l.Any
	}
}

// settle follows what the voters say: who the members are, and what this node holds.
func (s *Speaker) settle() {
	now := s.o.Now()
	s.witness.need(s.node.HasWitness(), s.node.NeedsWitness(now))
	members, ok := s.node.Members(now)
	if ok && (!s.membersKnown || !slices.Equal(members, s.members)) {
		s.membersKnown = true
		s.peers.learn(members, s.attrsLinks)
		before := s.members
		s.members = members
		s.decideMembers(before)
	}
	s.gain()
}

// decideMembers decides again about every address, since the members have changed.
func (s *Speaker) decideMembers(before []quorum.Member) {
	if len(s.links) > 4*len(s.members)+16 {
		clear(s.links)
	}
	all := s.known.take(true)
	node, _ := s.known.own()
	s.route(node, s.excluded(node), all)
	if s.o.Announce != AnnounceARP {
		return
	}
	for i := range all {
		a := &all[i]
		may := func(m *quorum.Member) bool { return s.mayAnnounce(a, m) }
		if old := quorum.Owner(a.addr, before, may); old != "" && old != s.o.NodeName && s.since[a.addr] == nil {
			reason := fmt.Sprintf("node %s announces no longer", old)
			if slices.ContainsFunc(s.members, func(m quorum.Member) bool { return m.Name == old }) {
				reason = "addresses are spread over the nodes again"
			}
			s.since[a.addr] = &ownership{reason: reason}
		}
	}
	s.decide(all)
}

// decide wants the addresses that should be this node's, and gives up the others.
func (s *Speaker) decide(addrs []address) {
	if s.o.Announce != AnnounceARP {
		return
	}
	if !s.membersKnown {
		return // no majority of the voters was heard yet; the members will come
	}
	var add, remove []netip.Addr
	for i := range addrs {
		a := &addrs[i]
		mine := len(a.services) > 0 &&
			quorum.Owner(a.addr, s.members, func(m *quorum.Member) bool { return s.mayAnnounce(a, m) }) == s.o.NodeName
		switch {
		case mine && !s.node.Wants(a.addr):
			if s.since[a.addr] == nil {
				s.since[a.addr] = &ownership{reason: newAddress}
			}
			s.waiting[a.addr] = struct{}{}
			add = append(add, a.addr)
		case !mine:
			if s.node.Wants(a.addr) {
				remove = append(remove, a.addr)
			}
			delete(s.waiting, a.addr)
			delete(s.since, a.addr)
		default:
			s.rewire(a)
		}
	}
	if len(add)+len(remove) == 0 {
		return
	}
	s.announce.Leave(remove...)
	s.vote(func(now time.Duration) { s.node.Want(now, add, remove) })
	s.status.poke()
}

// wanted returns everything that the speaker wants.
func (s *Speaker) wanted() (out []netip.Addr) {
	for a := range s.since {
		out = append(out, a)
	}
	return out
}

func names(services []svc.Name) string {
	var out []string
	for _, n := range services {
		out = append(out, n.String())
	}
	return strings.Join(out, ",")
}

// programmed reports whether the proxy forwards for an address, as far as the speaker
// can know.
func (s *Speaker) programmed(a *address) bool {
	if slices.ContainsFunc(a.services, func(n svc.Name) bool { return !s.proxying.ready(n) }) {
		return false
	}
	if slices.ContainsFunc(a.services, s.proxying.serves) {
		return true
	}
	if s.o.Programmed == nil {
		return true
	}
	family := svc.IPv4
	if a.addr.Is6() {
		family = svc.IPv6
	}
	return slices.ContainsFunc(a.ports, func(p svc.PortName) bool { return s.o.Programmed(p, family, a.addr) })
}

// drop ends announcing the addresses for which lost is true, which others may have by now.
func (s *Speaker) drop(lost func(netip.Addr) bool) {
	var gone []netip.Addr
	for addr, o := range s.since {
		if o.taken && lost(addr) {
			o.taken, o.announced = false, time.Time{}
			o.reason = "heard by a majority of the speakers again"
			s.waiting[addr] = struct{}{}
			gone = append(gone, addr)
		}
	}
	if len(gone) > 0 {
		s.announce.Leave(gone...)
		s.status.poke()
	}
}

// lookAround does what nothing calls for: promises that have expired silently, and
// the witness.
func (s *Speaker) lookAround() {
	now := s.o.Now()
	s.drop(func(a netip.Addr) bool { return !s.node.Holds(now, a) })
	s.vote(func(time.Duration) {})
	s.observe(now)
	s.learn()
}

// conflict reports a foreign machine that uses an address.
func (s *Speaker) conflict(c announce.Conflict) {
	what := fmt.Sprintf("the machine with hardware address %s at interface %s of node %s answers for %s, too: "+
		"take the address out of the pool, or from that machine", c.MAC, c.Interface, s.o.NodeName, c.Addr)
	if c.Held {
		what += "; it is not announced before that machine is silent"
	}
	s.metrics.conflicts.Inc()
	s.log.Error("another machine uses an address", "address", c.Addr, "mac", c.MAC, "interface", c.Interface)
	for _, ref := range s.known.one(c.Addr).refs {
		s.events.Event(&ref, corev1.EventTypeWarning, "AddressConflict", what)
	}
}
