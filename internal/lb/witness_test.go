package lb

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/lb/quorum"
	"github.com/fairlead/fairlead/internal/testbed"
)

// roundTripper is a function that is an http.RoundTripper.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// When the witness is given back, the node counts on it no longer before the write: from
// then on another speaker may have it.
func TestWitnessIsNotCountedDuringRelease(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s := &Speaker{node: quorum.NewNode("a", 0, randomNumber)}
	now := atomic.Int64{}
	now.Store(int64(time.Minute))
	s.o.Now = func() time.Duration { return time.Duration(now.Load()) }
	voters := []quorum.Voter{{Name: "a", Address: "127.0.0.1:1"}, {Name: "b", Address: "127.0.0.1:2"}}
	list := quorum.List{Version: 1, Witness: true, Voters: voters}
	s.node.SetList(s.o.Now(), list)
	// counts reports whether the node counts on itself and the witness, a majority of three.
	counts := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.node.Tick(s.o.Now())
		_, ok := s.node.Members(s.o.Now())
		return ok
	}
	writing := func() {}
	config := rest.CopyConfig(r.config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(q *http.Request) (*http.Response, error) {
			if q.Method == http.MethodPut {
				writing()
			}
			return next.RoundTrip(q)
		})
	})
	s.witness = newWitness(kubernetes.NewForConfigOrDie(config), "a", s.o.Now, slog.New(slog.DiscardHandler))
	s.witness.changed = s.copyWitness
	s.witness.need(true, true)
	// The Lease that it makes counts as held: one before it may have been deleted while it was.
	for range 2 {
		if held, err := s.witness.step(t.Context()); err != nil || held {
			t.Fatalf("a Lease that was just made is taken at once, or %v", err)
		}
	}
	now.Add(int64(quorum.LongestTerm))
	if held, err := s.witness.step(t.Context()); err != nil || !held {
		t.Fatalf("it is not taken: %v", err)
	}
	s.copyWitness()
	if !counts() {
		t.Fatal("the node does not count on the witness that it has taken")
	}
	s.witness.need(true, false)
	writes := 0
	writing = func() {
		if writes++; writes > 1 && counts() { // the first renews it
			t.Error("the node counts on the witness while that is given back")
		}
	}
	for range 2 {
		now.Add(int64(quorum.WitnessTerm * 7 / 16))
		if _, err := s.witness.step(t.Context()); err != nil {
			t.Fatal(err)
		}
		if writes == 1 {
			s.copyWitness()
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
		r := newRig(t)
		client := kubernetes.NewForConfigOrDie(r.config)
		now := atomic.Int64{}
		now.Store(int64(time.Minute))
		w := newWitness(client, "a", func() time.Duration { return time.Duration(now.Load()) }, slog.New(slog.DiscardHandler))
		w.changed = func() {}
		lease := &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: witnessName},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: new("b/1"), RenewTime: &metav1.MicroTime{Time: renewed}},
		}
		api := client.CoordinationV1().Leases(Namespace)
		lease, err := api.Create(t.Context(), lease, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var running sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		running.Go(func() { w.run(ctx) })
		w.need(true, false)
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
		w.need(true, true)
		testbed.Until(t, "the witness to be taken", func() error {
			if w.until() != time.Duration(now.Load())+quorum.WitnessTerm*9/10 {
				return fmt.Errorf("it counts until %s", w.until())
			}
			return nil
		})
		cancel()
		running.Wait()
	}
}
