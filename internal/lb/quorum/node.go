package quorum

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// Envelope is a Message and where it goes.
type Envelope struct {
	To string
	// Address is where a voter is reached. It is empty for others, which are
	// reached where their last request came from.
	Address string
	Message *Message
}

// Node is one speaker: it asks the voters for addresses, and votes itself if it is
// on the list. It is not safe for concurrent use. Every time that is passed in is of one
// monotonic clock of the caller that counts while the machine is suspended.
type Node struct {
	name  string
	asker *asker
	voter *voter
	out   []Envelope
	attrs string // as the caller knows them
	// listed is when the list was replaced.
	listed time.Duration
	// seen are the members when NeedsWitness was called.
	seen map[string]bool
}

// NewNode returns a Node without a list. random returns numbers that cannot be
// guessed, and no two processes get alike.
func NewNode(name string, now time.Duration, random func() uint64) *Node {
	return &Node{name: name, asker: newAsker(random), voter: newVoter(now, random), seen: map[string]bool{}}
}

// List returns the list in force.
func (n *Node) List() List { return n.asker.list.clone() }

// SetList puts a list in force, unless it is older than the current one. The first list
// must be read from the API server, not from a cache: after a restart a voter must not
// go back to a list older than the one that it has confirmed.
func (n *Node) SetList(now time.Duration, l List) {
	if l.Version <= n.asker.list.Version {
		return
	}
	n.asker.setList(now, l)
	n.listed = now
	n.Tick(now)
}

// Confirmed returns the version of the list that has been in force for longer than
// a promise, 0 if the present one has not: everything that the Node
// promised to users of an older list has expired.
func (n *Node) Confirmed(now time.Duration) uint64 {
	if now-n.listed <= Promise {
		return 0
	}
	return n.asker.list.Version
}

// SetAttrs replaces the Node's description for the other speakers. It is empty if the
// node may not announce.
func (n *Node) SetAttrs(now time.Duration, attrs string) {
	n.attrs = attrs
	n.Tick(now)
}

// present makes the Attrs known. A Node that was just started and does not vote yet keeps them to itself,
// so that no other gives up addresses for it that it may not get; but not if the other one of two speakers
// gives up everything.
func (n *Node) present(now time.Duration) {
	attrs := n.attrs
	if n.Silent(now) && !n.abandoned(now) {
		attrs = ""
	}
	if n.asker.attrs == attrs {
		return
	}
	n.asker.attrs = attrs
	for _, p := range n.asker.peers {
		p.due = now
	}
}

// abandoned reports whether the other one of two speakers votes and may announce no longer.
func (n *Node) abandoned(now time.Duration) bool {
	return n.HasWitness() && slices.ContainsFunc(n.asker.peers, func(p *peer) bool {
		of := func(m Member) bool { return m.Name == p.voter.Name }
		return p.voter.Name != n.name && p.votes(now) && !slices.ContainsFunc(p.members, of)
	})
}

// Want begins and ends to ask for addresses. One that is no longer wanted is not
// held from this call on, and free for others when they ask.
func (n *Node) Want(now time.Duration, add, remove []netip.Addr) {
	for _, a := range remove {
		n.asker.want(now, a, false)
	}
	for _, a := range add {
		n.asker.want(now, a, true)
	}
	n.Tick(now)
}

// Holds reports whether the Node may answer for an address at this moment.
func (n *Node) Holds(now time.Duration, a netip.Addr) bool {
	k := n.asker.keys[a]
	return k != nil && n.asker.holds(now, k)
}

// Wants reports whether the Node was asked to get the address.
func (n *Node) Wants(a netip.Addr) bool {
	k := n.asker.keys[a]
	return k != nil && k.wanted
}

// Keeps reports whether the Node goes on to want an address although its Owner is another member: it holds the address, or
// has lost it so recently that only a promise may be late. An address moves when its holder fails, not when a better
// one comes.
func (n *Node) Keeps(now time.Duration, a netip.Addr) bool {
	k := n.asker.keys[a]
	return k != nil && n.asker.keeps(now, k)
}

// Return marks wanted addresses as ones of an earlier process that has ended with End and a time: they are kept as if they
// had been held a moment ago (Keeps).
func (n *Node) Return(now time.Duration, addrs []netip.Addr) {
	for _, a := range addrs {
		if k := n.asker.keys[a]; k != nil {
			k.held, k.heldAt = true, now+returnWithin
		}
	}
}

// Released reports whether every voter whose promises count has confirmed what was
// last wanted.
func (n *Node) Released(now time.Duration) bool {
	for _, p := range n.asker.peers {
		if now < p.until && p.confirmed < n.asker.version {
			return false
		}
	}
	return true
}

// Members returns who may announce as a majority of the voters see it, sorted by
// name. ok is false if the Node does not hear so many; it then knows nothing. Which of the Attrs
// of a member it returns while voters know different ones is left open.
func (n *Node) Members(now time.Duration) (members []Member, ok bool) {
	a := n.asker
	need := a.list.Majority()
	witness := a.list.Witness && now < a.witness
	heard := a.reached(now)
	if witness {
		heard++
	}
	if heard < need || a.list.Version == 0 {
		return nil, false
	}
	eye := a.eye(now, n.name)
	votes := map[string]int{}
	for _, p := range a.peers {
		if !p.votes(now) {
			continue
		}
		for _, m := range p.members {
			votes[m.Name]++
			if votes[m.Name] == 1 {
				members = append(members, m)
			}
			if witness && p == eye {
				votes[m.Name]++
			}
		}
	}
	members = slices.DeleteFunc(members, func(m Member) bool { return votes[m.Name] < need })
	slices.SortFunc(members, func(a, b Member) int { return cmp.Compare(a.Name, b.Name) })
	return members, true
}

// Reached returns the names of the voters that promise.
func (n *Node) Reached(now time.Duration) []string {
	var out []string
	for _, p := range n.asker.peers {
		if p.votes(now) {
			out = append(out, p.voter.Name)
		}
	}
	return out
}

// Silent reports whether the Node has been started so recently that it promises nothing.
func (n *Node) Silent(now time.Duration) bool { return now < n.voter.silent }

// HasWitness reports whether the Node votes together with the witness.
func (n *Node) HasWitness() bool { return n.asker.list.Witness && n.asker.list.Has(n.name) }

// NeedsWitness reports whether the Node may announce and lacks the vote of the
// witness, or will soon: a voter that may announce no longer may be about to end.
func (n *Node) NeedsWitness(now time.Duration) bool {
	a := n.asker
	if !n.HasWitness() || n.attrs == "" {
		return false
	}
	if n.Silent(now) {
		return n.abandoned(now)
	}
	if a.reached(now) < a.list.Majority() || now < a.witness && a.unconfirmed(now) {
		return true
	}
	members, _ := n.Members(now)
	for _, m := range members {
		n.seen[m.Name] = true
	}
	return slices.ContainsFunc(a.list.Voters, func(v Voter) bool {
		return n.seen[v.Name] && !slices.ContainsFunc(members, func(m Member) bool { return m.Name == v.Name })
	})
}

// SetWitness says until when the Node has the vote of the witness, 0 for no longer.
func (n *Node) SetWitness(until time.Duration) { n.asker.witness = until }

// Replaceable reports whether others can take over what the Node holds as soon as it gives that up
// and ends: another one may announce, and the votes are enough without this one's.
func (n *Node) Replaceable(now time.Duration) bool {
	a := n.asker
	if n.HasWitness() { // the other one gets the witness's vote instead of this one's, or of its previous one
		return slices.ContainsFunc(a.list.Voters, func(v Voter) bool { return v.Name != n.name && n.voter.sessions[v.Name] != nil })
	}
	votes := a.reached(now)
	if p := n.peer(n.name); p != nil && p.votes(now) {
		votes--
	}
	members, ok := n.Members(now)
	return ok && votes >= a.list.Majority() && slices.ContainsFunc(members, func(m Member) bool { return m.Name != n.name })
}

// Keepable reports whether the Node can end and return, and no address moves. If it holds some, the other voters that have
// promised them are so many that, while they keep them, no other Node can get a majority, and that others need not this one's vote.
func (n *Node) Keepable(now time.Duration, holds bool) bool {
	a := n.asker
	if !holds && !a.list.Has(n.name) {
		return true
	}
	votes := 0
	for _, p := range a.peers {
		ready := now-p.voting >= settling // one that was just restarted may first promise an address to another than its holder
		if holds {
			ready = p.confirmed == a.version
		}
		if p.voter.Name != n.name && p.votes(now) && ready {
			votes++
		}
	}
	if n.HasWitness() { // the other one has it until then
		votes++
	}
	return votes >= a.list.Majority()
}

// Alone reports whether the Node is the only voter.
func (n *Node) Alone() bool { return len(n.asker.list.Voters) == 1 && n.asker.list.Has(n.name) }

// End gives up everything and ends the sessions, so that a later Node of the same name need not wait
// for them to expire. The voters keep what it was promised for that later Node for a time, MaxAway at most.
// The Node must not be used afterwards but for Take. What that returns may be sent several times.
func (n *Node) End(now, away time.Duration) {
	for _, p := range n.asker.peers {
		if p.session != 0 {
			p.nonce++
			m := &Message{Kind: Request, Session: p.session, Nonce: p.nonce, End: true, UpTo: uint64(away.Milliseconds())}
			n.asker.lose(p) // before another one can have it
			n.send(now, p.voter.Name, m)
		}
	}
}

// Receive takes a message. A list in it is taken over by a Node that has an older
// one. One that has none may have had a newer one before it was restarted, and waits
// for SetList.
func (n *Node) Receive(now time.Duration, from string, m *Message) {
	if n.asker.list.Version != 0 && m.List.Version > n.asker.list.Version {
		n.SetList(now, m.List)
	}
	switch m.Kind {
	case Request:
		n.answer(now, from, m)
	case Reply:
		if p := n.peer(from); p != nil {
			n.asker.reply(now, p, m)
		}
	case Notice:
		if p := n.peer(from); p != nil {
			n.asker.noticed(now, p)
		}
	}
	n.Tick(now)
}

// answer votes.
func (n *Node) answer(now time.Duration, from string, m *Message) {
	if m.ListVersion != n.asker.list.Version || n.asker.list.Version == 0 {
		r := &Message{Kind: Reply, Nonce: m.Nonce}
		if m.ListVersion < n.asker.list.Version {
			r.List = n.asker.list
		}
		n.send(now, from, r)
		return
	}
	r, notify := n.voter.request(now, from, m)
	if p := n.peer(from); m.End && p != nil && n.voter.sessions[from] == nil {
		p.answers = false // it has ended
	}
	if r != nil {
		n.send(now, from, r)
	}
	n.notify(now, notify)
}

func (n *Node) notify(now time.Duration, names []string) {
	for _, name := range names {
		n.send(now, name, &Message{Kind: Notice})
	}
}

func (n *Node) peer(name string) *peer {
	for _, p := range n.asker.peers {
		if p.voter.Name == name {
			return p
		}
	}
	return nil
}

// send puts a message into the queue, or takes it at once if it is for the Node itself.
func (n *Node) send(now time.Duration, to string, m *Message) {
	m.ListVersion = n.asker.list.Version
	if to != n.name {
		e := Envelope{To: to, Message: m}
		if p := n.peer(to); p != nil {
			e.Address = p.voter.Address
		}
		n.out = append(n.out, e)
		return
	}
	p := n.peer(to)
	switch {
	case m.Kind == Request:
		n.answer(now, to, m)
	case p == nil:
	case m.Kind == Reply:
		n.asker.reply(now, p, m)
	case m.Kind == Notice:
		n.asker.noticed(now, p)
	}
}

// Tick does what is due.
func (n *Node) Tick(now time.Duration) {
	n.notify(now, n.voter.expire(now))
	n.present(now)
	// Each pass sends what the replies of the Node's own voter have made due. What is
	// left after some passes is sent by the next Tick.
	for range 8 {
		n.asker.tick(now)
		sent := false
		for _, p := range n.asker.peers {
			if now >= p.due {
				n.send(now, p.voter.Name, n.asker.request(now, p))
				sent = true
			}
		}
		if !sent {
			return
		}
	}
}

// Next returns when Tick must be called, at the latest.
func (n *Node) Next() time.Duration {
	at := min(n.voter.next(), n.asker.next())
	if n.attrs != n.asker.attrs {
		at = min(at, n.voter.silent)
	}
	return at
}

// Take returns the messages to send and forgets them.
func (n *Node) Take() []Envelope {
	out := n.out
	n.out = nil
	return out
}
