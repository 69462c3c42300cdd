package quorum

import (
	"math/bits"
	"net/netip"
	"slices"
	"time"
)

// asker is the half of a Node that asks for promises and counts on them.
type asker struct {
	random func() uint64
	list   List
	peers  []*peer // the voters of list
	attrs  string

	version uint64 // of the set of addresses asked for
	keys    map[netip.Addr]*key
	log     []touch // by version
	asked   map[netip.Addr]struct{}
	refused map[netip.Addr]struct{} // by a voter, since the last retry
	backoff map[netip.Addr]struct{} // wanted, but withdrawn until key.again
	retryAt time.Duration

	witness time.Duration // until when the witness counts
	woken   time.Duration // when what waits in backoff was last woken
}

// key is what an asker knows of an address.
type key struct {
	wanted bool // by the caller
	asked  bool // of the voters
	// version is that of the last change, or of the last retry.
	version uint64
	granted uint64 // bits of peers
	since   time.Duration
	again   time.Duration
	// tries is how often it was given up since it was last held, heldAt when that was, as far as keeps has seen.
	tries  uint
	heldAt time.Duration
	held   bool
}

// touch is a change of the requested addresses. It is superseded if the key has a newer version.
type touch struct {
	version uint64
	addr    netip.Addr
}

// peer is a voter.
type peer struct {
	voter   Voter
	bit     uint64
	session uint64
	// confirmed is the version that the voter has, upTo what the last request had.
	confirmed, upTo uint64
	until           time.Duration // when what it promised ends to count
	due             time.Duration // when to send the next request
	nonce           uint64        // of the last request
	heard           uint64
	heardAt         time.Duration
	behind          bool // it has an older list
	// answers is true if its last reply was a promise. What it promised before it ended or was
	// restarted counts until then, but it promises nothing new and sees nothing.
	answers bool
	// voting is since when it votes without a break.
	voting  time.Duration
	sent    [16]request
	view    uint64
	members []Member
}

// request is one that was sent.
type request struct {
	nonce, session, upTo uint64
	at                   time.Duration
}

func newAsker(random func() uint64) *asker {
	return &asker{
		random: random, version: 1, keys: map[netip.Addr]*key{}, asked: map[netip.Addr]struct{}{},
		refused: map[netip.Addr]struct{}{}, backoff: map[netip.Addr]struct{}{},
	}
}

// setList replaces the voters. Promises of voters that stay still count.
func (a *asker) setList(now time.Duration, l List) {
	a.list = l.clone()
	var peers []*peer
	used := uint64(0)
	for _, p := range a.peers {
		if i := l.index(p.voter.Name); i >= 0 {
			p.voter = l.Voters[i]
			p.behind, p.due = false, now
			peers = append(peers, p)
			used |= p.bit
		} else {
			a.lose(p)
		}
	}
	for _, v := range l.Voters {
		if slices.ContainsFunc(peers, func(p *peer) bool { return p.voter.Name == v.Name }) {
			continue
		}
		bit := uint64(1) << bits.TrailingZeros64(^used)
		used |= bit
		peers = append(peers, &peer{voter: v, bit: bit, nonce: a.random() >> 2, due: now, heardAt: now})
	}
	a.peers = peers
}

// lose forgets what a voter has promised.
func (a *asker) lose(p *peer) {
	p.session, p.confirmed, p.upTo, p.until, p.answers = 0, 0, 0, 0, false
	for _, k := range a.keys {
		k.granted &^= p.bit
	}
}

// want changes whether the caller wants an address.
func (a *asker) want(now time.Duration, addr netip.Addr, wanted bool) {
	k := a.keys[addr]
	if k == nil {
		if !wanted {
			return
		}
		k = &key{}
		a.keys[addr] = k
	}
	if k.wanted == wanted {
		return
	}
	k.wanted, k.tries, k.held = wanted, 0, false
	delete(a.backoff, addr)
	if k.asked != wanted {
		k.since = now
		a.ask(now, addr, k, wanted)
	}
}

// ask begins or ends to ask the voters for an address.
func (a *asker) ask(now time.Duration, addr netip.Addr, k *key, asked bool) {
	k.asked = asked
	if asked {
		a.asked[addr] = struct{}{}
	} else {
		k.granted = 0
		delete(a.asked, addr)
		delete(a.refused, addr)
	}
	a.touch(now, addr, k)
}

func (a *asker) touch(now time.Duration, addr netip.Addr, k *key) {
	a.version++
	k.version = a.version
	a.log = append(a.log, touch{a.version, addr})
	a.compact()
	for _, p := range a.peers {
		if p.session != 0 && p.upTo == p.confirmed { // nothing on its way
			p.due = min(p.due, now)
		}
	}
}

// compact bounds the log.
func (a *asker) compact() {
	if len(a.log) < 1024 || len(a.log) < 4*len(a.keys) {
		return
	}
	confirmed := a.version
	for _, p := range a.peers {
		if p.session != 0 {
			confirmed = min(confirmed, p.confirmed)
		}
	}
	kept := a.log[:0]
	for _, t := range a.log {
		k := a.keys[t.addr]
		switch {
		case k == nil || k.version != t.version:
		case !k.wanted && !k.asked && t.version <= confirmed:
			delete(a.keys, t.addr)
		default:
			kept = append(kept, t)
		}
	}
	a.log = kept
}

// request returns the next request to a voter.
func (a *asker) request(now time.Duration, p *peer) *Message {
	if now-p.heardAt > forget && p.session != 0 {
		a.lose(p)
		p.heardAt = now
	}
	p.nonce++
	m := &Message{
		Kind: Request, ListVersion: a.list.Version, Nonce: p.nonce, Session: p.session, Heard: p.heard, Attrs: a.attrs, View: p.view,
	}
	if p.behind {
		m.List = a.list
	}
	p.due = now + Heartbeat
	if p.session != 0 {
		m.Base = p.confirmed
		m.UpTo = a.changes(p, m)
		p.upTo = m.UpTo
		if m.UpTo > m.Base && now-p.heardAt < Promise {
			p.due = now + resend
		}
	}
	p.sent[p.nonce%uint64(len(p.sent))] = request{p.nonce, p.session, m.UpTo, now}
	return m
}

// changes puts what changed since the version that a voter has into m, and returns
// the version that it has after them.
func (a *asker) changes(p *peer, m *Message) uint64 {
	for i := a.after(p.confirmed); i < len(a.log); i++ {
		t := a.log[i]
		k := a.keys[t.addr]
		if k == nil || k.version != t.version {
			continue
		}
		if len(m.Adds)+len(m.Removes) == maxChanges {
			return t.version - 1
		}
		switch {
		case k.asked:
			m.Adds = append(m.Adds, t.addr)
		case m.Base != 0:
			m.Removes = append(m.Removes, t.addr)
		}
	}
	return a.version
}

// after returns the index of the first change after a version.
func (a *asker) after(version uint64) int {
	i, _ := slices.BinarySearchFunc(a.log, version+1, func(t touch, v uint64) int {
		switch {
		case t.version < v:
			return -1
		case t.version > v:
			return 1
		}
		return 0
	})
	return i
}

// reply takes a voter's reply.
func (a *asker) reply(now time.Duration, p *peer, m *Message) {
	sent := p.sent[m.Nonce%uint64(len(p.sent))]
	if sent.nonce != m.Nonce {
		return // not ours, or older than the last 16
	}
	p.heardAt = now
	voted := p.votes(now)
	switch {
	case m.ListVersion < a.list.Version:
		if !p.behind {
			p.behind, p.due = true, now
		}
		return
	case m.ListVersion > a.list.Version:
		return
	}
	p.behind = false
	if m.Nonce > p.heard {
		p.answers = m.Promised
	}
	if m.Offer != 0 && sent.session == p.session && m.Nonce > p.heard {
		// It does not know our session.
		a.lose(p)
		p.session, p.due, p.heard = m.Offer, now, m.Nonce
		return
	}
	if !m.Promised || p.session == 0 || m.Session != p.session || sent.session != p.session {
		return
	}
	if now >= p.until { // its notices did not arrive
		a.wake(now)
	}
	if !voted {
		p.voting = now
	}
	p.until = max(p.until, sent.at+Counted)
	if m.Nonce > p.heard {
		p.heard = m.Nonce
		p.view = m.View
		if m.HasMembers {
			p.members = m.Members
			a.wake(now)
		}
	}
	a.grants(now, p, sent.upTo, m.Refused)
	if p.confirmed < a.version && p.upTo <= p.confirmed {
		p.due = min(p.due, now)
	}
}

// grants records that a voter has promised the requested addresses up to a version, except
// the refused ones.
func (a *asker) grants(now time.Duration, p *peer, upTo uint64, refused []netip.Addr) {
	for i := a.after(p.confirmed); i < len(a.log) && a.log[i].version <= upTo; i++ {
		t := a.log[i]
		if k := a.keys[t.addr]; k != nil && k.version == t.version && k.asked {
			k.granted |= p.bit
		}
	}
	for _, addr := range refused {
		k := a.keys[addr]
		if k == nil || !k.asked || k.version > upTo {
			continue
		}
		k.granted &^= p.bit
		if len(a.refused) == 0 {
			a.retryAt = now + retry
		}
		a.refused[addr] = struct{}{}
	}
	p.confirmed = max(p.confirmed, upTo)
	p.upTo = max(p.upTo, p.confirmed)
}

// tick asks again for what was refused, and withdraws what others seem to have.
func (a *asker) tick(now time.Duration) {
	if len(a.refused) > 0 && now >= a.retryAt {
		again := a.refused
		a.refused = map[netip.Addr]struct{}{}
		for addr := range again {
			a.again(now, addr)
		}
		a.retryAt = now + retry
	}
	for addr := range a.backoff {
		if k := a.keys[addr]; now >= k.again {
			delete(a.backoff, addr)
			k.since = now
			a.ask(now, addr, k, true)
		}
	}
}

// again handles one refused address.
func (a *asker) again(now time.Duration, addr netip.Addr) {
	k := a.keys[addr]
	switch {
	case k == nil || !k.asked:
	case a.holds(now, k): // without that voter; it may be needed later
		if now-k.since >= Promise || !a.lasts(now, k) {
			k.since = now
			a.touch(now, addr, k)
		} else {
			a.refused[addr] = struct{}{}
		}
	case now-k.since < giveUp:
		a.touch(now, addr, k)
	default:
		k.again = now + retry + time.Duration(a.random()%uint64(maxBackoff<<min(k.tries, maxDoubled)))
		k.tries++
		a.ask(now, addr, k, false)
		a.backoff[addr] = struct{}{}
	}
}

// wake has the addresses asked for again that were given up for a while: some may be free now.
func (a *asker) wake(now time.Duration) {
	at := max(now, a.woken+retry)
	if len(a.backoff) > 0 && at == now {
		a.woken = now
	}
	for addr := range a.backoff {
		k := a.keys[addr]
		k.again, k.tries = min(k.again, at+time.Duration(a.random()%uint64(wakeWithin))), 0
	}
	for addr := range a.refused { // by a message that may be older than the news
		k := a.keys[addr]
		if k == nil {
			continue
		}
		if k.tries = 0; a.holds(now, k) {
			k.since = min(k.since, now-Promise) // it is asked for again at once
		}
	}
}

// noticed handles a Notice of a voter.
func (a *asker) noticed(now time.Duration, p *peer) {
	p.due, a.retryAt = now, now
	a.wake(now)
}

// eye returns the voter that sees for the witness: the holder's own, which is of little use in the
// first moment after a restart, when it promises nothing, else one that is heard.
func (a *asker) eye(now time.Duration, own string) (eye *peer) {
	for _, p := range a.peers {
		if p.votes(now) && (eye == nil || p.voter.Name == own) {
			eye = p
		}
	}
	return eye
}

// keeps reports whether an address is held, or was within the last Promise and is still wanted: a promise that comes late
// does not give it away.
func (a *asker) keeps(now time.Duration, k *key) bool {
	if a.holds(now, k) {
		k.held, k.heldAt, k.tries = true, now, 0
		return true
	}
	return k.wanted && k.held && now-k.heldAt < Promise
}

// unconfirmed reports whether a voter that votes has not yet promised everything that is held: what it lacks was
// asked of it and not answered, or refused.
func (a *asker) unconfirmed(now time.Duration) bool {
	for _, p := range a.peers {
		if p.votes(now) && p.confirmed < a.version {
			return true
		}
	}
	for addr := range a.refused {
		if k := a.keys[addr]; k != nil && a.holds(now, k) {
			return true
		}
	}
	return false
}

// holds reports whether promises of a majority count.
func (a *asker) holds(now time.Duration, k *key) bool {
	if !k.wanted || !k.asked {
		return false
	}
	votes := 0
	for _, p := range a.peers {
		if k.granted&p.bit != 0 && now < p.until {
			votes++
		}
	}
	if a.list.Witness && now < a.witness {
		votes++
	}
	return votes > 0 && votes >= a.list.Majority()
}

// lasts reports whether an address is held without the promises of voters that promise nothing new.
func (a *asker) lasts(now time.Duration, k *key) bool {
	votes := 0
	for _, p := range a.peers {
		if k.granted&p.bit != 0 && p.votes(now) {
			votes++
		}
	}
	if a.list.Witness && now < a.witness {
		votes++
	}
	return votes >= a.list.Majority()
}

// votes reports whether a voter's promises count and it goes on to promise.
func (p *peer) votes(now time.Duration) bool { return p.answers && now < p.until }

// reached returns how many voters vote.
func (a *asker) reached(now time.Duration) int {
	n := 0
	for _, p := range a.peers {
		if p.votes(now) {
			n++
		}
	}
	return n
}

// next returns when there is something to do.
func (a *asker) next() time.Duration {
	at := time.Duration(1<<63 - 1)
	for _, p := range a.peers {
		at = min(at, p.due)
	}
	if len(a.refused) > 0 {
		at = min(at, a.retryAt)
	}
	for addr := range a.backoff {
		at = min(at, a.keys[addr].again)
	}
	return at
}
