package quorum

import (
	"cmp"
	"slices"
)

// MaxVoters is the most voters that Next puts on a list: what a heartbeat costs
// grows with them, and three of seven may be lost.
const MaxVoters = 7

// Voter is a speaker that votes.
type Voter struct {
	// Name is the speaker's, which is that of its node.
	Name string `json:"name"`
	// Address is where it is reached by UDP, as "192.0.2.1:10262".
	Address string `json:"address"`
}

// List is who votes. The zero List has no voters.
type List struct {
	// Version grows by one with each change. 0 is no list.
	Version uint64 `json:"version"`
	// Voters are sorted by name.
	Voters []Voter `json:"voters"`
	// Witness is true if who holds the witness has one more vote.
	Witness bool `json:"witness,omitempty"`
}

// Size returns the number of votes.
func (l List) Size() int {
	if l.Witness {
		return len(l.Voters) + 1
	}
	return len(l.Voters)
}

// Majority returns how many votes decide.
func (l List) Majority() int { return l.Size()/2 + 1 }

// Has reports whether the speaker called name votes.
func (l List) Has(name string) bool { return l.index(name) >= 0 }

func (l List) index(name string) int {
	return slices.IndexFunc(l.Voters, func(v Voter) bool { return v.Name == name })
}

func (l List) equal(o List) bool { return l.Witness == o.Witness && slices.Equal(l.Voters, o.Voters) }

func (l List) clone() List {
	l.Voters = slices.Clone(l.Voters)
	return l
}

// Lists are the list in force and the one before it, which some speakers may still
// use.
type Lists struct {
	Current  List `json:"current"`
	Previous List `json:"previous"`
}

// Candidate is what the author of the lists knows of a speaker.
type Candidate struct {
	Voter
	// Confirmed is the version of the list that the speaker has used for longer than
	// Promise, as it reports itself (Node.Confirmed).
	Confirmed uint64
	// List is the list of that version as the speaker reports it, the zero List if it does not.
	List List
	// Gone is true if the speaker is known to be down for good: its Node is deleted,
	// or has the taint node.kubernetes.io/out-of-service. It leaves the list.
	Gone bool
	// Down is true if the API server does not hear of the speaker's node, which may run all the same. It leaves a list of more
	// than two whose other voters are still a majority, so that they are one also when another one of them dies.
	Down bool
}

// Next returns the lists that follow on l, and whether they differ from l; call it
// again when something has changed. A list differs from the one before by one
// vote at most, so that majorities of both have a voter in common. There is no
// next list before so many voters of the previous list use the current one that
// the others are no majority of the previous list: from then on, speakers that
// have not heard of the current list hold nothing. The witness knows no versions and counts as
// one that has not.
//
// A voter of l that is no candidate stays on the list: that an object is missing
// does not prove that a process is. Without a list, the first is of all
// candidates, unless one of them has confirmed a list: then the list was lost, and
// the newest one that candidates report is restored. Nothing follows while none is reported.
func Next(l Lists, candidates []Candidate) (Lists, bool) {
	byName := make(map[string]Candidate, len(candidates))
	for _, c := range candidates {
		byName[c.Name] = c
	}
	if l.Current.Version == 0 {
		return first(candidates)
	}
	if !settled(l, byName) {
		return l, false
	}
	next := l.Current.clone()
	change(&next, candidates, byName)
	if next.equal(l.Current) {
		return l, false
	}
	next.Version++
	return Lists{Current: next, Previous: l.Current}, true
}

func first(candidates []Candidate) (Lists, bool) {
	if slices.ContainsFunc(candidates, func(c Candidate) bool { return c.Confirmed > 0 && !c.Gone }) {
		return restored(candidates)
	}
	next := List{Version: 1}
	for _, c := range candidates {
		if !c.Gone && len(next.Voters) < MaxVoters {
			next.Voters = append(next.Voters, c.Voter)
		}
	}
	if n := len(next.Voters); n > 2 && n%2 == 0 {
		next.Voters = next.Voters[:n-1]
	}
	next.Witness = len(next.Voters) == 2
	next.sort()
	return Lists{Current: next}, len(next.Voters) > 0
}

// restored returns the newest list that candidates have confirmed, with a version that
// none ever had. The one after it, v+1, may have been written and not yet confirmed; v+2
// cannot, since a majority of v would have confirmed v+1 before. A majority of v has a
// voter in common with each of v+1, so the list with the voters of v may be in force
// beside v+1, and nothing follows before a majority has confirmed it.
func restored(candidates []Candidate) (Lists, bool) {
	var newest List
	confirmed, living := uint64(0), uint64(0)
	for _, c := range candidates {
		confirmed = max(confirmed, c.Confirmed)
		if c.Gone {
			continue
		}
		living = max(living, c.Confirmed)
		if c.List.Version == c.Confirmed && c.List.Version > newest.Version {
			newest = c.List.clone()
		}
	}
	if newest.Version < living {
		return Lists{}, false
	}
	next := newest.clone()
	next.Version = confirmed + 2
	return Lists{Current: next, Previous: newest}, true
}

// settled reports whether the voters that may still use the list before the current one
// are not a majority of it.
func settled(l Lists, byName map[string]Candidate) bool {
	if l.Previous.Version == 0 {
		return true
	}
	behind := 0
	if l.Previous.Witness {
		behind++
	}
	for _, v := range l.Previous.Voters {
		if c, known := byName[v.Name]; !known || !c.Gone && c.Confirmed < l.Current.Version {
			behind++
		}
	}
	return behind < l.Previous.Majority()
}

// change makes the one change that brings l nearer to what the candidates allow:
// one voter for one speaker, two and the witness for two, else an odd number.
func change(l *List, candidates []Candidate, byName map[string]Candidate) {
	alive := 0 // speakers that vote or may
	var spare []Candidate
	for _, c := range candidates {
		if c.Gone || c.Down && l.index(c.Name) < 0 {
			continue
		}
		alive++
		if i := l.index(c.Name); i < 0 {
			spare = append(spare, c)
		} else if l.Voters[i].Address != c.Address {
			l.Voters[i].Address = c.Address // who votes is the same, so this is none of the changes that count
		}
	}
	slices.SortFunc(spare, func(a, b Candidate) int { return cmp.Compare(a.Name, b.Name) })
	gone := slices.IndexFunc(l.Voters, func(v Voter) bool { return byName[v.Name].Gone })
	switch {
	case gone >= 0 && len(l.Voters) > 1:
		l.Voters = slices.Delete(l.Voters, gone, gone+1)
		return
	case gone >= 0 && len(spare) > 0: // the last voter is gone, and leaves when there is another one
		l.Voters = append(l.Voters, spare[0].Voter)
		l.sort()
		return
	}
	down := slices.IndexFunc(l.Voters, func(v Voter) bool { return byName[v.Name].Down })
	if down >= 0 && len(l.Voters) > 2 && l.Decides(func(v Voter) bool { return !byName[v.Name].Down }) {
		l.Voters = slices.Delete(l.Voters, down, down+1)
		return
	}
	unknown := 0
	for _, v := range l.Voters {
		if _, known := byName[v.Name]; !known {
			unknown++
		}
	}
	want := max(1, min(alive+unknown, MaxVoters))
	if want > 2 && want%2 == 0 {
		want--
	}
	switch n := len(l.Voters); {
	case n < want && len(spare) > 0:
		l.Voters = append(l.Voters, spare[0].Voter)
		l.sort()
	case n > want:
		l.Voters = l.Voters[:n-1]
	case l.Witness != (n == 2):
		l.Witness = !l.Witness
	}
}

// Decides reports whether the voters for which up returns true are a majority, with the witness if the list has it.
func (l *List) Decides(up func(Voter) bool) bool {
	votes := 0
	if l.Witness {
		votes++
	}
	for _, v := range l.Voters {
		if up(v) {
			votes++
		}
	}
	return votes >= l.Majority()
}

func (l *List) sort() {
	slices.SortFunc(l.Voters, func(a, b Voter) int { return cmp.Compare(a.Name, b.Name) })
}
