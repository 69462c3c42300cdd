// Package election lets one process of several work at a time, by a Lease.
//
// It is not the election of client-go (tools/leaderelection, v0.37), whose followers look
// so rarely, and whose leader measures its deadline from when a renewal is answered, that a
// hand-over within 5 s and "never two at once" exclude each other.
package election

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Times are the times of an election.
type Times struct {
	// Lease is how long followers wait after they have seen the Lease renewed before they take it, in whole seconds.
	Lease time.Duration
	// Deadline is how long after the beginning of its last renewal that succeeded a leader works. It is less than Lease
	// by more than clocks differ in rate.
	Deadline time.Duration
	// Retry is the time between two renewals. A leader tries again after a quarter of it, and followers look at the Lease
	// more than three times in it.
	Retry time.Duration
}

// DefaultTimes returns the times of an election in which nothing else is configured.
func DefaultTimes() Times {
	return Times{Lease: 4 * time.Second, Deadline: 3 * time.Second, Retry: time.Second}
}

// Check returns what is wrong with the times, by the names of kube-controller-manager's flags.
func (t Times) Check() error {
	switch {
	case t.Lease < time.Second || t.Lease%time.Second != 0 || t.Lease > time.Hour:
		return fmt.Errorf("lease-duration is %s; want whole seconds, from 1s to 1h: a Lease has them so", t.Lease)
	case t.Deadline >= t.Lease:
		return fmt.Errorf("renew-deadline is %s; want less than lease-duration, which is %s", t.Deadline, t.Lease)
	case t.Retry < minRetry || t.Retry >= t.Deadline*5/6:
		return fmt.Errorf("retry-period is %s; want at least %s, and less than 5/6 of renew-deadline, which is %s", t.Retry, minRetry, t.Deadline)
	}
	return nil
}

// minRetry keeps an election from being a load for the API server.
const minRetry = 100 * time.Millisecond

// afterFailure is the time until the next attempt to renew, and look how often a follower looks at the Lease.
func (t Times) afterFailure() time.Duration { return t.Retry / 4 }
func (t Times) look() time.Duration         { return t.Retry * 3 / 10 }

// requestTimeout bounds a request about the Lease.
const requestTimeout = 2 * time.Second

// renewal bounds a request to renew the Lease: before the deadline there is time for two. A short Retry, which is how soon others
// notice, asks for no faster API server.
func (t Times) renewal() time.Duration {
	return min(requestTimeout, max(t.Retry, (t.Deadline-t.Retry)/2))
}

// Lease is what processes are elected by.
type Lease struct {
	// Client has the requests about the Lease alone; see Fence.
	Client          kubernetes.Interface
	Namespace, Name string
	// Identity is this process in the Lease. The default lets processes of the
	// same machine find out whether it still runs, so that one restarted
	// after a crash does not wait for its old Lease to expire.
	Identity string
	Log      *slog.Logger
	// Times are DefaultTimes if they are zero.
	Times Times
	// Waiting, if not nil, is called each time another process is found to hold the Lease.
	Waiting func()

	// until is when this process has to have stopped working, nil if it does not hold the
	// Lease.
	until atomic.Pointer[time.Time]

	// Of Run.
	self holder
	// seen is the Lease as it was last read or written, at when that was; what has changed
	// since the time before counts as renewed at.
	seen *coordinationv1.Lease
	at   time.Time
	who  string // the leader that was logged last
}

// errNotLeader is the error of requests that Fence holds back.
var errNotLeader = errors.New("this process does not hold the lease (any more)")

// Fence has the clients made from cfg send no writes but while this process holds the
// Lease, also after the process was stopped for a while and does not know it yet.
func (l *Lease) Fence(cfg *rest.Config) {
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return &fence{l, next} })
}

type fence struct {
	l    *Lease
	next http.RoundTripper
}

func (f *fence) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method != http.MethodGet && req.Method != http.MethodHead && !f.l.holds() {
		if req.Body != nil {
			_ = req.Body.Close()
		}
		return nil, errNotLeader
	}
	return f.next.RoundTrip(req)
}

func (f *fence) WrappedRoundTripper() http.RoundTripper { return f.next }

// holds reports whether this process may work now.
func (l *Lease) holds() bool {
	until := l.until.Load()
	return until != nil && time.Now().Before(*until)
}

// Run calls work whenever this process holds the Lease, until ctx ends. The context of work
// ends with the Lease, and the Lease is released after work has returned, so that a
// successor need not wait.
func (l *Lease) Run(ctx context.Context, work func(ctx context.Context) error) error {
	var err error
	if l.self, err = thisProcess(); err != nil {
		return fmt.Errorf("identity for the leader election: %w", err)
	}
	l.Identity, l.Times = cmp.Or(l.Identity, l.self.String()), cmp.Or(l.Times, DefaultTimes())
	if err := l.Times.Check(); err != nil {
		return fmt.Errorf("leader election: %w", err)
	}
	for l.acquire(ctx) {
		if err := l.lead(ctx, work); err != nil {
			return err
		}
	}
	return nil
}

// acquire waits until this process holds the Lease, and reports whether it does; it does
// not when ctx ends.
func (l *Lease) acquire(ctx context.Context) bool {
	worked, warned := time.Now(), false
	for ctx.Err() == nil {
		err := l.try(ctx)
		switch {
		case err == nil && l.holds():
			return true
		case err == nil:
			worked, warned = time.Now(), false
		case !warned && time.Since(worked) > l.Times.Lease && ctx.Err() == nil:
			warned = true
			l.Log.Warn("cannot get or update the lease; retrying", "lease", l.Name, "err", err, "every", l.Times.look())
		}
		pause(ctx, l.Times.look())
	}
	return false
}

// try takes the Lease if it has no holder.
func (l *Lease) try(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	asked := time.Now()
	lease, err := l.api().Get(ctx, l.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: l.Namespace, Name: l.Name}}
		return l.take(lease, asked, func() (*coordinationv1.Lease, error) { return l.api().Create(ctx, lease, metav1.CreateOptions{}) })
	}
	if err != nil {
		return err
	}
	if l.seen == nil || l.seen.UID != lease.UID || l.seen.ResourceVersion != lease.ResourceVersion {
		l.seen, l.at = lease, time.Now()
	}
	who := ""
	if lease.Spec.HolderIdentity != nil {
		who = *lease.Spec.HolderIdentity
	}
	l.report(who)
	switch {
	case who == "" || who == l.Identity:
	case l.self.isDead(who):
		l.Log.Info("the leader no longer runs; taking its lease", "lease", l.Name, "identity", who)
	case time.Since(l.at) < l.durationOf(lease):
		if l.Waiting != nil {
			l.Waiting()
		}
		return nil
	}
	next := lease.DeepCopy()
	return l.take(next, asked, func() (*coordinationv1.Lease, error) { return l.api().Update(ctx, next, metav1.UpdateOptions{}) })
}

// durationOf is how long a Lease is left alone, as its holder wrote: one of another release may
// renew it less often.
func (l *Lease) durationOf(lease *coordinationv1.Lease) time.Duration {
	if s := lease.Spec.LeaseDurationSeconds; s != nil && *s > 0 {
		return time.Duration(*s) * time.Second
	}
	return l.Times.Lease
}

// take writes lease with this process as its holder. The renewal began at asked.
func (l *Lease) take(lease *coordinationv1.Lease, asked time.Time, write func() (*coordinationv1.Lease, error)) error {
	now, seconds := metav1.NowMicro(), int32(l.Times.Lease/time.Second)
	spec := &lease.Spec
	if spec.HolderIdentity == nil || *spec.HolderIdentity != l.Identity {
		transitions := int32(0)
		if spec.LeaseTransitions != nil {
			transitions = *spec.LeaseTransitions + 1
		}
		spec.HolderIdentity, spec.AcquireTime, spec.LeaseTransitions = &l.Identity, &now, &transitions
	}
	spec.LeaseDurationSeconds, spec.RenewTime = &seconds, &now
	written, err := write()
	if err != nil {
		return err
	}
	l.seen, l.at = written, asked
	l.until.Store(new(asked.Add(l.Times.Deadline)))
	l.report(l.Identity)
	return nil
}

// lead calls work while this process holds the Lease, which it has just taken.
func (l *Lease) lead(ctx context.Context, work func(ctx context.Context) error) error {
	term, stop := context.WithCancel(ctx)
	defer stop()
	renewing, stopRenewing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRenewing()
	var renewals sync.WaitGroup
	renewals.Go(func() {
		l.renew(renewing)
		stop()
	})
	err := work(term)
	stopRenewing()
	renewals.Wait()
	if l.holds() {
		l.release()
	}
	l.until.Store(nil)
	return err
}

// renew renews the Lease until ctx ends or the Lease is no longer this process's.
func (l *Lease) renew(ctx context.Context) {
	for wait := l.Times.Retry; ; {
		pause(ctx, min(wait, time.Until(*l.until.Load())))
		if ctx.Err() != nil {
			return
		}
		if !l.holds() {
			l.Log.Warn("cannot renew the lease; no longer the leader", "lease", l.Name, "within", l.Times.Deadline)
			return
		}
		wait = l.Times.Retry
		if err := l.renewOnce(ctx); apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			if !l.stillOurs(ctx) {
				l.until.Store(nil)
				l.Log.Warn("another process holds the lease; no longer the leader", "lease", l.Name)
				return
			}
			wait = 0
		} else if err != nil {
			wait = l.Times.afterFailure()
			l.Log.Debug("cannot renew the lease; retrying", "err", err, "after", wait)
		}
	}
}

func (l *Lease) renewOnce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, l.Times.renewal())
	defer cancel()
	next := l.seen.DeepCopy()
	return l.take(next, time.Now(), func() (*coordinationv1.Lease, error) { return l.api().Update(ctx, next, metav1.UpdateOptions{}) })
}

// stillOurs reports whether this process is the holder, which may be that of a renewal whose
// answer was lost. An error leaves that open until the next renewal.
func (l *Lease) stillOurs(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	lease, err := l.api().Get(ctx, l.Name, metav1.GetOptions{})
	if err != nil {
		return !apierrors.IsNotFound(err)
	}
	l.seen = lease
	return lease.Spec.HolderIdentity != nil && *lease.Spec.HolderIdentity == l.Identity
}

// release lets others take the Lease at once.
func (l *Lease) release() {
	ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	next := l.seen.DeepCopy()
	next.Spec.HolderIdentity = new("")
	if _, err := l.api().Update(ctx, next, metav1.UpdateOptions{}); err != nil {
		l.Log.Debug("cannot release the lease; it expires", "err", err, "after", l.Times.Lease)
	}
}

// report logs who leads, once.
func (l *Lease) report(who string) {
	if who != "" && who != l.who {
		l.who = who
		l.Log.Info("leader elected", "lease", l.Name, "identity", who, "self", who == l.Identity)
	}
}

func (l *Lease) api() leaseClient { return l.Client.CoordinationV1().Leases(l.Namespace) }

type leaseClient interface {
	Get(context.Context, string, metav1.GetOptions) (*coordinationv1.Lease, error)
	Create(context.Context, *coordinationv1.Lease, metav1.CreateOptions) (*coordinationv1.Lease, error)
	Update(context.Context, *coordinationv1.Lease, metav1.UpdateOptions) (*coordinationv1.Lease, error)
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
