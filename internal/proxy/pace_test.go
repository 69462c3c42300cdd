package proxy

import (
	"testing"
	"time"
)

func TestPace(t *testing.T) {
	p := pace{minInterval: 2 * time.Millisecond, maxInterval: 250 * time.Millisecond, retryMin: 50 * time.Millisecond,
		retryMax: 10 * time.Second}
	now := time.Unix(1000, 0)
	if at, ok := p.due(true); !ok || at.After(now) {
		t.Error("the first one is due at once")
	}
	if _, ok := p.due(false); ok {
		t.Error("nothing to do is never due")
	}
	for took, want := range map[time.Duration]time.Duration{
		time.Microsecond: 2 * time.Millisecond, 30 * time.Millisecond: 30 * time.Millisecond, time.Minute: 250 * time.Millisecond,
	} {
		p.done(now, took, false)
		if at, ok := p.due(true); !ok || at.Sub(now) != want {
			t.Errorf("after %s: wait %s, want %s", took, at.Sub(now), want)
		}
		if _, ok := p.due(false); ok {
			t.Error("nothing to do is never due")
		}
	}
	p.done(now, time.Millisecond, true)
	if at, ok := p.due(false); !ok || at.Sub(now) != 50*time.Millisecond {
		t.Errorf("after an error: %s %v", at.Sub(now), ok)
	}
	for range 20 {
		p.done(now, time.Millisecond, true)
	}
	if at, ok := p.due(false); !ok || at.Sub(now) != 10*time.Second {
		t.Errorf("after many errors: %s %v", at.Sub(now), ok)
	}
	if at, _ := p.due(true); at.Sub(now) != time.Second {
		t.Errorf("a change behind errors waits %s", at.Sub(now))
	}
	p.done(now, time.Millisecond, false)
	p.rejected(now, true, true)
	p.rejected(now.Add(time.Millisecond), true, false)
	if at, ok := p.due(false); !ok || at.Sub(now) != 50*time.Millisecond || p.retry(at.Add(-1)) || !p.retry(at) {
		t.Errorf("with something rejected: %s %v", at.Sub(now), ok)
	}
	if at, ok := p.due(true); !ok || at.Sub(now) != 2*time.Millisecond {
		t.Errorf("a change beside something rejected: %s %v", at.Sub(now), ok)
	}
	p.rejected(now, false, true)
	if _, ok := p.due(false); ok {
		t.Error("an error that is over is still retried")
	}
}
