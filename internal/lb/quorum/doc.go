// Package quorum decides which speaker may answer for an address, by votes that
// expire. It is pure: it knows no clock, socket, lock or API. The caller passes in
// what arrives and what time it is, and sends what Take returns.
//
// # Why there are never two holders
//
// A voter promises an address to one speaker at a time, and keeps the promise for
// Promise by its own clock, counted from when it received the request. The speaker
// counts on it for the shorter Counted by its own clock, from when it sent that
// request, which was earlier. So while a speaker counts on a promise the voter
// keeps it, as long as the rates of their clocks differ by less than a tenth; what
// the clocks show does not matter. A speaker holds an address while promises of a
// majority of the voters count. Any two majorities have a voter in common, of one
// list or of two neighbouring lists (see Next), and that voter has promised the
// address to one of the two.
//
// What could break that, and why it does not:
//
//   - A voter that restarts has forgotten its promises: it makes none for Promise.
//   - A process that was stopped goes on: the clock has counted that time, so that
//     what it counted on has expired. Requests that waited in its socket are
//     promised from when they are read, which is late but never early.
//   - Messages that are late, duplicated or out of order: a session is opened with
//     a number that the voter has drawn for it, ends with its promise, and only
//     accepts growing nonces. A reply counts from the request that it names. An
//     address that was withdrawn and asked for again has a new version, which an
//     old reply does not cover.
//   - Two processes with one name: a session is not replaced before it has expired.
//   - A speaker that promises to return: it counts on nothing from then on. Its
//     addresses are only kept from others, until it has asked for them again, or
//     until MaxAway has passed.
//
// # Cost
//
// A promise is extended for everything that a speaker was promised at once, so that
// the five requests in a second are as small for ten thousand addresses as for one.
// A change is sent once, as the addresses that changed since the version that the
// voter has confirmed.
package quorum

import "time"

const (
	// Promise is how long a voter keeps a promise, by its clock, from when it
	// received the request.
	Promise = time.Second
	// Counted is how long a speaker counts on a promise, by its clock, from when it
	// sent the request.
	Counted = Promise * 9 / 10
	// Heartbeat is how often a speaker asks every voter.
	Heartbeat = 200 * time.Millisecond

	// resend is after how long a request with changes is repeated without a reply.
	resend = 60 * time.Millisecond
	// retry is after how long an address that a voter has refused is asked for again.
	retry = 100 * time.Millisecond
	// giveUp is how long a speaker goes on asking for an address that others are
	// promised by some voters. Then it withdraws for a random time up to
	// maxBackoff, so that two that split the votes do not block each other. That is
	// doubled each time, up to maxDoubled times: another speaker may keep the address
	// for good. A voter's notice that addresses are free ends it (wakeWithin).
	giveUp     = 3 * retry
	maxBackoff = 500 * time.Millisecond
	maxDoubled = 6
	// wakeWithin is the random time in which a speaker asks again after a notice. All
	// that wait get it at the same moment.
	wakeWithin = 50 * time.Millisecond
	// forget is after how long without a reply a speaker opens a new session.
	forget = 10 * time.Second
	// MaxAway is for how long at most voters keep the addresses of a speaker that has
	// promised to return.
	MaxAway = 10 * time.Second
	// settling is how long after a voter has begun to vote what others hold is promised by it as well: a speaker that waited for an
	// address, and got this vote, gives up in that time.
	settling = Promise / 2
	// returnWithin is how long a speaker that has returned goes on to ask for what was kept for it: its own voter promises
	// nothing for Promise, and of two voters it is needed.
	returnWithin = 2 * Promise
)
