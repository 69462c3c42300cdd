package controller

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fairlead/fairlead/internal/epslice"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/svc"
)

// notes turns the notes of plans into Events. A note is told when it appears,
// not each time it is still true.
type notes struct {
	events *events.Recorder
	mu     sync.Mutex
	told   map[svc.Name]map[epslice.Note]bool
}

func newNotes(s *shared) *notes {
	return &notes{events: s.events, told: map[svc.Name]map[epslice.Note]bool{}}
}

func (n *notes) tell(name svc.Name, object runtime.Object, list []epslice.Note) {
	n.mu.Lock()
	defer n.mu.Unlock()
	before := n.told[name]
	delete(n.told, name)
	if len(list) == 0 {
		return
	}
	now := make(map[epslice.Note]bool, len(list))
	for _, note := range list {
		kind := corev1.EventTypeNormal
		if note.Warning {
			kind = corev1.EventTypeWarning
		}
		if now[note] = true; !before[note] {
			n.events.Event(object, kind, note.Reason, note.Message)
		}
	}
	n.told[name] = now
}

func (n *notes) forget(name svc.Name) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.told, name)
}

// triggers collects, for each Service, when the earliest change happened that
// has not been written yet.
type triggers struct {
	mu sync.Mutex
	at map[svc.Name]time.Time
}

func (t *triggers) note(name svc.Name, at time.Time) {
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
