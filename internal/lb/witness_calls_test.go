package lb

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/lb/quorum"
)

// leaseAPI is the one Lease of the witness as an API server has it, in memory: a bubble of synctest
// knows no sockets.
type leaseAPI struct {
	mu      sync.Mutex
	lease   coordinationv1.Lease
	watches []func()
	silent  bool // watches hear of no change
	// call, if not nil, is what a request meets. carryOut is to be called once at most.
	call func(r *http.Request, carryOut func() (*http.Response, error)) (*http.Response, error)
}

func newLeaseAPI(holder string) *leaseAPI {
	return &leaseAPI{lease: coordinationv1.Lease{
		TypeMeta:   metav1.TypeMeta{Kind: "Lease", APIVersion: "coordination.k8s.io/v1"},
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: witnessName, UID: "1", ResourceVersion: "1"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder},
	}}
}

// witness returns what a speaker called a has of the witness.
func (l *leaseAPI) witness() *witness {
	begin := time.Now()
	config := &rest.Config{Host: "http://lease", Transport: l, QPS: -1}
	config.ContentType = runtime.ContentTypeJSON
	client := kubernetes.NewForConfigOrDie(config)
	w := newWitness(client, "a", func() time.Duration { return time.Minute + time.Since(begin) }, slog.New(slog.DiscardHandler))
	w.changed = func() {}
	return w
}

// hold writes the Lease as another process does.
func (l *leaseAPI) hold(holder string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.write(coordinationv1.LeaseSpec{HolderIdentity: &holder})
}

func (l *leaseAPI) write(spec coordinationv1.LeaseSpec) {
	version, _ := strconv.Atoi(l.lease.ResourceVersion)
	l.lease.ResourceVersion, l.lease.Spec = strconv.Itoa(version+1), spec
	if l.silent {
		return
	}
	for _, tell := range l.watches {
		tell()
	}
}

// RoundTrip implements http.RoundTripper.
func (l *leaseAPI) RoundTrip(r *http.Request) (*http.Response, error) {
	if l.call != nil {
		return l.call(r, func() (*http.Response, error) { return l.answer(r) })
	}
	return l.answer(r)
}

func (l *leaseAPI) answer(r *http.Request) (*http.Response, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case r.Method == http.MethodPut:
		var next coordinationv1.Lease
		if err := json.NewDecoder(r.Body).Decode(&next); err != nil {
			return nil, err
		}
		if next.ResourceVersion != l.lease.ResourceVersion {
			return response(http.StatusConflict, metav1.Status{
				TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
				Reason: metav1.StatusReasonConflict, Code: http.StatusConflict,
			})
		}
		l.write(next.Spec)
		return response(http.StatusOK, l.lease)
	case r.URL.Query().Get("watch") != "":
		return l.watch(r), nil
	case r.URL.Query().Get("fieldSelector") != "":
		return response(http.StatusOK, coordinationv1.LeaseList{
			TypeMeta: metav1.TypeMeta{Kind: "LeaseList", APIVersion: "coordination.k8s.io/v1"},
			ListMeta: metav1.ListMeta{ResourceVersion: l.lease.ResourceVersion}, Items: []coordinationv1.Lease{l.lease},
		})
	}
	return response(http.StatusOK, l.lease)
}

func response(code int, body any) (*http.Response, error) {
	var text bytes.Buffer
	err := json.NewEncoder(&text).Encode(body)
	return &http.Response{StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(&text)}, err
}

func (l *leaseAPI) watch(q *http.Request) *http.Response {
	r, w := io.Pipe()
	changes := make(chan coordinationv1.Lease, 100)
	l.watches = append(l.watches, func() { changes <- l.lease })
	go func() {
		for {
			select {
			case <-q.Context().Done():
				_ = w.CloseWithError(io.EOF)
				return
			case lease := <-changes:
				_ = json.NewEncoder(w).Encode(map[string]any{"type": "MODIFIED", "object": lease})
			}
		}
	}()
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: r}
}

// A holder of the witness keeps it although two calls of the API server in a row hang, carried out or not.
func TestWitnessOutlivesHungCalls(t *testing.T) {
	for _, carriedOut := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			api, writes := newLeaseAPI(""), 0
			api.call = func(r *http.Request, carryOut func() (*http.Response, error)) (*http.Response, error) {
				if r.Method == http.MethodPut {
					writes++
				}
				if r.Method != http.MethodPut || writes%6 < 4 {
					time.Sleep(5 * time.Millisecond) // of the bubble's clock
					return carryOut()
				}
				if carriedOut {
					_, _ = carryOut()
				}
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			w := api.witness()
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			running.Go(func() { w.run(ctx) })
			w.need(true, true)
			time.Sleep(20 * time.Millisecond)
			for i := range 10_000 {
				if w.until() <= w.now() {
					t.Errorf("carried out: %t: the witness does not count after %d ms and %d writes", carriedOut, i, writes)
					break
				}
				time.Sleep(time.Millisecond)
			}
			cancel()
			running.Wait()
			if writes < 20 {
				t.Errorf("%d writes in 10 s", writes)
			}
		})
	}
}

// A speaker that ends does not take one for the next holder that had the witness before: it may have
// given it back, which this one has not seen, or be dead.
func TestWitnessIsHandedOverAfterTheEnd(t *testing.T) {
	for what, change := range map[string]struct {
		unseen string // what is written without this speaker seeing it
		next   string
		handed bool
	}{
		"given back unseen":   {"", "b/2", true},
		"a process that died": {"b/1", "b/2", true},
		"made again":          {"", justMade + "b/2", false},
		"renewed":             {"b/1", "b/1", true},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := newLeaseAPI("b/1")
				w := api.witness()
				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				running.Go(func() { w.run(ctx) })
				w.need(true, false)
				synctest.Wait()
				if h := w.rule.Holder(); h != "b/1" {
					t.Errorf("it does not see that b/1 has the witness, but %q", h)
				}
				fails := 3 // the API server answers late
				api.call = func(_ *http.Request, carryOut func() (*http.Response, error)) (*http.Response, error) {
					if fails--; fails >= 0 {
						return nil, errors.New("away")
					}
					return carryOut()
				}
				if api.silent = true; change.unseen == "" {
					api.hold("")
				}
				w.end()
				<-w.released
				for range 500 {
					if w.handedOver() {
						t.Error("it believes what it knew before")
						break
					}
					time.Sleep(time.Millisecond)
				}
				api.silent = false
				api.hold(change.next)
				synctest.Wait()
				if w.handedOver() != change.handed {
					t.Errorf("%q has it: handed over is %t", change.next, w.handedOver())
				}
				cancel()
				running.Wait()
			})
		})
	}
}

// The witness of a holder that has died is taken when its own term has passed, which is longer if it was of an
// earlier build: such a speaker counts on it for longer.
func TestWitnessOfAnotherBuild(t *testing.T) {
	for seconds, want := range map[int32]time.Duration{
		2: quorum.WitnessTerm, 0: quorum.WitnessTerm, -1: quorum.WitnessTerm, 4: 4 * time.Second, 1 << 30: quorum.LongestTerm,
	} {
		synctest.Test(t, func(t *testing.T) {
			api := newLeaseAPI("b/1")
			api.lease.Spec.LeaseDurationSeconds = &seconds
			w := api.witness()
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			running.Go(func() { w.run(ctx) })
			w.need(true, true)
			begin := w.now()
			for synctest.Wait(); w.until() == 0 && w.now() < begin+time.Minute; synctest.Wait() {
				time.Sleep(time.Millisecond)
			}
			if took := w.now() - begin; took < want || took > want+2*witnessPeriod {
				t.Errorf("a Lease of %d seconds: taken after %s, want %s", seconds, took, want)
			}
			cancel()
			running.Wait()
		})
	}
}
