package speaker

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/announce"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// learn handles changes of the API's objects, the interfaces and the proxy's health.
func (s *Speaker) learn() {
	node, list := s.known.own()
	excluded := s.excluded(node)
	attrs, reason := "", excluded
	if excluded == "" {
		attrs, reason = s.interfaces()
	}
	if s.o.Announce != v1.AnnounceARP {
		attrs = "" // the others must not count on it to answer ARP and NDP
	}
	if attrs != s.attrs {
		s.attrs = attrs
		s.status.poke()
	}
	s.votes.change(func(now time.Duration) {
		s.node.SetList(now, list)
		s.node.SetAttrs(now, attrs)
	})
	changed := s.known.take(false)
	s.routing.set(node, excluded, changed)
	s.report(reason == "", reason)
	s.decide(changed)
}

// excluded returns why the node may not announce, empty if it may. node may be nil.
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

// interfaces returns the interfaces that the speaker reports to the others, empty with a reason if it cannot announce.
func (s *Speaker) interfaces() (attrs, reason string) {
	links := s.announcer.Links()
	if len(links) == 0 {
		if silent := s.announcer.Unanswered(); len(silent) > 0 {
			return "", "neither a gateway nor a speaker answers at " + events.Abbreviate(silent) + " yet"
		}
		return "", "the node has no interface to announce at"
	}
	return encodeLinks(links, len(s.o.Interfaces) > 0, s.known.interfaces()), ""
}

// settle follows the votes: who the members are, and which addresses this node holds.
func (s *Speaker) settle() {
	now := s.o.Now()
	s.votes.witness.Need(s.node.HasWitness(), s.node.NeedsWitness(now))
	members, ok := s.node.Members(now)
	if ok && (!s.membersKnown || !slices.Equal(members, s.members)) {
		s.membersKnown = true
		s.peers.learn(members, s.links.of)
		before := s.members
		s.members = members
		s.decideMembers(before)
	}
	s.holdings.gain()
}

// decideMembers decides again about every address, since the members have changed.
func (s *Speaker) decideMembers(before []quorum.Member) {
	s.links.bound(len(s.members))
	all := s.known.take(true)
	node, _ := s.known.own()
	s.routing.set(node, s.excluded(node), all)
	if s.o.Announce != v1.AnnounceARP {
		return
	}
	for i := range all {
		a := &all[i]
		may := func(m *quorum.Member) bool { return s.links.mayAnnounce(a, m) }
		if old := quorum.Owner(a.addr, before, may); old != "" && old != s.o.NodeName && s.holdings.since[a.addr] == nil {
			reason := fmt.Sprintf("node %s no longer announces", old)
			if slices.ContainsFunc(s.members, func(m quorum.Member) bool { return m.Name == old }) {
				reason = "addresses are redistributed over the nodes"
			}
			s.holdings.since[a.addr] = &ownership{reason: reason}
		}
	}
	s.decide(all)
}

// decide wants the addresses that should be this node's, and gives up the others.
func (s *Speaker) decide(addrs []address) {
	if s.o.Announce != v1.AnnounceARP {
		return
	}
	if !s.membersKnown {
		return // no majority of the voters was heard yet; the members will come
	}
	var add, remove []netip.Addr
	for i := range addrs {
		a := &addrs[i]
		mine := len(a.services) > 0 &&
			quorum.Owner(a.addr, s.members, func(m *quorum.Member) bool { return s.links.mayAnnounce(a, m) }) == s.o.NodeName
		switch {
		case mine && !s.node.Wants(a.addr):
			if s.holdings.since[a.addr] == nil {
				s.holdings.since[a.addr] = &ownership{reason: newAddress}
			}
			s.holdings.waiting[a.addr] = struct{}{}
			add = append(add, a.addr)
		case !mine:
			if s.node.Wants(a.addr) {
				remove = append(remove, a.addr)
			}
			delete(s.holdings.waiting, a.addr)
			delete(s.holdings.since, a.addr)
		default:
			s.holdings.rewire(a)
		}
	}
	if len(add)+len(remove) == 0 {
		return
	}
	s.announcer.Leave(remove...)
	s.votes.change(func(now time.Duration) { s.node.Want(now, add, remove) })
	s.status.poke()
}

// lookAround handles what no event reports: promises that have expired, and the witness.
func (s *Speaker) lookAround() {
	now := s.o.Now()
	s.holdings.drop(func(a netip.Addr) bool { return !s.node.Holds(now, a) })
	s.votes.change(func(time.Duration) {})
	s.metrics.observe(s.holdings.count(), s.node, now)
	s.learn()
}

// conflict reports a foreign machine that uses an address. The announcer calls it.
func (s *Speaker) conflict(c announce.Conflict) {
	what := fmt.Sprintf("the machine with hardware address %s at interface %s of node %s answers for %s, too: "+
		"take the address out of the pool, or from that machine", c.MAC, c.Interface, s.o.NodeName, c.Addr)
	if c.Held {
		what += "; it is not announced until that machine is silent"
	}
	s.metrics.conflicts.Inc()
	s.log.Error("another machine uses an address", "address", c.Addr, "mac", c.MAC, "interface", c.Interface)
	for _, ref := range s.known.one(c.Addr).refs {
		s.o.Events.Event(&ref, corev1.EventTypeWarning, "AddressConflict", what)
	}
}

// report has a new status written if it may have changed.
func (s *Speaker) report(eligible bool, reason string) {
	last := s.status.last()
	confirmed := int64(s.node.Confirmed(s.o.Now()))
	if confirmed == 0 {
		confirmed = last.VoterVersion // it is still confirmed
	}
	next := v1.SpeakerStatus{
		Eligible: eligible, Reason: reason, Announce: s.o.Announce, VoterVersion: confirmed, Endpoints: []string{s.o.Peer.String()},
		Conditions: conflictConditions(s.announcer.Conflicts(), last.Conditions), VoterList: last.VoterList,
		Absent: s.o.Front.Absent(),
	}
	if !s.status.outdated(&next) {
		return
	}
	if list := s.node.List(); int64(list.Version) == confirmed {
		if text, err := json.Marshal(list); err == nil {
			next.VoterList = string(text)
		}
	}
	for _, l := range s.announcer.Links() {
		for _, p := range l.Networks {
			if text := p.String(); !slices.Contains(next.Networks, text) {
				next.Networks = append(next.Networks, text)
			}
		}
	}
	reportInterfaces(&next, s.links.own(s.o.NodeName, s.attrs))
	s.holdings.statusOf(&next)
	s.routing.statusOf(&next)
	slices.SortStableFunc(next.Addresses, func(a, b v1.AnnouncedAddress) int {
		return netip.MustParseAddr(a.Address).Compare(netip.MustParseAddr(b.Address))
	})
	next.Bound()
	s.status.set(next)
}
