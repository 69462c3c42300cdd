package speaker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/announce"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/loop"
)

// callTimeout bounds one call of the API server, which may be down without an end of the connection.
const callTimeout = 5 * time.Second

// speakerStatus writes the Speaker object.
type speakerStatus struct {
	// writing is held during flush, so that the latest status is written last.
	writing sync.Mutex

	// soon is set when a status is not written after writePeriod, but after promptPeriod.
	soon loop.Signal

	mu     sync.Mutex
	want   v1.SpeakerStatus
	dirty  bool
	prompt bool
	stale  bool // what it announces has changed since want was made
}

// outdated reports whether a new status may differ from the last one: after poke, or in the facts that change without it.
func (t *speakerStatus) outdated(now *v1.SpeakerStatus) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	stale := t.stale
	t.stale = false
	return stale || len(t.want.Endpoints) == 0 || t.want.Eligible != now.Eligible || t.want.Reason != now.Reason ||
		t.want.NoMesh != now.NoMesh ||
		t.want.VoterVersion != now.VoterVersion || !slices.Equal(t.want.Conditions, now.Conditions) ||
		!slices.Equal(t.want.Absent, now.Absent) || !served(t.want.Gateways).Equal(now.Gateways)
}

// served returns Gateways as the Front has them.
func served(g *v1.ServedGateways) *v1.ServedGateways {
	if g == nil {
		return nil
	}
	out := &v1.ServedGateways{Served: slices.Clone(g.Served), More: g.More}
	for i := range out.Served {
		out.Served[i].Announced = nil
	}
	return out
}

// addAnnounced adds to the Gateways of a status which of their addresses this node announces.
func addAnnounced(s *v1.SpeakerStatus) {
	if s.Gateways == nil {
		return
	}
	have := map[string]bool{}
	for i := range s.Addresses {
		have[s.Addresses[i].Address] = true
	}
	for i := range s.Gateways.Served {
		g := &s.Gateways.Served[i]
		for _, a := range g.Addresses {
			if have[a] {
				g.Announced = append(g.Announced, a)
			}
		}
	}
}

// last returns the status that was set last.
func (t *speakerStatus) last() v1.SpeakerStatus {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.want
}

// set has a status written. A controller waits for what it has of Gateways.
func (t *speakerStatus) set(next v1.SpeakerStatus) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.want.Gateways.Equal(next.Gateways) {
		t.prompt = true
		t.soon.Set()
	}
	t.want, t.dirty = next, true
}

const (
	// writePeriod is the least time between two writes of the Speaker object.
	writePeriod = 2 * time.Second
	// promptPeriod is that of writes that a controller waits for.
	promptPeriod = 50 * time.Millisecond
)

// poke records that what the speaker announces has changed.
func (t *speakerStatus) poke() {
	t.mu.Lock()
	t.stale = true
	t.mu.Unlock()
}

// conflictConditions returns the conditions of a speaker that sees conflicts.
func conflictConditions(conflicts []announce.Conflict, before []metav1.Condition) []metav1.Condition {
	if len(conflicts) == 0 {
		return nil
	}
	var texts []string
	for _, c := range conflicts {
		text := fmt.Sprintf("%s at %s answers for %s", c.MAC, c.Interface, c.Addr)
		if c.Held {
			text += ", which is not announced until that ends"
		}
		texts = append(texts, text)
	}
	out := slices.Clone(before)
	meta.SetStatusCondition(&out, metav1.Condition{
		Type: v1.SpeakerAddressConflict, Status: metav1.ConditionTrue, Reason: "ForeignMachine", Message: events.Abbreviate(texts),
	})
	return out
}

// run writes until ctx ends.
func (t *speakerStatus) run(ctx context.Context, lb *v1.Client, name string, log *slog.Logger) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	var last time.Time
	warned := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-t.soon:
		}
		t.mu.Lock()
		due := t.dirty && (time.Since(last) >= writePeriod || t.prompt && time.Since(last) >= promptPeriod)
		t.mu.Unlock()
		if !due {
			continue
		}
		last = time.Now()
		if err := t.flush(ctx, lb, name); err != nil && ctx.Err() == nil && !warned {
			warned = true
			log.Warn("cannot write the Speaker object; retrying", "speaker", name, "err", err)
		} else if err == nil {
			warned = false
		}
	}
}

// flush writes a status that is not written yet.
func (t *speakerStatus) flush(ctx context.Context, lb *v1.Client, name string) error {
	t.writing.Lock()
	defer t.writing.Unlock()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	t.mu.Lock()
	want := t.want
	dirty := t.dirty
	t.dirty, t.prompt = false, false
	t.mu.Unlock()
	if !dirty {
		return nil
	}
	err := t.put(ctx, lb, name, want)
	if err != nil {
		t.mu.Lock()
		t.dirty = true
		t.mu.Unlock()
	}
	return err
}

func (t *speakerStatus) put(ctx context.Context, lb *v1.Client, name string, want v1.SpeakerStatus) error {
	for range 3 {
		have, err := lb.Speakers.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			have, err = lb.Speakers.Create(ctx, &v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		}
		if err != nil {
			return err
		}
		have.Status = want
		if _, err = lb.Speakers.UpdateStatus(ctx, have, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
			return err
		}
	}
	return errors.New("other clients write it at the same time")
}
