package quorum

import "time"

// WitnessTerm is how long a holder keeps the witness that it does not renew, by the
// clocks of the others. The holder counts on nine tenths of it, from when it sent
// its last write.
//
// It bounds how long the addresses of a holder that dies are without an owner, and how
// long the API server may be away while one of two speakers is dead.
const WitnessTerm = 1500 * time.Millisecond

// LongestTerm is the longest WitnessTerm that a build has had: of those before this one.
const LongestTerm = 4 * time.Second

const (
	// witnessCalm is how long the voters have to be enough without the witness before
	// it is given back.
	witnessCalm = time.Second
)

// WitnessAction is what to write into the object that is the witness, on the
// condition that it is still of the version that was observed.
type WitnessAction int

// The actions.
const (
	WitnessNothing WitnessAction = iota
	// WitnessTake writes the own identity, to take or to renew it.
	WitnessTake
	// WitnessRelease writes that it has no holder: by the one that it had, or by another one when that one's term has expired.
	WitnessRelease
)

// Witness is the rule by which speakers hold the witness one at a time: an object of the API
// server that names its holder, and is written only if it has not been
// written since it was read. In normal times it is not written.
type Witness struct {
	self    string
	term    time.Duration // WitnessTerm, but in tests
	seen    bool
	holder  string
	version string
	theirs  time.Duration // the term of the holder
	seenAt  time.Duration // when this version was first observed
	until   time.Duration
	wrote   time.Duration
	needed  time.Duration // when it was last needed
}

// NewWitness returns the rule for a process. self is its identity, which no other
// process has, not even a later one of the same speaker.
func NewWitness(self string) *Witness { return &Witness{self: self, term: WitnessTerm} }

// Observe records a read object: the holder, "" if there is none, its term, which counts if it is longer than
// WitnessTerm, and a version that changes with every write.
func (w *Witness) Observe(now time.Duration, holder string, term time.Duration, version string) {
	if w.seen && w.version == version {
		return
	}
	w.seen, w.holder, w.theirs, w.version, w.seenAt = true, holder, term, version, now
	if holder != w.self {
		w.until = 0
	}
}

// Next returns what to write, and of which version of the object.
func (w *Witness) Next(now time.Duration, needed bool) (WitnessAction, string) {
	if needed {
		w.needed = now
	}
	mine := w.holder == w.self
	expired := !mine && w.holder != "" && now-w.seenAt >= max(w.term, w.theirs)
	switch {
	case !w.seen:
	case needed && (w.holder == "" || expired):
		return WitnessTake, w.version
	case expired: // for a process that will need it and has not seen how long nothing was written
		return WitnessRelease, w.version
	case mine && now-w.needed >= witnessCalm:
		w.until = 0 // before the write, so that it is not counted on when another may have it
		return WitnessRelease, w.version
	case mine && now-w.wrote >= w.term/5:
		return WitnessTake, w.version
	}
	return WitnessNothing, ""
}

// Wrote records that WitnessTake was written: sent is when the request was sent,
// version what the object has now.
func (w *Witness) Wrote(now, sent time.Duration, version string) {
	w.seen, w.holder, w.version, w.seenAt, w.wrote = true, w.self, version, now, sent
	w.until = max(w.until, sent+w.term*9/10)
}

// Until returns until when the witness counts, for Node.SetWitness.
func (w *Witness) Until() time.Duration { return w.until }

// Holder returns who holds the witness as far as it is known, "" if it is free.
func (w *Witness) Holder() string { return w.holder }

// End is Next for a process that ends: it counts on the witness no longer, and gives it back.
func (w *Witness) End() (WitnessAction, string) {
	w.until = 0
	if !w.seen || w.holder != w.self {
		return WitnessNothing, ""
	}
	return WitnessRelease, w.version
}
