// Package election lets one process of several work at a time, by a Lease.
package election

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// The times of the election are those of kube-controller-manager.
const (
	leaseDuration = 15 * time.Second
	renewDeadline = 10 * time.Second
	retryPeriod   = 2 * time.Second
)

// Lease is what processes are elected by.
type Lease struct {
	Client          kubernetes.Interface
	Namespace, Name string
	// Identity is this process in the Lease. The default lets processes of the
	// same machine find out whether it still runs, so that one restarted
	// after a crash does not wait for its old Lease to expire.
	Identity string
	Log      *slog.Logger
}

// Run calls work whenever this process holds the Lease, until ctx ends. The
// Lease is released after work has returned, so that a successor need not wait.
func (l *Lease) Run(ctx context.Context, work func(ctx context.Context) error) error {
	self, err := thisProcess()
	if err != nil {
		return fmt.Errorf("identity for the leader election: %w", err)
	}
	identity := cmp.Or(l.Identity, self.String())
	// An API server that has just started is about to create the namespace. The
	// election would retry only after retryPeriod.
	_ = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, retryPeriod, true, func(ctx context.Context) (bool, error) {
		_, err := l.Client.CoreV1().Namespaces().Get(ctx, l.Namespace, metav1.GetOptions{})
		return err == nil || apierrors.IsForbidden(err), nil
	})
	lock := &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: l.Namespace, Name: l.Name},
		Client:     l.Client.CoordinationV1(),
		LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
	}
	for ctx.Err() == nil {
		if err := l.releaseDead(ctx, self); err != nil {
			l.Log.Debug("cannot check whether the lease's holder still runs", "err", err)
		}
		if err := l.term(ctx, lock, work); err != nil {
			return err
		}
	}
	return nil
}

// term waits for the Lease and calls work until the Lease is lost or released.
func (l *Lease) term(ctx context.Context, lock resourcelock.Interface, work func(ctx context.Context) error) error {
	// The election has a context of its own, which ends after work has returned,
	// so that no other process starts to work before.
	electionCtx, stopElection := context.WithCancel(context.WithoutCancel(ctx))
	defer stopElection()
	ended := make(chan error, 1)
	// The first to set state wins: the start of work, or the end of ctx before it.
	var state atomic.Int32
	const working, over = 1, 2
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: lock, LeaseDuration: leaseDuration, RenewDeadline: renewDeadline, RetryPeriod: retryPeriod,
		ReleaseOnCancel: true, Name: l.Name,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(lead context.Context) {
				if !state.CompareAndSwap(0, working) {
					return
				}
				lead, stop := context.WithCancel(lead)
				defer stop()
				defer context.AfterFunc(ctx, stop)()
				ended <- work(lead)
				stopElection()
			},
			OnStoppedLeading: func() {},
			OnNewLeader: func(who string) {
				l.Log.Info("leader elected", "identity", who, "self", who == lock.Identity())
			},
		},
	})
	if err != nil {
		return fmt.Errorf("leader election: %w", err)
	}
	// If work has not begun, its return cannot stop the election.
	defer context.AfterFunc(ctx, func() {
		if state.CompareAndSwap(0, over) {
			stopElection()
		}
	})()
	elector.Run(electionCtx)
	if state.CompareAndSwap(0, over) || state.Load() == over {
		return nil
	}
	return <-ended
}

// releaseDead releases the Lease if it is held by a process of this machine that no
// longer runs, so that a server restarted after a crash does not wait for
// leaseDuration.
func (l *Lease) releaseDead(ctx context.Context, self holder) error {
	ctx, cancel := context.WithTimeout(ctx, renewDeadline)
	defer cancel()
	api := l.Client.CoordinationV1().Leases(l.Namespace)
	lease, err := api.Get(ctx, l.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if lease.Spec.HolderIdentity == nil || !self.isDead(*lease.Spec.HolderIdentity) {
		return nil
	}
	l.Log.Info("the leader no longer runs; releasing its lease", "identity", *lease.Spec.HolderIdentity)
	lease.Spec.HolderIdentity = new("")
	_, err = api.Update(ctx, lease, metav1.UpdateOptions{})
	return err
}
