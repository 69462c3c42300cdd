package witness

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb/quorum"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// When the witness is given back, the node counts on it no longer before the write: from
// then on another speaker may have it.
func TestWitnessIsNotCountedDuringRelease(t *testing.T) {
	t.Parallel()
	node := quorum.NewNode("a", 0, rand.Uint64)
	now := time.Minute
	voters := []quorum.Voter{{Name: "a", Address: "127.0.0.1:1"}, {Name: "b", Address: "127.0.0.1:2"}}
	list := quorum.List{Version: 1, Witness: true, Voters: voters}
	node.SetList(now, list)
	// counts reports whether the node counts on itself and the witness, a majority of three.
	counts := func() bool {
		node.Tick(now)
		_, ok := node.Members(now)
		return ok
	}
	writing := func() {}
	api := newLeaseAPI("")
	api.missing = true
	api.call = func(r *http.Request, carryOut func() (*http.Response, error)) (*http.Response, error) {
		if r.Method == http.MethodPut {
			writing()
		}
		return carryOut()
	}
	w := api.witness()
	w.o.Now = func() time.Duration { return now }
	count := func() { node.SetWitness(w.Until()) }
	w.o.Changed = count
	w.Need(true, true)
	// The Lease that it makes counts as held: one before it may have been deleted while it was.
	for range 2 {
		if held, err := w.step(t.Context()); err != nil || held {
			t.Fatalf("a Lease that was just made is taken at once, or %v", err)
		}
	}
	now += quorum.LongestTerm
	if held, err := w.step(t.Context()); err != nil || !held {
		t.Fatalf("it is not taken: %v", err)
	}
	count()
	if !counts() {
		t.Fatal("the node does not count on the witness that it has taken")
	}
	w.Need(true, false)
	writes := 0
	writing = func() {
		if writes++; writes > 1 && counts() { // the first renews it
			t.Error("the node counts on the witness while that is given back")
		}
	}
	for range 2 {
		now += quorum.WitnessTerm * 7 / 16
		if _, err := w.step(t.Context()); err != nil {
			t.Fatal(err)
		}
		if writes == 1 {
			count()
		}
	}
	if writes != 2 {
		t.Fatalf("%d writes, want one that renews and one that gives it back", writes)
	}
}

// Who votes together with the witness follows it before it needs it: of a holder that has died, the
// term has then begun with its last renewal, and the witness can be taken at once. The times in the Lease do not matter.
func TestWitnessIsFollowed(t *testing.T) {
	t.Parallel()
	for _, renewed := range []time.Time{time.Now().Add(-time.Hour), time.Now().Add(time.Hour)} {
		fake := newLeaseAPI("b/1")
		fake.lease.Spec.RenewTime = &metav1.MicroTime{Time: renewed}
		now := atomic.Int64{}
		now.Store(int64(time.Minute))
		w := fake.witness()
		w.o.Now = func() time.Duration { return time.Duration(now.Load()) }
		api := w.o.Client.CoordinationV1().Leases(svc.SystemNamespace)
		lease, err := api.Get(t.Context(), svc.WitnessLease, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var running sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		running.Go(func() { w.Run(ctx) })
		w.Need(true, false)
		seen := func(version string) {
			t.Helper()
			testbed.Until(t, "the Lease to be seen", func() error {
				w.mu.Lock()
				defer w.mu.Unlock()
				if w.lease == nil || w.lease.ResourceVersion != version {
					return fmt.Errorf("it is %+v", w.lease)
				}
				return nil
			})
		}
		seen(lease.ResourceVersion)
		now.Add(int64(quorum.WitnessTerm) - 1)      // the witness gives back what is expired by itself
		lease.Spec.LeaseTransitions = new(int32(1)) // a renewal
		if lease, err = api.Update(t.Context(), lease, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		seen(lease.ResourceVersion)
		now.Add(int64(quorum.WitnessTerm) - 1)
		if held, err := w.step(t.Context()); err != nil || held {
			t.Fatalf("it is taken before the term has passed, or %v", err)
		}
		now.Add(1)
		w.Need(true, true)
		testbed.Until(t, "the witness to be taken", func() error {
			if w.Until() != time.Duration(now.Load())+quorum.WitnessTerm*9/10 {
				return fmt.Errorf("it counts until %s", w.Until())
			}
			return nil
		})
		cancel()
		running.Wait()
	}
}
