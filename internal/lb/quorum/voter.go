package quorum

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// voter is the half of a Node that makes promises.
type voter struct {
	random func() uint64
	// silent is until when it promises nothing, since it may have before it started.
	silent   time.Duration
	sessions map[string]*session
	offers   map[string]uint64 // session numbers drawn for speakers, not used yet
	grants   map[netip.Addr]*session
	// away are by name the speakers that have ended and will return: what is kept for them.
	away map[string]*session

	view        []Member // sorted by name
	viewVersion uint64
	packed      []byte // the view, encoded when it is first asked for
	dirty       bool   // the view is
}

// session is what a voter has promised to one speaker.
type session struct {
	speaker   string
	number    uint64
	nonce     uint64 // of the last request
	confirmed uint64 // version of the speaker's set
	keys      map[netip.Addr]struct{}
	expires   time.Duration
	// heard is the last request of which the speaker has seen the reply, heardAt is
	// when it said so: a speaker that hears nothing can hold nothing.
	heard   uint64
	heardAt time.Duration
	attrs   string
	visible bool // in the view
	waits   bool // it was refused an address since it was last notified
	away    bool // it is in voter.away: the speaker counts on nothing
}

func newVoter(now time.Duration, random func() uint64) *voter {
	return &voter{
		random: random, silent: now + Promise, viewVersion: random(),
		sessions: map[string]*session{}, offers: map[string]uint64{}, grants: map[netip.Addr]*session{}, away: map[string]*session{},
	}
}

// request returns the reply to a request, nil if there is none, and whom to notify
// that something has changed.
func (v *voter) request(now time.Duration, from string, m *Message) (r *Message, notify []string) {
	notify = v.expire(now)
	r = &Message{Kind: Reply, Nonce: m.Nonce}
	if now < v.silent {
		return r, notify
	}
	s := v.sessions[from]
	switch {
	case m.End && (s == nil || s.number != m.Session || m.Nonce <= s.nonce):
		return nil, notify // of an earlier session, which gets no offer that would replace a later one
	case m.End:
		freed := v.leave(now, s, min(time.Duration(m.UpTo)*time.Millisecond, MaxAway))
		return nil, append(notify, v.changed(now, freed, nil)...)
	case s == nil && (m.Session == 0 || m.Session != v.offers[from]):
		// Never the number of an earlier offer: a process that has died since may have
		// used it in requests that are still on their way.
		v.offers[from] = v.random() | 1
		r.Offer = v.offers[from]
		return r, notify
	case s == nil:
		delete(v.offers, from)
		s = &session{speaker: from, number: m.Session, keys: map[netip.Addr]struct{}{}, heardAt: now}
		v.sessions[from] = s
	case s.number != m.Session:
		return r, notify // it has to expire
	case m.Nonce <= s.nonce:
		return nil, notify
	}
	v.dirty = v.dirty || s.attrs != m.Attrs
	s.nonce, s.expires, s.attrs = m.Nonce, now+Promise, m.Attrs
	if m.Heard > s.heard {
		s.heard, s.heardAt = m.Heard, now
	}
	freed := v.update(s, m, r)
	r.Session, r.Confirmed, r.Promised = s.number, s.confirmed, true
	notify = append(notify, v.changed(now, freed, s)...)
	if r.View = v.viewVersion; m.View != v.viewVersion {
		if v.packed == nil {
			v.packed = packMembers(v.view)
		}
		r.HasMembers, r.Members, r.packed = true, v.view, v.packed
	}
	return r, notify
}

// update makes the changes of a request, and reports whether addresses became free.
func (v *voter) update(s *session, m, r *Message) (freed bool) {
	if m.Base == 0 { // the speaker knows of no promise yet: what a late message may have added is not wanted
		for k := range s.keys {
			if !slices.Contains(m.Adds, k) {
				delete(s.keys, k)
				delete(v.grants, k)
				freed = true
			}
		}
	}
	for _, k := range m.Removes {
		if v.grants[k] == s {
			delete(s.keys, k)
			delete(v.grants, k)
			freed = true
		}
	}
	for _, k := range m.Adds {
		switch g := v.grants[k]; {
		case g == nil, g.away && g.speaker == s.speaker:
			if g != nil {
				delete(g.keys, k)
			}
			v.grants[k] = s
			s.keys[k] = struct{}{}
		case g == s:
		default:
			r.Refused = append(r.Refused, k)
			s.waits = true
		}
	}
	s.confirmed = max(s.confirmed, m.UpTo)
	return freed
}

// expire ends the sessions that have expired, and returns whom to notify.
func (v *voter) expire(now time.Duration) []string {
	freed := false
	for _, s := range v.sessions {
		if now < s.expires {
			continue
		}
		freed = v.drop(s) || freed
	}
	for name, s := range v.away {
		if now >= s.expires {
			freed = v.free(s) || freed
			delete(v.away, name)
		}
	}
	return v.changed(now, freed, nil)
}

// drop forgets a session, and reports whether addresses became free.
func (v *voter) drop(s *session) (freed bool) {
	delete(v.sessions, s.speaker)
	v.dirty = true
	return v.free(s)
}

// free forgets what a session was promised.
func (v *voter) free(s *session) (freed bool) {
	for k := range s.keys {
		delete(v.grants, k)
		freed = true
	}
	return freed
}

// leave ends the session of a speaker that may return: for a time no other one is promised what it had.
func (v *voter) leave(now time.Duration, s *session, keep time.Duration) (freed bool) {
	if keep <= 0 {
		return v.drop(s)
	}
	if earlier := v.away[s.speaker]; earlier != nil {
		freed = v.free(earlier)
	}
	delete(v.sessions, s.speaker)
	v.dirty = true
	kept := &session{speaker: s.speaker, away: true, keys: s.keys, expires: now + keep}
	v.away[s.speaker] = kept
	for k := range kept.keys {
		v.grants[k] = kept
	}
	return freed
}

// changed returns whom to notify: all speakers if the view has changed, else the speakers
// that wait for an address if some were freed, but for the one that has freed them: it does not wait for these.
func (v *voter) changed(now time.Duration, freed bool, by *session) (notify []string) {
	for _, s := range v.sessions {
		visible := s.attrs != "" && now < s.heardAt+Promise
		v.dirty = v.dirty || visible != s.visible
		s.visible = visible
	}
	all := v.dirty && v.look()
	v.dirty = false
	if !all && !freed {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(v.sessions)) {
		if s := v.sessions[name]; all || s.waits && s != by {
			s.waits = false
			notify = append(notify, name)
		}
	}
	return notify
}

// look computes the view again, and reports whether it has changed.
func (v *voter) look() bool {
	view := make([]Member, 0, len(v.sessions))
	for _, s := range v.sessions {
		if s.visible {
			view = append(view, Member{s.speaker, s.attrs})
		}
	}
	slices.SortFunc(view, func(a, b Member) int { return cmp.Compare(a.Name, b.Name) })
	if slices.Equal(view, v.view) {
		return false
	}
	v.view, v.packed = view, nil
	v.viewVersion++
	return true
}

// next returns when expire has something to do.
func (v *voter) next() time.Duration {
	at := time.Duration(1<<63 - 1)
	for _, s := range v.sessions {
		at = min(at, s.expires)
		if s.visible {
			at = min(at, s.heardAt+Promise)
		}
	}
	for _, s := range v.away {
		at = min(at, s.expires)
	}
	return at
}
