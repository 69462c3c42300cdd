package agent

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/svc"
)

// tellAfter is how long a node is not reached before this one reports it in the API: by then a machine that is dead is
// known to be dead, and is not reported. maxTold bounds how many nodes the condition names.
const (
	tellAfter = 6 * time.Second
	maxTold   = 10
)

// Reasons of the condition svc.PeersReached and of Events.
const (
	reasonPeersReached   = "PeersReached"
	reasonPeerUnreached  = "PeerUnreached"
	reasonPeerReached    = "PeerReached"
	consequenceUnreached = "its endpoints get connections from here only where a Service has no others"
)

// brokenPaths are the nodes that this one has not reached for tellAfter.
type brokenPaths struct {
	since map[string]time.Duration // of all that are not reached now
	told  []string                 // sorted
}

// update takes the nodes that are not reached now, and returns which have come to told, and which have left it.
func (b *brokenPaths) update(now time.Duration, unreached []string) (began, ended []string) {
	since := make(map[string]time.Duration, len(unreached))
	var told []string
	for _, name := range unreached {
		at, known := b.since[name]
		if !known {
			at = now
		}
		since[name] = at
		if now-at < tellAfter {
			continue
		}
		told = append(told, name)
		if !slices.Contains(b.told, name) {
			began = append(began, name)
		}
	}
	for _, name := range b.told {
		if !slices.Contains(told, name) {
			ended = append(ended, name)
		}
	}
	b.since, b.told = since, told
	return began, ended
}

// NotAsking is the condition svc.PeersReached of a node that asks no others.
func NotAsking() corev1.NodeCondition {
	return corev1.NodeCondition{Type: svc.PeersReached, Status: corev1.ConditionUnknown, Reason: "NotAsking",
		Message: "this node asks no other one (--peer-watch=false)"}
}

// Unreached returns the names of the nodes that this one does not reach, sorted.
func (p *Peers) Unreached() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.unreached)
}

// Condition returns the Node condition svc.PeersReached.
func (p *Peers) Condition() corev1.NodeCondition {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := corev1.NodeCondition{Type: svc.PeersReached, Status: corev1.ConditionTrue, Reason: reasonPeersReached,
		Message: "every other node that this one asks answers it"}
	if told := p.broken.told; len(told) > 0 {
		names := strings.Join(told[:min(len(told), maxTold)], ", ")
		if more := len(told) - maxTold; more > 0 {
			names += fmt.Sprintf(" and %d more", more)
		}
		c.Status, c.Reason = corev1.ConditionFalse, reasonPeerUnreached
		c.Message = fmt.Sprintf("node %s gets no answer from %s: %s", p.self, names, consequenceUnreached)
	}
	return c
}

// judgePaths finds out which nodes this one reaches.
func (p *Peers) judgePaths(now time.Duration) {
	p.mu.Lock()
	was, is := p.unreached, p.watch.Lost(now)
	p.unreached = is
	down := func(name string) bool { return !p.nodes[name].up } // the whole cluster knows it
	began, ended := p.broken.update(now, slices.DeleteFunc(slices.Clone(is), down))
	ended = slices.DeleteFunc(ended, down)
	told := len(began)+len(ended) > 0
	p.mu.Unlock()
	if !slices.Equal(was, is) {
		p.log.Info("the nodes that this one does not reach have changed", "unreached", strings.Join(is, ","))
		p.turned()
	}
	self := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: p.self, UID: types.UID(p.self)}
	for _, name := range began {
		p.log.Warn("this node does not reach another one; "+consequenceUnreached, "peer", name, "for", tellAfter)
		p.events.Event(self, corev1.EventTypeWarning, reasonPeerUnreached,
			fmt.Sprintf("node %s gets no answer from node %s: %s", p.self, name, consequenceUnreached))
	}
	for _, name := range ended {
		p.events.Event(self, corev1.EventTypeNormal, reasonPeerReached, fmt.Sprintf("node %s reaches node %s again", p.self, name))
	}
	if told {
		p.changed.Set()
	}
}
