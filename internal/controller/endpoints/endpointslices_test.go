package endpoints

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
)

// behaviour 15: a selector that matches nothing gets an Event, but not while the Pods of a
// new Service may still be on their way.
func TestEmptySelectorGetsAnEventAfterADelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &kit.Kit{Log: slog.New(slog.DiscardHandler)}
		c := &endpointSlices{Kit: k, empty: map[svc.Name]time.Time{}}
		c.loop = loop.New(k.Log, "test", 1, func(context.Context, svc.Name) error { return nil })
		defer c.loop.Queue.ShutDown()
		web := svc.Name{Namespace: "shop", Name: "web"}
		if list := c.emptyEvent(web, 0); len(list) > 0 {
			t.Errorf("an Event at once: %v", list)
		}
		// The loop looks again by itself when the time is over.
		began := time.Now()
		name, _ := c.loop.Queue.Get()
		if waited := time.Since(began); name != web || waited < emptyEventDelay {
			t.Fatalf("%s comes again after %s", name, waited)
		}
		if list := c.emptyEvent(web, 0); len(list) != 1 || list[0].Reason != "NoPodsSelected" {
			t.Errorf("after %s: %v", emptyEventDelay, list)
		}
		if list := c.emptyEvent(web, 1); len(list) > 0 {
			t.Errorf("with a pod: %v", list)
		}
		if list := c.emptyEvent(web, 0); len(list) > 0 {
			t.Errorf("an Event at once when the last pod goes: %v", list)
		}
	})
}
