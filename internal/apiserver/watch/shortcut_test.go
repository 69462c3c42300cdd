package watch

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// layerCount is a filter's response, which counts what goes through it.
type layerCount struct {
	http.ResponseWriter
	headers, writes, flushes int
}

// WriteHeader counts.
func (l *layerCount) WriteHeader(code int) {
	l.headers++
	l.ResponseWriter.WriteHeader(code)
}

// Write counts.
func (l *layerCount) Write(p []byte) (int, error) {
	l.writes++
	return l.ResponseWriter.Write(p)
}

// Flush counts.
func (l *layerCount) Flush() {
	l.flushes++
	l.ResponseWriter.(http.Flusher).Flush()
}

// CloseNotify is there for every response of net/http.
func (l *layerCount) CloseNotify() <-chan bool { return nil }

// A filter gets the status of a watch, and the whole of every other answer; the events of
// a watch do not go through it. The client gets the same.
func TestShortcutWatches(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name            string
		watch           bool
		code            int
		writes, flushes int // through the filter
	}{
		{"watch", true, http.StatusOK, 0, 0},
		{"watch that fails", true, http.StatusGone, 3, 3},
		{"other request", false, http.StatusOK, 3, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			answer := httptest.NewRecorder()
			g := &stallGuard{ResponseWriter: answer, limit: time.Hour, began: time.Now()}
			defer g.stop()
			filter := &layerCount{ResponseWriter: g}
			r := httptest.NewRequest(http.MethodGet, "/api/v1/pods?watch=1", nil)
			if c.watch {
				r = r.WithContext(context.WithValue(r.Context(), guardKey{}, g))
			}
			Shortcut(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(c.code)
				for range 3 {
					if _, err := w.Write([]byte("event ")); err != nil {
						t.Error(err)
					}
					w.(http.Flusher).Flush()
				}
			})).ServeHTTP(filter, r)
			if answer.Code != c.code || answer.Body.String() != "event event event " || !answer.Flushed {
				t.Errorf("%d %q, flushed: %v", answer.Code, answer.Body, answer.Flushed)
			}
			if filter.headers != 1 || filter.writes != c.writes || filter.flushes != c.flushes {
				t.Errorf("the filter got %d headers, %d writes and %d flushes", filter.headers, filter.writes, filter.flushes)
			}
		})
	}
}
