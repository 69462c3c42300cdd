package witness

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
	"github.com/fairlead/fairlead/internal/svc"
)

// leaseAPI is the one Lease of the witness as an API server has it, in memory: a bubble of synctest
// knows no sockets.
type leaseAPI struct {
	mu      sync.Mutex
	lease   coordinationv1.Lease
	watches []func()
	silent  bool // watches hear of no change
	missing bool // there is no Lease until one is made
	// call, if not nil, is what a request meets. carryOut is to be called once at most.
	call func(r *http.Request, carryOut func() (*http.Response, error)) (*http.Response, error)
}

func newLeaseAPI(holder string) *leaseAPI {
	return &leaseAPI{lease: coordinationv1.Lease{
		TypeMeta:   metav1.TypeMeta{Kind: "Lease", APIVersion: "coordination.k8s.io/v1"},
		ObjectMeta: metav1.ObjectMeta{Namespace: svc.SystemNamespace, Name: svc.WitnessLease, UID: "1", ResourceVersion: "1"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder},
	}}
}

// witness returns what a speaker called a has of the witness.
func (l *leaseAPI) witness() *Witness {
	begin := time.Now()
	config := &rest.Config{Host: "http://lease", Transport: l, QPS: -1}
	config.ContentType = runtime.ContentTypeJSON
	client := kubernetes.NewForConfigOrDie(config)
	return New(Options{Client: client, Identity: "a/1", Now: func() time.Duration { return time.Minute + time.Since(begin) },
		Log: slog.New(slog.DiscardHandler)})
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
	case r.Method == http.MethodPost:
		var made coordinationv1.Lease
		if err := json.NewDecoder(r.Body).Decode(&made); err != nil {
			return nil, err
		}
		l.missing = false
		l.write(made.Spec)
		return response(http.StatusCreated, l.lease)
	case l.missing:
		return response(http.StatusNotFound, metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
			Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound,
		})
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
			running.Go(func() { w.Run(ctx) })
			w.Need(true, true)
			time.Sleep(20 * time.Millisecond)
			for i := range 10_000 {
				if w.Until() <= w.o.Now() {
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
				running.Go(func() { w.Run(ctx) })
				w.Need(true, false)
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
				w.End()
				<-w.released
				for range 500 {
					if w.HandedOver() {
						t.Error("it believes what it knew before")
						break
					}
					time.Sleep(time.Millisecond)
				}
				api.silent = false
				api.hold(change.next)
				synctest.Wait()
				if w.HandedOver() != change.handed {
					t.Errorf("%q has it: handed over is %t", change.next, w.HandedOver())
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
			running.Go(func() { w.Run(ctx) })
			w.Need(true, true)
			begin := w.o.Now()
			for synctest.Wait(); w.Until() == 0 && w.o.Now() < begin+time.Minute; synctest.Wait() {
				time.Sleep(time.Millisecond)
			}
			if took := w.o.Now() - begin; took < want || took > want+2*period {
				t.Errorf("a Lease of %d seconds: taken after %s, want %s", seconds, took, want)
			}
			cancel()
			running.Wait()
		})
	}
}

func TestNext(t *testing.T) {
	watches, needs := wants{follows: true}, wants{follows: true, needed: true}
	ends, endsUnfollowed := wants{follows: true, ending: true}, wants{ending: true}
	for _, c := range []struct {
		what string
		from phase
		event
		want phase
	}{
		{"the list has no witness", unused, event{}, unused},
		{"the list has the witness", unused, event{wants: watches}, watching},
		{"the list has no witness any more", watching, event{}, unused},
		{"it is needed", watching, event{wants: needs}, taking},
		{"it is needed without being followed", unused, event{wants: wants{needed: true}}, taking},
		{"it is not free yet", taking, event{wants: needs, call: notHeld}, taking},
		{"nothing answers", taking, event{wants: needs, call: callHung}, taking},
		{"it is taken", taking, event{wants: needs, call: isHeld}, holding},
		{"it is not needed any more before it is taken", taking, event{wants: watches}, watching},
		{"it is renewed", holding, event{wants: needs, call: isHeld}, holding},
		{"it is held though it is not needed any more", holding, event{wants: watches}, holding},
		{"the list has no witness any more while it is held", holding, event{}, holding},
		{"a renewal fails", holding, event{wants: needs, call: callFailed}, holding},
		{"another speaker has it", holding, event{wants: needs, call: notHeld}, taking},
		{"it is given back", holding, event{wants: watches, call: notHeld}, watching},
		{"the holder ends", holding, event{wants: ends}, releasing},
		{"it cannot be given back yet", releasing, event{wants: ends, call: callHung}, releasing},
		{"the holder has given it back", releasing, event{wants: ends, fresh: true, call: notHeld}, ended},
		{"another speaker ends", watching, event{wants: ends}, handingOver},
		{"a speaker ends that needs it", taking, event{wants: ends}, handingOver},
		{"it does not know who has it", handingOver, event{wants: ends, call: callFailed}, handingOver},
		{"it knows who has it", handingOver, event{wants: ends, fresh: true, call: notHeld}, ended},
		{"a late write has given it the witness", handingOver, event{wants: ends, fresh: true, call: isHeld}, releasing},
		{"a speaker ends that does not follow it", unused, event{wants: endsUnfollowed}, ended},
		{"it has ended", ended, event{wants: ends, fresh: true}, ended},
	} {
		if got := next(c.from, c.event); got != c.want {
			t.Errorf("%s: phase %d, want %d", c.what, got, c.want)
		}
	}
}

func TestPause(t *testing.T) {
	for _, c := range []struct {
		what   string
		in     phase
		call   outcome
		others bool
		want   time.Duration
	}{
		{"the holder", holding, isHeld, false, period},
		{"the holder after an error", holding, callFailed, false, period},
		{"the holder after a call without an answer", holding, callHung, false, 0},
		{"one that gives it back", releasing, callFailed, false, period},
		{"one that needs it", taking, notHeld, true, period},
		{"one that ends and has asked in vain", handingOver, callFailed, true, period},
		{"one that ends", handingOver, notHeld, true, 0},
		{"one that follows it after an error", watching, callHung, true, retry},
		{"one that follows it while another one has it", watching, notHeld, true, quorum.LongestTerm},
		{"one that follows it while no one has it", watching, notHeld, false, -1},
		{"one that does not use it", unused, notHeld, false, -1},
		{"one that has ended", ended, noCall, true, -1},
	} {
		if got := pause(c.in, c.call, c.others); got != c.want {
			t.Errorf("%s: %s, want %s", c.what, got, c.want)
		}
	}
}
