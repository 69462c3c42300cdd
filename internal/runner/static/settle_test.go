package static

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/apimachinery/pkg/types"
)

// The directory of static Pods is read again after an error of the watcher, when
// events are missing, and after a bounded time while events never end.
func TestStaticDirectorySettles(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		s := New(Options{Dir: dir, Workers: noWorkers{}, Log: slog.New(slog.DiscardHandler)})
		events, errs := make(chan fsnotify.Event), make(chan error)
		go s.follow(ctx, events, errs, func() {})
		within := func(limit time.Duration, what string) {
			t.Helper()
			begin := time.Now()
			<-s.mirrors.wake // by each reading
			if took := time.Since(begin); took > limit {
				t.Errorf("%s: read after %s, want %s", what, took, limit)
			}
		}
		within(0, "at the start")
		for range 2 {
			errs <- fsnotify.ErrEventOverflow
			within(staticSettle, "events are missing")
		}
		go func() {
			for ctx.Err() == nil {
				select {
				case events <- fsnotify.Event{}:
				case <-ctx.Done():
				}
				select {
				case <-time.After(staticSettle / 2):
				case <-ctx.Done():
				}
			}
		}()
		for range 2 {
			within(staticSettleMax+staticSettle, "events without end")
		}
		cancel()
	})
}

// noWorkers run no Pod.
type noWorkers struct{ Workers }

func (noWorkers) Static() map[string]types.UID { return nil }
