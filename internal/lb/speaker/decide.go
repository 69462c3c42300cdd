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
	excluded := s.barred(node)
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
	s.unused.set(changed, s.routing.networks(), s.announcer.Links())
	s.report(reason == "", reason)
	s.comeBack()
	s.decide(append(changed, s.holdings.lostGuests()...))
	if request, ok := s.known.rebalanced(); ok && (s.spread == nil || *s.spread != request) {
		if s.spread != nil && request != "" {
			s.log.Info("rebalancing: addresses that other nodes should have go there", "addresses", len(s.holdings.guests))
			s.rebalance()
		}
		s.spread = &request
	}
}

// rebalance gives the addresses that other nodes should have to them, also to nodes that take part within the next moments.
func (s *Speaker) rebalance() {
	s.holdings.spread = s.o.Now() + rebalancePeriod
	var all []address
	for addr := range s.holdings.guests {
		all = append(all, s.known.one(addr))
	}
	s.decide(all)
}

// comeBack asks for what this node's earlier process had when it ended to be restarted: the others keep that for it.
func (s *Speaker) comeBack() {
	if len(s.returning) == 0 || s.attrs == "" || !s.known.Listed() {
		return
	}
	self := quorum.Member{Name: s.o.NodeName, Attrs: s.attrs}
	var add []netip.Addr
	for _, addr := range s.returning {
		a := s.known.one(addr)
		if len(a.services) > 0 && s.links.mayAnnounce(&a, &self) {
			s.holdings.since[addr] = &ownership{reason: "it was restarted"}
			s.holdings.waiting[addr] = struct{}{}
			add = append(add, addr)
		}
	}
	s.returning = nil
	s.votes.change(func(now time.Duration) {
		s.node.Want(now, add, nil)
		s.node.Return(now, add)
	})
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

// barred returns why the node may not announce now, empty if it may: it is excluded, or has not returned yet. Only the loop uses it.
func (s *Speaker) barred(node *corev1.Node) (reason string) {
	reason = s.excluded(node)
	if reason == "" && s.idle() && unheard(node) {
		reason = "the API server does not hear of the node"
	}
	return reason
}

// idle reports whether the speaker announces nothing, as on a node that returns.
func (s *Speaker) idle() bool { return s.holdings.count() == 0 && s.routing.oldest(nil).IsZero() }

// unheard reports whether the API server does not hear of a Node: one that returns takes part only when it does again, since until
// then it is not known whether others reach it. One that announces goes on.
func unheard(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
	})
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
	s.routing.set(node, s.barred(node), all)
	s.unused.set(all, s.routing.networks(), s.announcer.Links())
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
	if gone := departed(before, s.members); len(gone) == 1 {
		s.holdings.lastOf(gone[0])
	}
	s.decide(all)
}

// departed returns who is no longer among the members.
func departed(before, now []quorum.Member) (gone []string) {
	for _, b := range before {
		if !slices.ContainsFunc(now, func(m quorum.Member) bool { return m.Name == b.Name }) {
			gone = append(gone, b.Name)
		}
	}
	return gone
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
		mine := s.mine(a)
		switch {
		case mine && !s.node.Wants(a.addr):
			s.holdings.want(a)
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

// mine reports whether this node should announce an address, or keeps it.
func (s *Speaker) mine(a *address) bool {
	delete(s.holdings.guests, a.addr)
	if len(a.services) == 0 {
		return false
	}
	may := func(m *quorum.Member) bool { return s.links.mayAnnounce(a, m) }
	if quorum.Owner(a.addr, s.members, may) == s.o.NodeName {
		return true
	}
	self := quorum.Member{Name: s.o.NodeName, Attrs: s.attrs}
	if s.attrs == "" || !may(&self) || !s.holdings.keeps(a.addr) {
		return false
	}
	s.holdings.guests[a.addr] = struct{}{}
	return true
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
		Absent: s.o.Front.Absent(), NoMesh: s.o.Front.NoMesh(), Gateways: s.o.Front.Gateways(),
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
	addAnnounced(&next)
	next.Bound()
	s.status.set(next)
}
