package lb

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// setNodeState records what matters about a Node for who votes and who can announce.
func (c *controller) setNodeState(n *corev1.Node) {
	out := slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
	if was, known := c.outOfService[n.Name]; !known || was != out {
		c.outOfService[n.Name] = out
		signal(c.voters)
	}
	silent := slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
	})
	if was, known := c.silent[n.Name]; !known || was != silent {
		c.silent[n.Name] = silent
		signal(c.covers)
	}
}

func (c *controller) setSpeaker(s *v1.Speaker) {
	old := c.speakers[s.Name]
	c.speakers[s.Name] = s
	if old == nil || old.Status.VoterVersion != s.Status.VoterVersion ||
		old.Status.VoterList != s.Status.VoterList || !slices.Equal(old.Status.Endpoints, s.Status.Endpoints) {
		signal(c.voters)
	}
	if old == nil || coverageChanged(old, s) {
		signal(c.covers)
	}
}

func (c *controller) dropSpeaker(s metav1.Object) {
	delete(c.speakers, s.GetName())
	signal(c.voters)
	signal(c.covers)
}

// keepVoters keeps the list of the speakers that vote.
func (c *controller) keepVoters(ctx context.Context) {
	recheck := time.NewTicker(foreignPeriod)
	defer recheck.Stop()
	for {
		again := (<-chan time.Time)(nil)
		if more, err := c.nextVoters(ctx); err != nil && ctx.Err() == nil {
			c.log.Warn("cannot write the list of voters; retrying", "err", err, "every", maxInstallRetry)
			again = time.After(maxInstallRetry)
		} else if more {
			signal(c.voters)
		}
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-recheck.C: // the ConfigMap may have been deleted
		case <-c.voters:
		}
	}
}

// candidates returns the speakers as the rule for the next list wants them, and those
// whose Node is gone.
func (c *controller) candidates() (list []quorum.Candidate, orphans []*v1.Speaker) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, s := range c.speakers {
		out, hasNode := c.outOfService[name]
		if !hasNode {
			orphans = append(orphans, s)
		}
		if len(s.Status.Endpoints) == 0 && hasNode && !out {
			continue // it has not written its status yet
		}
		candidate := quorum.Candidate{
			Voter:     quorum.Voter{Name: name},
			Confirmed: uint64(max(0, s.Status.VoterVersion)), Gone: out || !hasNode,
		}
		if err := json.Unmarshal([]byte(s.Status.VoterList), &candidate.List); err != nil {
			candidate.List = quorum.List{} // it reports none
		}
		if len(s.Status.Endpoints) > 0 {
			candidate.Address = s.Status.Endpoints[0]
		}
		list = append(list, candidate)
	}
	slices.SortFunc(list, func(a, b quorum.Candidate) int { return cmp.Compare(a.Name, b.Name) })
	return list, orphans
}

// nextVoters makes the next change of the list that is due, if any; more means that another one
// may be.
func (c *controller) nextVoters(ctx context.Context) (more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	candidates, orphans := c.candidates()
	api := c.client.CoreV1().ConfigMaps(Namespace)
	have, err := api.Get(ctx, VotersName, metav1.GetOptions{})
	var lists quorum.Lists
	switch {
	case apierrors.IsNotFound(err):
		have, lists = nil, c.lists // one that was deleted is written again
	case err != nil:
		return false, err
	default:
		if err := json.Unmarshal([]byte(have.Data[VotersEntry]), &lists); err != nil {
			return false, fmt.Errorf("ConfigMap %s/%s: %w; delete it to begin a new list when no speaker runs", Namespace, VotersName, err)
		}
	}
	next, changed := quorum.Next(lists, candidates)
	switch lost := lists.Current.Version == 0; {
	case lost && next.Previous.Version > 0:
		c.log.Warn("the list of voters was lost; restoring it from what the speakers report", "version", next.Current.Version,
			"voters", len(next.Current.Voters))
	case lost && !changed && slices.ContainsFunc(candidates, func(s quorum.Candidate) bool { return s.Confirmed > 0 }):
		c.log.Warn("the list of voters was lost and no speaker reports it; restart all speakers to begin a new one")
	}
	if !changed && (have != nil || lists.Current.Version == 0) {
		c.lists = lists
		return false, c.removeSpeakers(ctx, lists, orphans)
	}
	text, err := json.Marshal(next)
	if err != nil {
		return false, err
	}
	if have == nil {
		_, err = api.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: VotersName},
			Data: map[string]string{VotersEntry: string(text)}}, metav1.CreateOptions{})
	} else {
		change := have.DeepCopy()
		change.Data[VotersEntry] = string(text)
		_, err = api.Update(ctx, change, metav1.UpdateOptions{})
	}
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	c.lists = next
	c.log.Info("list of voters written", "version", next.Current.Version, "voters", len(next.Current.Voters), "witness", next.Current.Witness)
	return true, nil
}

// removeSpeakers removes the Speakers of Nodes that are gone once they vote no more.
func (c *controller) removeSpeakers(ctx context.Context, lists quorum.Lists, orphans []*v1.Speaker) error {
	for _, s := range orphans {
		if lists.Current.Has(s.Name) || lists.Previous.Has(s.Name) {
			continue
		}
		if _, err := c.client.CoreV1().Nodes().Get(ctx, s.Name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			continue // a new one, which will be seen
		}
		err := c.lb.Speakers.Delete(ctx, s.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &s.UID}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return err
		}
	}
	return nil
}
