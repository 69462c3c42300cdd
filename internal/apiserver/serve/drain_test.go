package serve

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"
)

// A request that waits for a store that does not answer ends with the server, and one that is done in time is not touched.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := NewDrain()
		begin := time.Now()
		ask := func(takes time.Duration) (ended time.Duration, err error) {
			d.Bounded(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				select {
				case <-time.After(takes):
				case <-r.Context().Done():
				}
				ended, err = time.Since(begin), r.Context().Err()
			})).ServeHTTP(nil, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
			return ended, err
		}
		if took, err := ask(time.Minute); took != time.Minute || err != nil {
			t.Errorf("before the end: %s, %v", took, err)
		}
		begin = time.Now()
		d.Begin()
		if took, err := ask(time.Second); took != time.Second || err != nil {
			t.Errorf("a short one: %s, %v", took, err)
		}
		if took, err := ask(time.Minute); took != drainGrace || err == nil {
			t.Errorf("a long one: %s, %v", took, err)
		}
	})
}

// A server whose requests do not end is left behind; one that ends is waited for.
func TestRunIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failure := errors.New("failure")
		ctx, cancel := context.WithCancel(t.Context())
		if err := NewDrain().Run(ctx, func(context.Context) error { return failure }); !errors.Is(err, failure) {
			t.Errorf("a failure before the end: %v", err)
		}
		cancel()
		for takes, fails := range map[time.Duration]bool{0: false, endGrace - time.Second: false, time.Hour: true} {
			begin := time.Now()
			err := NewDrain().Run(ctx, func(context.Context) error { time.Sleep(takes); return nil })
			if took := time.Since(begin); took != min(takes, endGrace) || (err != nil) != fails {
				t.Errorf("%s: ended after %s, %v", takes, took, err)
			}
		}
		time.Sleep(time.Hour) // until the one that was left behind has ended
	})
}
