package lb

import (
	"log/slog"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/lb/quorum"
)

// roundTripper is a function that is an http.RoundTripper.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// When the witness is given back, the node counts on it no longer before the write: from
// then on another speaker may have it.
func TestWitnessIsNotCountedDuringRelease(t *testing.T) {
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
	s.witness.need(true)
	if held, err := s.witness.step(t.Context(), false); err != nil || !held {
		t.Fatalf("it is not taken: %v", err)
	}
	s.copyWitness()
	if !counts() {
		t.Fatal("the node does not count on the witness that it has taken")
	}
	s.witness.need(false)
	writes := 0
	writing = func() {
		if writes++; writes > 1 && counts() { // the first renews it
			t.Error("the node counts on the witness while that is given back")
		}
	}
	for range 2 {
		now.Add(int64(quorum.WitnessTerm * 7 / 16))
		if _, err := s.witness.step(t.Context(), false); err != nil {
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
