package runner

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// An outage begins after the hold, not by a failure that is shorter, keeps its first reason, and ends at once.
func TestOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var failure error
		var reports []string
		o := outage{wake: loop.NewSignal()}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() {
			o.run(ctx, func() error { mu.Lock(); defer mu.Unlock(); return failure }, func(why string) { reports = append(reports, why) })
		})
		set := func(err error) {
			mu.Lock()
			failure = err
			mu.Unlock()
			o.wake.Set()
			synctest.Wait()
		}
		want := func(list ...string) {
			t.Helper()
			if !slices.Equal(reports, list) {
				t.Fatalf("reports %q, want %q", reports, list)
			}
		}
		set(errors.New("short"))
		time.Sleep(svc.NotReadyHold - time.Millisecond)
		set(nil)
		time.Sleep(svc.NotReadyHold)
		want()
		set(errors.New("no device"))
		time.Sleep(svc.NotReadyHold / 2)
		set(errors.New("no device: try 2")) // does not begin the hold again
		time.Sleep(svc.NotReadyHold / 2)
		synctest.Wait()
		const reason = "the node is not Ready: no device: try 2"
		want(reason)
		set(errors.New("no device: try 3"))
		want(reason)
		set(nil)
		want(reason, "")
		cancel()
		running.Wait()
	})
}
