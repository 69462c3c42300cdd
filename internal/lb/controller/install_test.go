package controller

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/events"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// A request that is never answered is made again.
func TestStepWithoutAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Controller{o: Options{Log: slog.New(slog.DiscardHandler)}}
		tries := 0
		err := c.untilDone(t.Context(), func(ctx context.Context) error {
			if tries++; tries > 1 {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		})
		if err != nil || tries != 2 {
			t.Errorf("%d tries, %v", tries, err)
		}
	})
}

// Rights that the controller lacks are shown on the Service, which gets its address once
// they are there (behaviour 100).
func TestMissingRights(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var denied atomic.Bool
	denied.Store(true)
	r.own = rest.CopyConfig(r.own)
	r.own.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			if denied.Load() && req.Method == http.MethodPost && strings.HasSuffix(req.URL.Path, "/ipaddresses") {
				req = req.Clone(req.Context())
				req.Header.Set("Impersonate-User", "no one") // without rights
			}
			return next.RoundTrip(req)
		})
	})
	r.withPools("192.0.2.0/30")
	r.service("one")
	r.wantEvent("one", syncFailed, "Forbidden")
	r.wants("one", "")
	denied.Store(false)
	r.wants("one", "192.0.2.0")
}

// counter counts the lines of a log.
type counter struct {
	slog.Handler
	lines int
}

func (c *counter) Enabled(context.Context, slog.Level) bool  { return true }
func (c *counter) Handle(context.Context, slog.Record) error { c.lines++; return nil }

// Two conditions of one pool are recorded once each, however often they are looked at.
func TestEventsOfAPool(t *testing.T) {
	lines := &counter{Handler: slog.DiscardHandler}
	log := slog.New(lines)
	c := &poolKeeper{log: log, state: newState(false, nil), events: events.NewRecorder(nil, corev1.EventSource{}, log)}
	p := &v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "1"}}
	c.setPool(p)
	for range 3 {
		c.recordPool(p, "NameTaken", "x")
		c.recordPool(p, "OverlapsPool", "y")
	}
	if lines.lines != 2 {
		t.Errorf("%d lines, want 2", lines.lines)
	}
	c.recordPool(p, "OverlapsPool", "z")
	if lines.lines != 3 {
		t.Errorf("a new message leads to %d lines, want 3", lines.lines)
	}
}

// roundTripper is a function that is an http.RoundTripper.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
