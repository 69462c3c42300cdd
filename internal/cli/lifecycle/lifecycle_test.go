package lifecycle

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/systemd"
)

type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(s string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, s)
}

func (j *journal) component(name string, early error) Component {
	running := make(chan struct{})
	return Component{
		Name: name,
		Run: func(ctx context.Context) error {
			j.add("start " + name)
			close(running)
			if early != nil {
				return early
			}
			<-ctx.Done()
			j.add("stop " + name)
			return nil
		},
		Ready: func(ctx context.Context) error {
			<-running
			return nil
		},
	}
}

func TestRunAllStartsInOrderAndStopsInReverse(t *testing.T) {
	var j journal
	ctx, cancel := context.WithCancel(context.Background())
	err := RunAll(ctx, slog.New(slog.DiscardHandler), func() { j.add("up"); cancel() },
		j.component("server", nil), j.component("controllers", nil), j.component("agent", nil))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"start server", "start controllers", "start agent", "up", "stop agent", "stop controllers", "stop server"}
	if !slices.Equal(j.lines, want) {
		t.Errorf("order %q, want %q", j.lines, want)
	}
}

func TestRunAllStopsTheRestWhenOneFails(t *testing.T) {
	var j journal
	boom := errors.New("port 6443 is taken")
	err := RunAll(context.Background(), slog.New(slog.DiscardHandler), func() {},
		j.component("server", nil), j.component("agent", boom))
	if !errors.Is(err, boom) || !strings.HasPrefix(err.Error(), "agent: ") {
		t.Errorf("error %v does not name the component and the reason", err)
	}
	if !slices.Contains(j.lines, "stop server") {
		t.Errorf("server was not stopped: %q", j.lines)
	}
}

func TestRunAllReportsAComponentThatNeverGetsReady(t *testing.T) {
	stuck := Component{
		Name:  "dns",
		Run:   func(ctx context.Context) error { <-ctx.Done(); return nil },
		Ready: func(context.Context) error { return errors.New("no answer") },
	}
	err := RunAll(context.Background(), slog.New(slog.DiscardHandler), func() { t.Error("up was called") }, stuck)
	if err == nil || !strings.Contains(err.Error(), "dns did not become ready") {
		t.Errorf("error %v", err)
	}
}

// A component that takes its time, as a server does that waits for others, is named and waited for, and systemd too is
// asked to wait.
func TestRunAllWaitsForAComponentThatIsLate(t *testing.T) {
	conn, unit := openUnit(t)
	synctest.Test(t, func(t *testing.T) {
		const late = 5 * time.Minute
		var log strings.Builder
		begin, release := time.Now(), make(chan struct{})
		time.AfterFunc(late, func() { close(release) })
		dog := &watchdog{unit: unit, log: slog.New(slog.NewTextHandler(&log, nil))}
		if err := dog.waitReady(t.Context(), Component{Name: "server", Ready: UntilClosed(release)}, nil); err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(begin); waited != late {
			t.Errorf("waited %s, want %s", waited, late)
		}
		got, want := strings.Count(log.String(), "component=server"), int(late/readyReport)-1
		if got < want || strings.Contains(log.String(), "err=") {
			t.Errorf("named %d times, want %d and no error:\n%s", got, want, log.String())
		}
	})
	if got, want := hears(t, conn, unit), systemd.Extend(2*readyReport); !strings.HasPrefix(got, want) {
		t.Errorf("systemd hears %q, want %q", got, want)
	}
}

// A component that hangs does not keep the process, nor those that stop after it.
func TestRunAllLeavesBehindWhatDoesNotStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j journal
		var log strings.Builder
		release := make(chan struct{})
		hangs := Component{Name: "hangs", Run: func(context.Context) error { <-release; return nil }}
		ctx, cancel := context.WithCancel(t.Context())
		start := time.Now()
		err := RunAll(ctx, slog.New(slog.NewTextHandler(&log, nil)), cancel, j.component("server", nil), hangs)
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took != stopTimeout {
			t.Errorf("it took %v, want %v", took, stopTimeout)
		}
		if !strings.Contains(log.String(), "component=hangs") || !slices.Contains(j.lines, "stop server") {
			t.Errorf("log %q, order %q; want the hanging one named and the server stopped", log.String(), j.lines)
		}
		close(release)
	})
}

// What has clients to turn away begins with that at once, beside the end of the others,
// works until it is done, and is then stopped.
func TestRunAllDrainsBesideTheOthersEnd(t *testing.T) {
	const drains, ends = 5 * time.Second, 3 * time.Second
	synctest.Test(t, func(t *testing.T) {
		var j journal
		dns, pods := j.component("dns", nil), j.component("pods", nil)
		dns.Drain = func(ctx context.Context) {
			j.add("drain dns")
			time.Sleep(drains)
			j.add("drained dns")
			if ctx.Err() != nil {
				t.Error("dns was not let drain")
			}
		}
		run := pods.Run
		pods.Run = func(ctx context.Context) error {
			defer time.Sleep(ends)
			return run(ctx)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := time.Now()
		err := RunAll(ctx, slog.New(slog.DiscardHandler), func() { synctest.Wait(); cancel() }, j.component("proxy", nil), dns, pods)
		if took := time.Since(ended); err != nil || took != drains {
			t.Errorf("%v, it took %v, want %v", err, took, drains)
		}
		slices.Sort(j.lines[3:5]) // either may be first
		want := []string{"start proxy", "start dns", "start pods", "drain dns", "stop pods", "drained dns", "stop dns", "stop proxy"}
		if !slices.Equal(j.lines, want) {
			t.Errorf("order %q, want %q", j.lines, want)
		}
	})
}

// A component that ends by itself is not waited for to drain.
func TestRunAllDoesNotDrainWhatHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j journal
		boom := errors.New("no more sockets")
		failing := j.component("dns", boom)
		failing.Ready = nil
		failing.Drain = func(ctx context.Context) { <-ctx.Done() }
		begin := time.Now()
		err := RunAll(t.Context(), slog.New(slog.DiscardHandler), func() {}, j.component("server", nil), failing)
		if took := time.Since(begin); !errors.Is(err, boom) || took != 0 {
			t.Errorf("%v after %v, want %v at once", err, took, boom)
		}
	})
}
