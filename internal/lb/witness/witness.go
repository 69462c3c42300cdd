// Package witness holds the vote of the witness for a speaker: a Lease that decides between two speakers that cannot
// reach each other.
package witness

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/lb/quorum"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Options are the options of a Witness.
type Options struct {
	Client kubernetes.Interface
	// Identity names this process. No other process has the same one, not even a later one on the same node.
	Identity string
	Now      func() time.Duration
	Log      *slog.Logger
	// Changed, if not nil, is called when Until may have changed, and before every write: no one may count on the witness
	// when the write lets another speaker have it.
	Changed func()
	// Taken, if not nil, is called after this process has taken or renewed the witness. The lock of the Witness is held.
	Taken func()
}

// Witness takes, renews and gives back the Lease. This process decides when a term has passed by when it has seen the Lease
// change; the times that are written in it are for readers.
type Witness struct {
	o        Options
	wake     loop.Signal
	released chan struct{}

	mu     sync.Mutex
	rule   *quorum.Witness
	lease  *coordinationv1.Lease // as it was read or written last, nil if that is unknown
	wants  wants
	before *coordinationv1.Lease // the Lease as it was known when this process began to end
	fresh  bool                  // the Lease was read or written after that
}

// wants is what the speaker asks of the witness.
type wants struct {
	follows bool // this node votes together with the witness
	needed  bool // this node needs the witness's vote
	ending  bool
}

const (
	// period is how often the rule is asked while the witness is needed or held.
	period = 100 * time.Millisecond
	// timeout bounds a call of the API server, which is repeated: a holder can wait for one without an answer, and still
	// renews the Lease in time.
	timeout = quorum.WitnessTerm / 4
	// retry is the pause after a failed call of a node that does not need the witness.
	retry = time.Second
	// writtenTerm is the term as a Lease can have it, in whole seconds.
	writtenTerm = int32((quorum.WitnessTerm + time.Second - 1) / time.Second)
	// justMade begins the holder of a Lease that was just made: an earlier Lease may have been
	// deleted while a speaker counted on it, so a term must pass as if it was held.
	justMade = "made by "
)

// New returns a Witness that does nothing before Run.
func New(o Options) *Witness {
	nothing := func() {}
	if o.Changed == nil {
		o.Changed = nothing
	}
	if o.Taken == nil {
		o.Taken = nothing
	}
	return &Witness{o: o, rule: quorum.NewWitness(o.Identity), wake: loop.NewSignal(), released: make(chan struct{})}
}

// Until returns until when the witness's vote counts for this process, by Options.Now.
func (w *Witness) Until() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rule.Until()
}

// HandedOver reports whether another speaker has taken or renewed the witness since this one began to
// end. An earlier holder may have given it back since, or be dead.
func (w *Witness) HandedOver() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.fresh || w.lease == nil || !reflector.IsNewer(w.lease, w.before) {
		return false
	}
	h := w.rule.Holder()
	return h != "" && h != w.o.Identity && !strings.HasPrefix(h, justMade)
}

// heldByOther reports whether the witness has another holder, dead or alive.
func (w *Witness) heldByOther() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	h := w.rule.Holder()
	return h != "" && h != w.o.Identity
}

// Need records whether this node votes together with the witness, and whether it needs its vote.
func (w *Witness) Need(follows, needed bool) {
	w.mu.Lock()
	wake := needed && !w.wants.needed || follows != w.wants.follows
	w.wants.follows, w.wants.needed = follows, needed
	w.mu.Unlock()
	if wake {
		w.wake.Set()
	}
}

// End gives the witness back for good, and closes Released when it has.
func (w *Witness) End() {
	w.mu.Lock()
	w.wants.needed, w.wants.ending, w.before = false, true, w.lease
	w.mu.Unlock()
	w.wake.Set()
}

// Released is closed when this process, which ends, does not hold the witness and will not.
func (w *Witness) Released() <-chan struct{} { return w.released }

// phase is what a process does about the witness.
type phase int

const (
	unused      phase = iota
	watching          // it follows the Lease, to know when its term has passed
	taking            // it needs the witness, and tries to take it
	holding           // it has it, and renews it while it is needed
	releasing         // it ends, and gives it back
	handingOver       // it ends and does not have it; it reads the Lease once more to see who takes it next
	ended             // it ends and has nothing left to do
)

// outcome is what a call of the API server showed.
type outcome int

const (
	noCall outcome = iota
	callFailed
	callHung // it was not answered in time
	isHeld
	notHeld
)

// event is what next decides by.
type event struct {
	wants
	fresh bool
	call  outcome
}

// next returns the phase that follows p.
func next(p phase, e event) phase {
	held := p == holding || p == releasing // a failed call changes nothing
	switch e.call {
	case isHeld:
		held = true
	case notHeld:
		held = false
	}
	switch {
	case e.ending && held:
		return releasing
	case e.ending && e.follows && !e.fresh:
		return handingOver
	case e.ending:
		return ended
	case held:
		return holding
	case e.needed:
		return taking
	case e.follows:
		return watching
	}
	return unused
}

// pause returns after how long a process in phase p calls again, negative if it waits for a change. others reports whether
// another process holds the witness.
func pause(p phase, call outcome, others bool) time.Duration {
	failed := call == callFailed || call == callHung
	switch p {
	case holding, releasing:
		if call == callHung {
			return 0 // the call was pause enough
		}
		return period
	case handingOver:
		if failed {
			return period
		}
		return 0
	case taking:
		return period
	case watching:
		if failed {
			return retry
		}
		if others {
			return quorum.LongestTerm // until its term has expired
		}
	}
	return -1
}

// Run follows the Lease while the list of voters has the witness, and writes it while it is needed or held.
func (w *Witness) Run(ctx context.Context) {
	var following sync.WaitGroup
	defer following.Wait()
	follows, unfollow := false, func() {}
	defer func() { unfollow() }()
	release := sync.OnceFunc(func() { close(w.released) })
	var timer <-chan time.Time
	p := unused
	enter := func(call outcome) (e event) {
		e = w.event(call)
		if p = next(p, e); p == handingOver || p == ended {
			release()
		}
		return e
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		case <-timer:
		}
		timer = nil
		if e := enter(noCall); e.follows != follows {
			follows = e.follows
			unfollow()
			unfollow = func() {}
			if follows {
				inner, cancel := context.WithCancel(ctx)
				unfollow = cancel
				following.Go(func() { w.follow(inner) })
			}
		}
		if p == ended {
			continue
		}
		call := w.call(ctx)
		enter(call)
		if after := pause(p, call, w.heldByOther()); after >= 0 {
			timer = time.After(after)
		}
	}
}

// event returns the event after a call.
func (w *Witness) event(call outcome) event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return event{w.wants, w.fresh, call}
}

// call takes one step within the timeout.
func (w *Witness) call(ctx context.Context) outcome {
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	held, err := w.step(limited)
	if err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) {
		w.o.Log.Debug("cannot reach the witness; retrying", "err", err)
	}
	switch {
	case err != nil && errors.Is(limited.Err(), context.DeadlineExceeded):
		return callHung
	case err != nil:
		return callFailed
	case held:
		return isHeld
	}
	return notHeld
}

// follow observes the Lease, so that the term of a holder that dies has begun when the witness
// becomes needed.
func (w *Witness) follow(ctx context.Context) {
	only := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", svc.WitnessLease).String()}
	see := func(l *coordinationv1.Lease) {
		w.mu.Lock()
		w.observe(l)
		w.mu.Unlock()
		w.wake.Set()
	}
	reflector.Run(reflector.Quiet(ctx), "lb-speaker/witness",
		reflector.From(w.o.Client.CoordinationV1().Leases(svc.SystemNamespace), only),
		reflector.Sink[*coordinationv1.Lease]{
			Replace: func(list []*coordinationv1.Lease) {
				for _, l := range list {
					see(l)
				}
				if len(list) == 0 {
					w.forget()
				}
			},
			Set:    see,
			Delete: func(*coordinationv1.Lease) { w.forget() },
		})
}

// forget records that there is no Lease; the next step makes one.
func (w *Witness) forget() {
	w.mu.Lock()
	w.lease = nil
	w.mu.Unlock()
	w.wake.Set()
}

// observe takes a Lease that was read. The caller holds mu.
func (w *Witness) observe(l *coordinationv1.Lease) {
	if w.lease != nil && !reflector.IsNewer(l, w.lease) {
		return
	}
	w.lease = l
	holder := ""
	if l.Spec.HolderIdentity != nil {
		holder = *l.Spec.HolderIdentity
	}
	w.rule.Observe(w.o.Now(), holder, termOf(l, holder), string(l.UID)+"/"+l.ResourceVersion)
}

// termOf returns the term of the holder of a Lease. It is longer than WitnessTerm if the holder is of another build. The
// term of a Lease that was just made is the longest one: nothing is known of the holder before that.
func termOf(l *coordinationv1.Lease, holder string) time.Duration {
	written := l.Spec.LeaseDurationSeconds
	switch {
	case strings.HasPrefix(holder, justMade):
		return quorum.LongestTerm
	case written == nil || *written <= writtenTerm:
		return quorum.WitnessTerm
	}
	return min(quorum.LongestTerm, time.Duration(*written)*time.Second)
}

// read returns the Lease as it is, and makes it if there is none.
func (w *Witness) read(ctx context.Context) (*coordinationv1.Lease, error) {
	api := w.o.Client.CoordinationV1().Leases(svc.SystemNamespace)
	lease, err := api.Get(ctx, svc.WitnessLease, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		lease, err = api.Create(ctx, &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Namespace: svc.SystemNamespace, Name: svc.WitnessLease},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: new(justMade + w.o.Identity)},
		}, metav1.CreateOptions{})
	}
	return lease, err
}

// refreshed records that lease was read or written after this process began to end. The caller holds mu.
func (w *Witness) refreshed(lease *coordinationv1.Lease) {
	w.fresh = w.wants.ending
	if w.before == nil {
		w.before = lease
	}
}

// step writes the Lease if the rule asks for it, and reports whether this process holds it.
func (w *Witness) step(ctx context.Context) (held bool, err error) {
	w.mu.Lock()
	lease, ending, matters := w.lease, w.wants.ending, w.wants != wants{}
	if ending && !w.fresh && w.rule.Holder() != w.o.Identity {
		lease = nil // if it holds the Lease, the write that gives it back shows whether what was seen is old
	}
	w.mu.Unlock()
	read := lease == nil
	if read {
		if !matters {
			return false, nil
		}
		if lease, err = w.read(ctx); err != nil {
			return false, err
		}
	}
	w.mu.Lock()
	w.observe(lease)
	if read && ending {
		w.refreshed(lease)
	}
	lease = w.lease.DeepCopy()
	now := w.o.Now()
	action, _ := w.rule.Next(now, w.wants.needed)
	if w.wants.ending {
		action, _ = w.rule.End()
	}
	held = w.rule.Holder() == w.o.Identity
	w.mu.Unlock()
	w.o.Changed()
	switch action {
	case quorum.WitnessTake:
		lease.Spec.HolderIdentity = &w.o.Identity
		lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
		lease.Spec.LeaseDurationSeconds = new(int32(writtenTerm))
	case quorum.WitnessRelease:
		lease.Spec.HolderIdentity = new("")
	default:
		return held, nil
	}
	written, err := w.o.Client.CoordinationV1().Leases(svc.SystemNamespace).Update(ctx, lease, metav1.UpdateOptions{}) // only of this version
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			w.lease = nil // what was seen is old
		}
		return held, err
	}
	if action == quorum.WitnessRelease {
		w.observe(written)
		w.refreshed(written)
		return false, nil
	}
	w.lease = written
	w.rule.Wrote(w.o.Now(), now, string(written.UID)+"/"+written.ResourceVersion)
	w.o.Taken()
	return true, nil
}
