package controller

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// A change after a pause is written at once, and changes without pause less and
// less often, but none of them later than maxGap.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p pace
		web, other := svc.Name{Namespace: "shop", Name: "web"}, svc.Name{Namespace: "shop", Name: "other"}
		// change is what a loop does for one change; it returns the delay.
		change := func(name svc.Name) time.Duration {
			begin := time.Now()
			for left := p.wait(name); left > 0; left = p.wait(name) {
				time.Sleep(left)
			}
			p.wrote(name, time.Now())
			return time.Since(begin)
		}
		for range 3 {
			if d := change(web); d != 0 {
				t.Errorf("a change after a pause waits for %s", d)
			}
			time.Sleep(minGap)
		}
		p.wrote(web, time.Now())
		for i, want := range []time.Duration{minGap, 2 * minGap, 4 * minGap, 8 * minGap, maxGap, maxGap} {
			if d := change(web); d != want {
				t.Errorf("change %d without pause waits for %s, want %s", i, d, want)
			}
		}
		if d := change(other); d != 0 {
			t.Errorf("another Service waits for %s", d)
		}
		time.Sleep(maxGap)
		if d := change(web); d != 0 {
			t.Errorf("after the burst a change waits for %s", d)
		}
		if d := change(web); d != minGap {
			t.Errorf("the second burst begins with %s, want %s", d, minGap)
		}
		p.forget(web)
		if d := change(web); d != 0 {
			t.Errorf("a new Service of the name waits for %s", d)
		}
		// A write that takes long is followed by a longer gap.
		for took, want := range map[time.Duration]time.Duration{
			time.Millisecond: minGap, 10 * time.Millisecond: gapFactor * 10 * time.Millisecond, time.Second: maxGap,
		} {
			began := time.Now()
			time.Sleep(took)
			p.forget(other)
			p.wrote(other, began)
			if left := p.wait(other); left != want {
				t.Errorf("after a write of %s the next waits for %s, want %s", took, left, want)
			}
		}
	})
}
