package lb

import (
	"context"
	"errors"
	"fmt"
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
	"github.com/fairlead/fairlead/internal/reflector"
)

// witness holds the Lease that is the vote of the witness. When a term has passed is known by when
// this process has seen the Lease change; the times that are written in it are for readers.
type witness struct {
	client kubernetes.Interface
	now    func() time.Duration
	log    *slog.Logger
	// changed copies until to those that count on it. It is called before every write,
	// so that none counts on the witness when the write lets another speaker have it.
	changed func()
	// taken is called after the witness was taken or renewed.
	taken func()

	mu      sync.Mutex
	rule    *quorum.Witness
	lease   *coordinationv1.Lease // as it was read or written last, nil if that is unknown
	follows bool                  // this node votes together with the witness
	needed  bool
	ending  bool
	// before is the Lease as it was known when this process began to end, and fresh is true once it was
	// read or written after that.
	before   *coordinationv1.Lease
	fresh    bool
	wake     chan struct{}
	released chan struct{} // closed when this process does not hold it and will not
	self     string
}

const (
	// witnessName is the Lease of the witness.
	witnessName = "fairlead-lb-witness"
	// witnessPeriod is how often the rule is asked while the witness matters.
	witnessPeriod = 100 * time.Millisecond
	// witnessTimeout bounds a call of the API server for it, which is repeated: the holder can wait in vain
	// for one and renews it nonetheless while it still counts.
	witnessTimeout = quorum.WitnessTerm / 4
	// witnessRetry is after how long one who follows the witness and does not need it calls again.
	witnessRetry = time.Second
	// writtenTerm is the term as a Lease can have it, in whole seconds.
	writtenTerm = int32((quorum.WitnessTerm + time.Second - 1) / time.Second)
	// justMade begins the holder of a Lease that was just made: the one before it may have been
	// deleted while a speaker counted on it, so that a term has to pass as if it was held.
	justMade = "made by "
)

func newWitness(client kubernetes.Interface, node string, now func() time.Duration, log *slog.Logger) *witness {
	self := fmt.Sprintf("%s/%x", node, randomNumber())
	return &witness{
		client: client, now: now, log: log, rule: quorum.NewWitness(self), self: self, taken: func() {},
		wake: make(chan struct{}, 1), released: make(chan struct{}),
	}
}

func (w *witness) until() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rule.Until()
}

// handedOver reports whether another speaker has taken or renewed the witness since this one began to
// end. One that is known to have held it before may have given it back since, or be dead.
func (w *witness) handedOver() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.fresh || w.lease == nil || !isNewer(w.lease, w.before) {
		return false
	}
	h := w.rule.Holder()
	return h != "" && h != w.self && !strings.HasPrefix(h, justMade)
}

// heldByOther reports whether the witness has another holder, dead or alive.
func (w *witness) heldByOther() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	h := w.rule.Holder()
	return h != "" && h != w.self
}

// need records whether this node votes together with the witness, and whether it needs its vote.
func (w *witness) need(follows, needed bool) {
	w.mu.Lock()
	wake := needed && !w.needed || follows != w.follows
	w.follows, w.needed = follows, needed
	w.mu.Unlock()
	if wake {
		signal(w.wake)
	}
}

// end gives the witness back for good, and closes released when it is.
func (w *witness) end() {
	w.mu.Lock()
	w.needed, w.ending, w.before = false, true, w.lease
	w.mu.Unlock()
	signal(w.wake)
}

// run follows the Lease while the list of voters has the witness, and writes it while
// it is needed or held.
func (w *witness) run(ctx context.Context) {
	var following sync.WaitGroup
	defer following.Wait()
	unfollow := func() {}
	defer func() { unfollow() }()
	var timer <-chan time.Time
	follows, held, over := false, false, false
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		case <-timer:
		}
		w.mu.Lock()
		needed, ending, fresh, wanted := w.needed, w.ending, w.fresh, w.follows
		w.mu.Unlock()
		if ending && !held && !over {
			close(w.released)
			over = true
		}
		if wanted != follows {
			unfollow()
			unfollow = func() {}
			if follows = wanted; follows {
				inner, cancel := context.WithCancel(ctx)
				unfollow = cancel
				following.Go(func() { w.follow(inner) })
			}
		}
		if over && (fresh || !follows) { // it goes on to see who has it next
			continue
		}
		limited, cancel := context.WithTimeout(ctx, witnessTimeout)
		now, err := w.step(limited)
		hung := errors.Is(limited.Err(), context.DeadlineExceeded)
		cancel()
		if err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) {
			w.log.Debug("cannot reach the witness; retrying", "err", err)
		}
		held = now || err != nil && held
		switch timer = nil; {
		case ending && !held && err == nil, hung && held: // the call was pause enough
			signal(w.wake)
		case needed || held || ending:
			timer = time.After(witnessPeriod)
		case err != nil && follows:
			timer = time.After(witnessRetry)
		case follows && w.heldByOther(): // until its term has expired
			timer = time.After(quorum.LongestTerm)
		}
	}
}

// follow observes the Lease, so that the term of a holder that dies has begun when the witness
// becomes needed.
func (w *witness) follow(ctx context.Context) {
	only := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", witnessName).String()}
	see := func(l *coordinationv1.Lease) {
		w.mu.Lock()
		w.observe(l)
		w.mu.Unlock()
		signal(w.wake)
	}
	reflector.Run(reflector.Quiet(ctx), "lb-speaker/witness",
		reflector.From(w.client.CoordinationV1().Leases(Namespace), only),
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
func (w *witness) forget() {
	w.mu.Lock()
	w.lease = nil
	w.mu.Unlock()
	signal(w.wake)
}

// observe is called with the lock held.
func (w *witness) observe(l *coordinationv1.Lease) {
	if w.lease != nil && !isNewer(l, w.lease) {
		return
	}
	w.lease = l
	holder := ""
	if l.Spec.HolderIdentity != nil {
		holder = *l.Spec.HolderIdentity
	}
	w.rule.Observe(w.now(), holder, termOf(l, holder), string(l.UID)+"/"+l.ResourceVersion)
}

// termOf returns the term of the holder of a Lease, which is of another build if it is longer than this one's. Of a
// Lease that was just made it is the longest: nothing is known of the holder before that.
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
func (w *witness) read(ctx context.Context) (*coordinationv1.Lease, error) {
	api := w.client.CoordinationV1().Leases(Namespace)
	lease, err := api.Get(ctx, witnessName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		lease, err = api.Create(ctx, &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: witnessName},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: new(justMade + w.self)},
		}, metav1.CreateOptions{})
	}
	return lease, err
}

// refreshed records, with the lock held, that lease was read or written after this process began to end.
func (w *witness) refreshed(lease *coordinationv1.Lease) {
	w.fresh = w.ending
	if w.before == nil {
		w.before = lease
	}
}

// step writes what the rule calls for, of the Lease as it was seen last, and reports whether it is held.
func (w *witness) step(ctx context.Context) (held bool, err error) {
	w.mu.Lock()
	lease, ending, matters := w.lease, w.ending, w.needed || w.ending || w.follows
	if ending && !w.fresh && w.rule.Holder() != w.self {
		lease = nil // one that it holds is found out to be old by the write that gives it back
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
	now := w.now()
	action, _ := w.rule.Next(now, w.needed)
	if w.ending {
		action, _ = w.rule.End()
	}
	held = w.rule.Holder() == w.self
	w.mu.Unlock()
	w.changed()
	switch action {
	case quorum.WitnessTake:
		lease.Spec.HolderIdentity = &w.self
		lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
		lease.Spec.LeaseDurationSeconds = new(int32(writtenTerm))
	case quorum.WitnessRelease:
		lease.Spec.HolderIdentity = new("")
	default:
		return held, nil
	}
	written, err := w.client.CoordinationV1().Leases(Namespace).Update(ctx, lease, metav1.UpdateOptions{}) // of this version alone
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
	w.rule.Wrote(w.now(), now, string(written.UID)+"/"+written.ResourceVersion)
	w.taken()
	return true, nil
}
