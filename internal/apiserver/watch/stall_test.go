package watch

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"
)

// slowResponse is a response whose writes take a while.
type slowResponse struct {
	*httptest.ResponseRecorder
	takes    time.Duration
	deadline chan struct{} // closed when the writes are to end
}

// Write takes its time.
func (s *slowResponse) Write(p []byte) (int, error) {
	time.Sleep(s.takes)
	return len(p), nil
}

// SetWriteDeadline ends the writes.
func (s *slowResponse) SetWriteDeadline(time.Time) error {
	close(s.deadline)
	return nil
}

// guarded returns a response of which writes take that long, and functions that count.
func guarded(takes time.Duration) (g *stallGuard, w *slowResponse, ended, reset *int) {
	w = &slowResponse{httptest.NewRecorder(), takes, make(chan struct{})}
	ended, reset = new(int), new(int)
	return &stallGuard{ResponseWriter: w, limit: 10 * time.Second, began: time.Now(),
		ended: func() { *ended++ }, reset: func() { *reset++ }}, w, ended, reset
}

// A client that reads slowly, or nothing for a while between events, is not one that does
// not read; the timer stays armed over all of that.
func TestStallGuardKeepsSlowReaders(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g, w, ended, _ := guarded(0)
		defer g.stop()
		for _, takes := range []time.Duration{0, 9 * time.Second, 0, 9 * time.Second, 9 * time.Second} {
			for _, pause := range []time.Duration{0, time.Second, time.Minute} {
				w.takes = takes
				if _, err := g.Write([]byte("event")); err != nil {
					t.Fatal(err)
				}
				time.Sleep(pause)
			}
		}
		if *ended != 0 {
			t.Errorf("%d responses ended", *ended)
		}
	})
}

// A write that goes on ends the response after the limit, wherever the timer was when it
// began, and the connection when that does not help.
func TestStallGuardEndsStalled(t *testing.T) {
	t.Parallel()
	for _, pause := range []time.Duration{0, 3 * time.Second, 10 * time.Second, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			g, w, ended, reset := guarded(0)
			if _, err := g.Write([]byte("event")); err != nil {
				t.Fatal(err)
			}
			time.Sleep(pause)
			w.takes = time.Hour
			begin, done := time.Now(), make(chan struct{})
			go func() {
				defer close(done)
				_, _ = g.Write([]byte("event"))
			}()
			<-w.deadline
			if after := time.Since(begin); *ended != 1 || after < g.limit || after > g.limit+time.Second {
				t.Errorf("after a pause of %s: %d responses ended, after %s", pause, *ended, after)
			}
			time.Sleep(g.limit)
			synctest.Wait()
			if *reset != 1 {
				t.Errorf("after a pause of %s: %d connections ended", pause, *reset)
			}
			<-done
			g.stop()
		})
	}
}

// Nothing is done to a response after its handler has returned.
func TestStallGuardStops(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g, w, ended, _ := guarded(time.Hour)
		go func() { _, _ = g.Write([]byte("event")) }()
		synctest.Wait()
		g.stop()
		time.Sleep(2 * time.Hour)
		select {
		case <-w.deadline:
			t.Error("the deadline of a response was set after its handler returned")
		default:
		}
		if *ended != 0 {
			t.Errorf("%d responses ended", *ended)
		}
	})
}

// A write while the timer is armed waits for no lock, so it touches no timer.
func TestStallGuardIsCheap(t *testing.T) {
	t.Parallel()
	g := &stallGuard{ResponseWriter: discard{}, limit: time.Hour, began: time.Now()}
	write := func() {
		_, _ = g.Write([]byte("event"))
		g.Flush()
	}
	write()
	g.mu.Lock()
	defer g.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		write()
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Error("an event waits for the lock of the timer")
	}
}

// discard is a response that goes nowhere.
type discard struct{}

// Header returns no header.
func (discard) Header() http.Header { return nil }

// WriteHeader does nothing.
func (discard) WriteHeader(int) {}

// Write does nothing.
func (discard) Write(p []byte) (int, error) { return len(p), nil }

// Flush does nothing.
func (discard) Flush() {}
