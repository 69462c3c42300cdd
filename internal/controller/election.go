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
// Lease is given back at the end, so that a successor need not wait. Work is
// over before the Lease is given back.
func elect(ctx context.Context, o *Options, client kubernetes.Interface, work func(ctx context.Context) error) error {
	self, err := thisProcess()
	if err != nil {
		return fmt.Errorf("identity for the leader election: %w", err)
	}
	identity := cmp.Or(o.Identity, self.String())
	// A server that has just started makes the namespace in a moment. The
	// election would look again only after retryPeriod.
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
		if err := freeDeadLease(ctx, o, client, self); err != nil {
			o.Log.Debug("cannot look at the lease", "reason", err)
		}
		if err := term(ctx, o, lock, work); err != nil {
			return err
		}
	}
	return nil
}

// term is one time in office: from waiting for the Lease to having lost it or
// given it back.
func term(ctx context.Context, o *Options, lock resourcelock.Interface, work func(ctx context.Context) error) error {
	// The election has a context of its own: it ends after the work has, so
	// that nobody else starts to work before.
	office, leave := context.WithCancel(context.WithoutCancel(ctx))
	defer leave()
	ended := make(chan error, 1)
	// Who comes first decides: the work, or an end before it began.
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
				leave()
			},
			OnStoppedLeading: func() {},
			OnNewLeader: func(who string) {
				o.Log.Info("controllers led by", "identity", who, "self", who == lock.Identity())
			},
		},
	})
	if err != nil {
		return fmt.Errorf("leader election: %w", err)
	}
	// Before the work has begun there is nothing whose end could end the term.
	defer context.AfterFunc(ctx, func() {
		if state.CompareAndSwap(0, over) {
			leave()
		}
	})()
	elector.Run(office)
	if state.CompareAndSwap(0, over) || state.Load() == over {
		return nil
	}
	return <-ended
}

// freeDeadLease takes the Lease from a holder that was a process of this
// machine and has died, so that a server started again after a crash does not
// wait for leaseDuration.
func freeDeadLease(ctx context.Context, o *Options, client kubernetes.Interface, self holder) error {
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
	if lease.Spec.HolderIdentity == nil || !self.knowsDead(*lease.Spec.HolderIdentity) {
		return nil
	}
	o.Log.Info("the leader has died", "identity", *lease.Spec.HolderIdentity)
	nobody := ""
	lease.Spec.HolderIdentity = &nobody
	_, err = api.Update(ctx, lease, metav1.UpdateOptions{})
	return err
}
