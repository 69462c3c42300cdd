package nodes

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/peers"
)

const (
	// refuteWithin is how long a suspect has to renew its Lease: its agent does so as soon as
	// it sees the annotation.
	refuteWithin = 1500 * time.Millisecond
	// renewalOverdue is how long after its last renewal a Node that has refuted one suspicion can
	// be suspected again, and after which a watcher's report does not count. Agents renew
	// every 10 s.
	renewalOverdue = 12 * time.Second
)

// liveness decides which Nodes are alive, suspect or dead, from their heartbeats and from the reports of the
// nodes that watch them (docs/design/011-dead-nodes.md). A Node is alive while it sends heartbeats. It is
// suspect while most of its watchers report it and it has not refuted that by a heartbeat. It is dead, until
// the next heartbeat, if it has sent none for the grace period, or did not refute a suspicion in time.
//
// Time runs by this process's clock from when it saw a heartbeat: clocks of machines differ, and
// after a start every Node has the whole grace period. A liveness calls no API and may be used concurrently.
type liveness struct {
	grace, refute time.Duration

	mu       sync.Mutex
	nodes    map[string]*nodeState
	detector peers.Detector
	members  map[string]bool // Nodes whose agents watch each other; true for Nodes that are up
	changed  bool            // members has changed since the detector got it
	reports  map[string]string
	mass     bool // the last review found too many suspects
}

// nodeState is what a liveness knows of a Node.
type nodeState struct {
	last      [2]string  // the time of the last heartbeat from each source
	seen      time.Time  // when this process saw one of them change
	renewed   bool       // one has changed since this process read it first
	suspicion *suspicion // nil if most watchers do not report the Node
	dead      *cause     // nil unless the Node is dead
	marked    bool       // the dead Node has been marked as unreachable
	version   string     // of its agent
	// notReadySince is when this process saw first that the Node, which is alive, reports itself as not Ready; zero if it does not.
	// withdrawn is set when its Pods have been taken out of service for that.
	notReadySince time.Time
	withdrawn     bool
}

// source is where a heartbeat comes from.
type source int

const (
	fromLease source = iota
	fromStatus
)

// suspicion is the state of a Node that most of its watchers report.
type suspicion struct {
	asked bool // the Node has been asked to renew its Lease
	// since is when it was asked: a later heartbeat refutes the suspicion. until is when its time to refute ends.
	since, until time.Time
}

// refuted reports whether the Node has refuted its suspicion.
func (n *nodeState) refuted() bool {
	return n.suspicion != nil && n.suspicion.asked && n.seen.After(n.suspicion.since)
}

// cause is why a Node is dead. Its condition, its Pods' conditions and an Event show it.
type cause struct{ reason, message string }

var leaseExpired = cause{"NodeStatusUnknown", "the node's agent has stopped renewing its lease"}

func newLiveness(grace, refute time.Duration) *liveness {
	return &liveness{
		grace: grace, refute: refute, nodes: map[string]*nodeState{}, members: map[string]bool{}, reports: map[string]string{},
	}
}

// nodeLocked returns the state of a Node.
func (l *liveness) nodeLocked(name string) *nodeState {
	n := l.nodes[name]
	if n == nil {
		n = &nodeState{seen: time.Now()}
		l.nodes[name] = n
	}
	return n
}

// state returns a copy of the state of a Node.
func (l *liveness) state(name string) nodeState {
	l.mu.Lock()
	defer l.mu.Unlock()
	return *l.nodeLocked(name)
}

func (l *liveness) forget(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.nodes, name)
}

// heartbeat takes the time of a Node's last heartbeat from one source, "" for none. It reports whether the Node, which was
// dead, or which an earlier leader may have marked, is alive again.
func (l *liveness) heartbeat(name string, from source, at string) (returned bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.nodeLocked(name)
	if at == "" || at == n.last[from] {
		return false
	}
	first := n.last[from] == ""
	returned = !first && (n.dead != nil || !n.renewed)
	n.last[from], n.seen = at, time.Now()
	n.dead, n.marked = nil, false
	n.renewed = n.renewed || !first
	return returned
}

// setVersion takes the version of a Node's agent and reports whether it is new.
func (l *liveness) setVersion(name, version string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.nodeLocked(name)
	changed := n.version != version
	n.version = version
	return changed
}

// check returns how long the Node may still take to send a heartbeat, or why it is dead.
func (l *liveness) check(name string) (remaining time.Duration, why *cause) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.checkLocked(name)
}

// declare is check, and declares the Node dead if it is: until its next heartbeat.
func (l *liveness) declare(name string) (remaining time.Duration, why *cause) {
	l.mu.Lock()
	defer l.mu.Unlock()
	remaining, why = l.checkLocked(name)
	if why != nil {
		l.nodeLocked(name).dead = why
	}
	return remaining, why
}

func (l *liveness) checkLocked(name string) (time.Duration, *cause) {
	n := l.nodeLocked(name)
	remaining := l.grace - time.Since(n.seen)
	if remaining <= 0 {
		return 0, &leaseExpired
	}
	by := l.suspectedByLocked(name, n)
	if by == nil {
		return remaining, nil
	}
	if left := time.Until(n.suspicion.until); left > 0 {
		return min(left, remaining), nil
	}
	return 0, &cause{"NodeUnreachable", fmt.Sprintf("the node's machine does not answer %s (%d of the %d nodes that watch it), "+
		"and its agent does not renew its lease", strings.Join(by.By, ", "), len(by.By), by.Of)}
}

// suspectedByLocked returns who suspects a Node that has been asked to renew its Lease and has not done so; nil for others, and if
// there are too many suspects.
func (l *liveness) suspectedByLocked(name string, n *nodeState) *peers.Suspect {
	if n.suspicion == nil || !n.suspicion.asked || n.refuted() {
		return nil
	}
	list, mass := l.suspectsLocked()
	i := slices.IndexFunc(list, func(s peers.Suspect) bool { return s.Name == name })
	if i < 0 || mass {
		return nil
	}
	return &list[i]
}

// setMarked records that a dead Node has been marked as unreachable. It reports false if the Node is not dead any more.
func (l *liveness) setMarked(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.nodes[name]
	if n == nil || n.dead == nil {
		return false
	}
	n.marked = true
	return true
}

// restart gives a Node the whole grace period again, and a suspect the whole time to refute.
func (l *liveness) restart(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.nodeLocked(name)
	if time.Since(n.seen) >= l.grace {
		n.seen = time.Now()
	}
	if n.suspicion != nil && n.suspicion.asked {
		n.suspicion.until = time.Now().Add(l.refute)
	}
}

// setMember records whether a Node's agent watches others, and whether the Node is up. It reports whether there are reports
// to review because of that.
func (l *liveness) setMember(name string, takesPart, up bool) (review bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was, known := l.members[name]
	if known == takesPart && (!takesPart || was == up) {
		return false
	}
	if takesPart {
		l.members[name] = up
	} else {
		delete(l.members, name)
	}
	l.changed = true
	return len(l.reports) > 0
}

// setReport records the names of the Nodes that do not answer a watcher, comma separated. It reports whether they are new.
func (l *liveness) setReport(by, text string) (changed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.reports[by] == text {
		return false
	}
	if text == "" {
		delete(l.reports, by)
		l.detector.Report(by, nil)
		return true
	}
	l.reports[by] = text
	l.detector.Report(by, strings.Split(text, ","))
	return true
}

// suspectsLocked returns the Nodes that most of their watchers report, and whether they are too many.
func (l *liveness) suspectsLocked() (list []peers.Suspect, mass bool) {
	if l.changed {
		var up []string
		for name, is := range l.members {
			if is {
				up = append(up, name)
			}
		}
		l.detector.SetMembers(up, len(l.members))
		l.changed = false
	}
	return l.detector.Suspects(func(watcher string) bool {
		n := l.nodes[watcher]
		return n != nil && time.Since(n.seen) < renewalOverdue
	})
}

// review is what has changed among the suspects.
type review struct {
	ask     []peers.Suspect // new suspects, which must be asked to renew their Lease
	cleared []string        // Nodes that are no longer suspect
	again   time.Duration   // when to review again; 0 if nothing waits for that
	mass    int             // how many suspects there are if they have become too many, else 0
}

// reviewSuspects begins and ends suspicions.
func (l *liveness) reviewSuspects() (r review) {
	l.mu.Lock()
	defer l.mu.Unlock()
	list, mass := l.suspectsLocked()
	if mass && !l.mass {
		r.mass = len(list)
	}
	l.mass = mass
	if mass {
		list = nil
	}
	for name, n := range l.nodes {
		if n.suspicion != nil && !slices.ContainsFunc(list, func(s peers.Suspect) bool { return s.Name == name }) {
			n.suspicion = nil
			r.cleared = append(r.cleared, name)
		}
	}
	for _, s := range list {
		n := l.nodeLocked(s.Name)
		left := renewalOverdue - time.Since(n.seen)
		switch {
		case n.dead != nil:
		case n.refuted() && left > 0:
			if r.again == 0 || left < r.again {
				r.again = left
			}
		case n.suspicion == nil, n.refuted(), !n.suspicion.asked:
			n.suspicion = &suspicion{}
			r.ask = append(r.ask, s)
		}
	}
	return r
}

// setAsked records that a suspect was asked, at since, to renew its Lease.
func (l *liveness) setAsked(name string, since time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.nodes[name]
	if n == nil || n.suspicion == nil {
		return
	}
	*n.suspicion = suspicion{asked: true, since: since, until: time.Now().Add(l.refute)}
}

// suspected reports whether a Node is suspect.
func (l *liveness) suspected(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.nodes[name]
	return n != nil && n.suspicion != nil
}
