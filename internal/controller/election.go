package controller

import (
	"cmp"
	"context"
	"fmt"
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

// elect calls work whenever this process holds the Lease, until ctx ends. The
// Lease is released after work has returned, so that a successor need not wait.
func elect(ctx context.Context, o *Options, client kubernetes.Interface, work func(ctx context.Context) error) error {
	self, err := thisProcess()
	if err != nil {
		return fmt.Errorf("identity for the leader election: %w", err)
	}
	identity := cmp.Or(o.Identity, self.String())
	// An API server that has just started is about to create the namespace. The
	// election would retry only after retryPeriod.
	_ = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, retryPeriod, true, func(ctx context.Context) (bool, error) {
		_, err := client.CoreV1().Namespaces().Get(ctx, o.LeaseNamespace, metav1.GetOptions{})
		return err == nil || apierrors.IsForbidden(err), nil
	})
	lock := &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: o.LeaseNamespace, Name: o.LeaseName},
		Client:     client.CoordinationV1(),
		LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
	}
	for ctx.Err() == nil {
		if err := releaseDeadLease(ctx, o, client, self); err != nil {
			o.Log.Debug("cannot check whether the lease's holder still runs", "err", err)
		}
		if err := term(ctx, o, lock, work); err != nil {
			return err
		}
	}
	return nil
}

// term waits for the Lease and calls work until the Lease is lost or released.
func term(ctx context.Context, o *Options, lock resourcelock.Interface, work func(ctx context.Context) error) error {
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
		ReleaseOnCancel: true, Name: o.LeaseName,
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
				o.Log.Info("leader elected", "identity", who, "self", who == lock.Identity())
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

// releaseDeadLease releases a Lease held by a process of this machine that no
// longer runs, so that a server restarted after a crash does not wait for
// leaseDuration.
func releaseDeadLease(ctx context.Context, o *Options, client kubernetes.Interface, self holder) error {
	ctx, cancel := context.WithTimeout(ctx, renewDeadline)
	defer cancel()
	api := client.CoordinationV1().Leases(o.LeaseNamespace)
	lease, err := api.Get(ctx, o.LeaseName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if lease.Spec.HolderIdentity == nil || !self.isDead(*lease.Spec.HolderIdentity) {
		return nil
	}
	o.Log.Info("the leader no longer runs; releasing its lease", "identity", *lease.Spec.HolderIdentity)
	lease.Spec.HolderIdentity = new("")
	_, err = api.Update(ctx, lease, metav1.UpdateOptions{})
	return err
}
