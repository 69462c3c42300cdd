package controller

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// voterKeeper keeps the list of the speakers that vote.
type voterKeeper struct {
	*state
	client kubernetes.Interface
	lb     *v1.Client
	log    *slog.Logger
	lists  quorum.Lists // as last read or written
}

// run works until ctx ends.
func (k *voterKeeper) run(ctx context.Context) {
	recheck := time.NewTicker(foreignPeriod)
	defer recheck.Stop()
	for {
		again := (<-chan time.Time)(nil)
		if more, err := k.nextVoters(ctx); err != nil && ctx.Err() == nil {
			k.log.Warn("cannot write the list of voters; retrying", "err", err, "every", maxInstallRetry)
			again = time.After(maxInstallRetry)
		} else if more {
			k.voters.Set()
		}
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-recheck.C: // the ConfigMap may have been deleted
		case <-k.voters:
		}
	}
}

// candidates returns the speakers for the rule of the next list, and the speakers without
// a Node.
func (k *voterKeeper) candidates() (list []quorum.Candidate, orphans []*v1.Speaker) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, n := range k.nodes.records {
		s := n.speaker
		if s == nil {
			continue
		}
		if !n.exists {
			orphans = append(orphans, s)
		}
		ended := n.outOfService || !n.exists
		if len(s.Status.Endpoints) == 0 && !ended {
			continue // it has not written its status yet
		}
		candidate := quorum.Candidate{
			Voter:     quorum.Voter{Name: name},
			Confirmed: uint64(max(0, s.Status.VoterVersion)), Gone: ended, Down: n.silent,
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

// nextVoters makes the next due change of the list, if any. more means that another one
// may be due.
func (k *voterKeeper) nextVoters(ctx context.Context) (more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	candidates, orphans := k.candidates()
	api := k.client.CoreV1().ConfigMaps(svc.SystemNamespace)
	have, err := api.Get(ctx, svc.VotersConfigMap, metav1.GetOptions{})
	var lists quorum.Lists
	switch {
	case apierrors.IsNotFound(err):
		have, lists = nil, k.lists // a deleted list is written again
	case err != nil:
		return false, err
	default:
		if lists, err = claim.ReadVoters(have); err != nil {
			return false, fmt.Errorf("%w; delete it to begin a new list when no speaker runs", err)
		}
	}
	next, changed := quorum.Next(lists, candidates)
	switch lost := lists.Current.Version == 0; {
	case lost && next.Previous.Version > 0:
		k.log.Warn("the list of voters was lost; restoring it from what the speakers report", "version", next.Current.Version,
			"voters", len(next.Current.Voters))
	case lost && !changed && slices.ContainsFunc(candidates, func(s quorum.Candidate) bool { return s.Confirmed > 0 }):
		k.log.Warn("the list of voters was lost and no speaker reports it; restart all speakers to begin a new one")
	}
	if !changed && (have != nil || lists.Current.Version == 0) {
		k.follow(lists)
		return false, k.removeSpeakers(ctx, lists, orphans)
	}
	text, err := json.Marshal(next)
	if err != nil {
		return false, err
	}
	if have == nil {
		_, err = api.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: svc.SystemNamespace, Name: svc.VotersConfigMap},
			Data: map[string]string{claim.VotersEntry: string(text)}}, metav1.CreateOptions{})
	} else {
		change := have.DeepCopy()
		change.Data[claim.VotersEntry] = string(text)
		_, err = api.Update(ctx, change, metav1.UpdateOptions{})
	}
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	k.follow(next)
	k.log.Info("list of voters written", "version", next.Current.Version, "voters", len(next.Current.Voters), "witness", next.Current.Witness)
	return true, nil
}

// follow records the lists as they were read or written.
func (k *voterKeeper) follow(lists quorum.Lists) {
	k.lists = lists
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.list.Version != lists.Current.Version {
		k.list = lists.Current
		k.covers.Set()
	}
}

// removeSpeakers deletes Speakers without a Node that no longer vote.
func (k *voterKeeper) removeSpeakers(ctx context.Context, lists quorum.Lists, orphans []*v1.Speaker) error {
	for _, s := range orphans {
		if lists.Current.Has(s.Name) || lists.Previous.Has(s.Name) {
			continue
		}
		if _, err := k.client.CoreV1().Nodes().Get(ctx, s.Name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			continue // a new one, which will be seen
		}
		err := k.lb.Speakers.Delete(ctx, s.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &s.UID}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return err
		}
	}
	return nil
}
