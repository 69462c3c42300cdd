package proxy

import (
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// behaviour 59: that another mode runs than was asked for is told by an Event.
func TestFallbackBecomesAnEvent(t *testing.T) {
	inBubble(t, func(o *Options) { o.FallbackReason = "proxy mode iptables is taken in place of ipvs: no such module" }, func(w *world) {
		w.settle(time.Minute)
		events := w.events("ProxyModeFallback")
		if len(events) != 1 || events[0].Type != "Warning" || events[0].InvolvedObject.Kind != "Node" ||
			events[0].InvolvedObject.Name != "here" || !strings.Contains(events[0].Message, "no such module") {
			t.Errorf("events %+v", events)
		}
	})
}

// Weights that a mode does not follow are told by an Event, with what does.
func TestWeightsIgnored(t *testing.T) {
	inBubble(t, func(o *Options) { o.Mode = "nft" }, func(w *world) {
		w.setService(service("a", 1))
		for i, weight := range []string{"3", "1", "0"} {
			s := slice("a", i)
			s.Name += "-" + weight
			s.Annotations = map[string]string{svc.WeightAnnotation: weight}
			w.setSlice(s)
		}
		w.settle(time.Minute)
		events := w.events(table.ReasonWeightsIgnored)
		if len(events) != 1 || events[0].Type != "Warning" || events[0].InvolvedObject.Name != "a" ||
			!strings.Contains(events[0].Message, "mode nft of the proxy chooses evenly; mode ipvs") {
			t.Errorf("events %+v", events)
		}
	})
}

// behaviours 55 to 58: a Service names its scheduler; one that the node lacks is told
// by an Event, and the Service is served without.
func TestSchedulerOfAService(t *testing.T) {
	inBubble(t, func(o *Options) { o.Schedulers = []string{"rr", "lc"} }, func(w *world) {
		at := func() string {
			for p := range w.proxy.Table().All() {
				if p.ID.Name == (svc.Name{Namespace: "default", Name: "a"}) {
					return p.Scheduler
				}
			}
			return "not served"
		}
		for _, c := range []struct {
			value, want string
			events      int
		}{{"", "", 0}, {"lc", "lc", 0}, {"sed", "", 1}, {"rr", "rr", 1}} {
			s := service("a", 1)
			s.Annotations = map[string]string{svc.SchedulerAnnotation: c.value}
			w.setService(s)
			w.settle(time.Minute)
			if got := at(); got != c.want {
				t.Errorf("annotation %q: scheduler %q, want %q", c.value, got, c.want)
			}
			events := w.events(table.ReasonUnknownScheduler)
			if len(events) != c.events {
				t.Errorf("annotation %q: events %+v, want %d", c.value, events, c.events)
			}
		}
		if e := w.events(table.ReasonUnknownScheduler); len(e) == 1 && (e[0].InvolvedObject.Name != "a" ||
			!strings.Contains(e[0].Message, `"sed"`)) {
			t.Errorf("event %+v", e[0])
		}
	})
}
