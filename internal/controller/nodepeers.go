package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/peers"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// refuteWithin is how long a suspected Node has to renew its Lease: its agent does so as soon as
	// it sees the annotation.
	refuteWithin = 1500 * time.Millisecond
	// renewalOverdue is how long after its last renewal a Node that has answered one suspicion can
	// be suspected again, and after which what a watcher reports does not count. Agents renew
	// every 10 s.
	renewalOverdue = 12 * time.Second
)

// jury has the members that watch each other, what they report, and the suspicions that have
// come of it (docs/design/011-dead-nodes.md).
type jury struct {
	peers      peers.Jury
	members    map[string]bool // Nodes whose agents take part; true for those that are up
	changed    bool            // members have, since peers got them
	reports    map[string]string
	suspicions map[string]*suspicion
	mass       bool // the last judgement was that too many are suspected
}

// suspicion is that of a Node that most of its watchers report.
type suspicion struct {
	asked bool // the Node has been asked to renew its Lease
	// since is when that began: a renewal after it answers the suspicion. Until is when the time for it is over.
	since, until time.Time
}

func newJury() jury {
	return jury{members: map[string]bool{}, reports: map[string]string{}, suspicions: map[string]*suspicion{}}
}

// suspects returns the Nodes that most of their watchers report.
func (j *jury) suspects(fresh func(string) bool) (list []peers.Suspect, mass bool) {
	if j.changed {
		var up []string
		for name, is := range j.members {
			if is {
				up = append(up, name)
			}
		}
		j.peers.SetMembers(up, len(j.members))
		j.changed = false
	}
	return j.peers.Suspects(fresh)
}

// verdict returns why a Node is unreachable by what its watchers report, and else how long it
// has to answer a suspicion, 0 if there is none.
func (j *jury) verdict(name string, p *heartbeat, fresh func(string) bool) (left time.Duration, why *cause) {
	s := j.suspicions[name]
	if s == nil || !s.asked || p.seen.After(s.since) {
		return 0, nil
	}
	list, mass := j.suspects(fresh)
	i := slices.IndexFunc(list, func(s peers.Suspect) bool { return s.Name == name })
	if i < 0 || mass {
		return 0, nil
	}
	if left := time.Until(s.until); left > 0 {
		return left, nil
	}
	return 0, &cause{"NodeUnreachable", fmt.Sprintf("the node's machine does not answer %s (%d of the %d nodes that watch it), "+
		"and its agent does not renew its lease", strings.Join(list[i].By, ", "), len(list[i].By), list[i].Of)}
}

// setPeer records whether a Node takes part, and is up.
func (c *nodeLifecycle) setPeer(n *corev1.Node, deleted bool) {
	if !c.options.PeerWatch {
		return
	}
	takesPart, up := !deleted && n.Annotations[svc.PeerWatchAnnotation] == "true", !isUnknown(n)
	c.mu.Lock()
	was, known := c.jury.members[n.Name]
	changed := known != takesPart || takesPart && was != up
	if takesPart {
		c.jury.members[n.Name] = up
	} else {
		delete(c.jury.members, n.Name)
	}
	c.jury.changed = c.jury.changed || changed
	judge := changed && len(c.jury.reports) > 0
	c.mu.Unlock()
	if judge {
		c.peers.Queue.Add("")
	}
}

// setReport records which Nodes another one reports, as its Lease has it.
func (c *nodeLifecycle) setReport(by, text string) {
	if !c.options.PeerWatch {
		return
	}
	c.mu.Lock()
	changed := c.jury.reports[by] != text
	if changed {
		var names []string
		if c.jury.reports[by] = text; text == "" {
			delete(c.jury.reports, by)
		} else {
			names = strings.Split(text, ",")
		}
		c.jury.peers.Report(by, names)
	}
	c.mu.Unlock()
	if changed {
		c.peers.Queue.Add("")
	}
}

// freshLocked reports whether a watcher is heard of, so that its report counts.
func (c *nodeLifecycle) freshLocked(watcher string) bool {
	p := c.heartbeats[watcher]
	return p != nil && time.Since(p.seen) < renewalOverdue
}

// judgePeers opens and closes suspicions. A suspected Node is asked to renew its Lease; sync
// judges it when its time is over.
func (c *nodeLifecycle) judgePeers(ctx context.Context) error {
	var errs []error
	for _, s := range c.openSuspicions() {
		if err := c.suspect(ctx, s.Name); err != nil {
			errs = append(errs, err)
			continue
		}
		c.log.Info("node is suspected to be down: waiting for it to renew its lease",
			"node", s.Name, "reporters", strings.Join(s.By, ","), "watchers", s.Of)
	}
	return errors.Join(errs...)
}

// openSuspicions returns the suspects that are to be asked to renew their Lease now.
func (c *nodeLifecycle) openSuspicions() (ask []peers.Suspect) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list, mass := c.jury.suspects(c.freshLocked)
	if mass && !c.jury.mass {
		c.log.Warn("most nodes cannot be reached by the nodes that watch them: waiting for the grace period of each before its endpoints go",
			"nodes", len(list), "grace", c.options.NodeGracePeriod)
	}
	if c.jury.mass = mass; mass {
		list = nil
	}
	for name := range c.jury.suspicions {
		if !slices.ContainsFunc(list, func(s peers.Suspect) bool { return s.Name == name }) {
			delete(c.jury.suspicions, name)
			c.loop.Queue.Add(name) // to remove the annotation
		}
	}
	for _, suspect := range list {
		s, p := c.jury.suspicions[suspect.Name], c.heartbeatLocked(suspect.Name)
		answered := s != nil && s.asked && p.seen.After(s.since)
		switch left := renewalOverdue - time.Since(p.seen); {
		case p.condemned != nil:
		case answered && left > 0:
			c.peers.Queue.AddAfter("", left)
		case s == nil || answered || !s.asked:
			c.jury.suspicions[suspect.Name] = &suspicion{}
			ask = append(ask, suspect)
		}
	}
	return ask
}

// suspect asks a Node's agent to renew the Lease.
func (c *nodeLifecycle) suspect(ctx context.Context, name string) error {
	begin := time.Now()
	if err := c.annotateSuspected(ctx, name, begin.UTC().Format(time.RFC3339Nano)); err != nil {
		return err
	}
	c.mu.Lock()
	if s := c.jury.suspicions[name]; s != nil {
		s.asked, s.since, s.until = true, begin, time.Now().Add(c.options.refuteWithin)
	}
	c.mu.Unlock()
	c.loop.Queue.AddAfter(name, c.options.refuteWithin)
	return nil
}

// unsuspect removes the annotation from a Node that is not suspected any more.
func (c *nodeLifecycle) unsuspect(ctx context.Context, node *corev1.Node) error {
	if _, has := node.Annotations[svc.SuspectedAnnotation]; !has {
		return nil
	}
	c.mu.Lock()
	suspected := c.jury.suspicions[node.Name] != nil
	c.mu.Unlock()
	if suspected {
		return nil
	}
	return c.annotateSuspected(ctx, node.Name, nil)
}

func (c *nodeLifecycle) annotateSuspected(ctx context.Context, name string, value any) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{svc.SuspectedAnnotation: value}}})
	if err != nil {
		return err
	}
	_, err = c.client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("annotation %s of node %s: %w", svc.SuspectedAnnotation, name, err)
	}
	return nil
}
