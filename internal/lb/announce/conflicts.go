package announce

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/link"
)

// Conflict is a foreign machine that uses an address.
type Conflict struct {
	Addr      netip.Addr
	Interface string
	MAC       MAC
	// Held is true if this node has found out before it answered for the address, or
	// soon after (see lateAnswer), and is silent as long as the other one answers.
	Held bool
}

// receive takes a frame that a device has received.
func (a *Announcer) receive(d *device, q question) {
	a.mu.RLock()
	a.heard(d, q)
	e := a.entries[q.target]
	if e == nil && q.sender.IsValid() { // who asks with a sender claims it, too
		if e = a.entries[q.sender]; e != nil {
			q = question{answer: true, target: q.sender, mac: q.mac}
		}
	}
	if e == nil || a.isOwn(q.mac) || !slices.Contains(e.devices, d) {
		a.mu.RUnlock()
		return
	}
	own, answers := d.link.MAC, e.state == active
	// Two that probe at the same moment both give way (RFC 5227, 2.1.1).
	rival := e.state == probing && !q.answer && !q.sender.IsValid()
	a.mu.RUnlock()
	switch {
	case q.answer || rival:
		a.claimed(d, q)
	case answers:
		a.opts.May(q.target, func() { d.send(reply(q, own)) })
	}
}

// isOwn reports whether a hardware address is this machine's.
func (a *Announcer) isOwn(mac MAC) bool {
	return slices.ContainsFunc(a.links, func(l link.Interface) bool { return l.MAC == mac })
}

// claimed handles that another machine reports having an address.
func (a *Announcer) claimed(d *device, q question) {
	if a.opts.IsPeer(q.mac) {
		return
	}
	now := time.Now()
	a.mu.Lock()
	e := a.entries[q.target]
	if e == nil {
		a.mu.Unlock()
		return
	}
	held, answered := e.state != active, e.state == active
	if answered && now.Sub(e.began) < lateAnswer {
		held = true
		a.moved[e.addr] = struct{}{}
	}
	if held {
		e.state, e.due = conflicting, now.Add(a.conflictRetry+rand.N(a.conflictRetry))
	}
	c := Conflict{Addr: q.target, Interface: d.name, MAC: q.mac, Held: held}
	before, known := a.conflicts[q.target]
	news := !known || before.Conflict != c
	a.conflicts[q.target] = seenConflict{c, now}
	report := e.reported.IsZero() || now.Sub(e.reported) >= conflictReport
	if report {
		e.reported = now
	}
	a.mu.Unlock()
	if held && answered || news {
		a.changed()
	}
	if report {
		a.opts.Conflict(c)
	}
}

// seenConflict is a Conflict and when it was seen last.
type seenConflict struct {
	Conflict
	at time.Time
}

// Conflicts returns the addresses that foreign machines use, as far as it was seen in the last minute, by address.
func (a *Announcer) Conflicts() (out []Conflict) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for addr, c := range a.conflicts {
		if e := a.entries[addr]; e == nil || e.state == active && time.Since(c.at) > conflictReport {
			delete(a.conflicts, addr)
			continue
		}
		out = append(out, c.Conflict)
	}
	slices.SortFunc(out, func(a, b Conflict) int { return a.Addr.Compare(b.Addr) })
	return out
}
