package endpoints

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/svc"
)

// planEvents records the Events of plans. An Event is recorded when a plan has
// it and the plan before did not, not each time a Service is planned again.
type planEvents struct {
	recorder *events.Recorder
	mu       sync.Mutex
	recorded map[svc.Name]map[epslice.Event]bool // by the last plan
}

func newPlanEvents(r *events.Recorder) *planEvents {
	return &planEvents{recorder: r, recorded: map[svc.Name]map[epslice.Event]bool{}}
}

func (p *planEvents) record(name svc.Name, object runtime.Object, list []epslice.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.recorded[name]
	delete(p.recorded, name)
	if len(list) == 0 {
		return
	}
	now := make(map[epslice.Event]bool, len(list))
	for _, e := range list {
		eventType := corev1.EventTypeNormal
		if e.Warning {
			eventType = corev1.EventTypeWarning
		}
		if now[e] = true; !before[e] {
			p.recorder.Event(object, eventType, e.Reason, e.Message)
		}
	}
	p.recorded[name] = now
}

func (p *planEvents) forget(name svc.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.recorded, name)
}

// triggers has, for each Service, the time of the earliest change that has not
// been written yet.
type triggers struct {
	mu sync.Mutex
	at map[svc.Name]time.Time
}

func (t *triggers) add(name svc.Name, at time.Time) {
	if at.IsZero() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if have, ok := t.at[name]; !ok || at.Before(have) {
		if t.at == nil {
			t.at = map[svc.Name]time.Time{}
		}
		t.at[name] = at
	}
}

func (t *triggers) take(name svc.Name) time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := t.at[name]
	delete(t.at, name)
	return at
}
