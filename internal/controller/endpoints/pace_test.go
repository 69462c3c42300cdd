package endpoints

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/controller/kittest"
	"github.com/fairlead/fairlead/internal/controller/selection"
	"github.com/fairlead/fairlead/internal/loop"
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
			left, removal := p.wait(name)
			for ; left > 0; left, removal = p.wait(name) {
				time.Sleep(left)
			}
			p.wrote(name, time.Now(), removal)
			return time.Since(begin)
		}
		for range 3 {
			if d := change(web); d != 0 {
				t.Errorf("a change after a pause waits for %s", d)
			}
			time.Sleep(minGap)
		}
		p.wrote(web, time.Now(), false)
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
			p.wrote(other, began, false)
			if left, _ := p.wait(other); left != want {
				t.Errorf("after a write of %s the next waits for %s, want %s", took, left, want)
			}
		}
	})
}

// A removal waits for no write but another removal's, and many without pause as long as
// other changes.
func TestPaceOfRemovals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p pace
		web := svc.Name{Namespace: "shop", Name: "web"}
		remove := func() (waited time.Duration) {
			begin := time.Now()
			p.removal(web)
			left, removal := p.wait(web)
			for ; left > 0; left, removal = p.wait(web) {
				time.Sleep(left)
			}
			if !removal {
				t.Error("a write with a removal is taken for another")
			}
			p.wrote(web, time.Now(), removal)
			return time.Since(begin)
		}
		for range 10 {
			p.wrote(web, time.Now(), false) // a Pod that has become ready, without a pause since the last
			if d := remove(); d != 0 {
				t.Errorf("after another write a removal waits for %s", d)
			}
			time.Sleep(minRemovalGap)
		}
		if left, removal := p.wait(web); removal || left != minGap-minRemovalGap {
			t.Errorf("after the removals another change is %v and waits for %s, want %s", removal, left, minGap-minRemovalGap)
		}
		time.Sleep(maxGap)
		if d := remove(); d != 0 {
			t.Errorf("a removal after a pause waits for %s", d)
		}
		begin, n := time.Now(), 0
		for ; time.Since(begin) < 100*maxGap; n++ {
			remove()
		}
		if n > 110 {
			t.Errorf("%d writes in %s of removals without pause, want one in %s", n, 100*maxGap, maxGap)
		}
	})
}

// What takes a ready Pod from the new connections of a Service is a removal, and nothing else.
func TestRemovals(t *testing.T) {
	web := svc.Name{Namespace: "shop", Name: "web"}
	pod := func(change ...func(*corev1.Pod)) *corev1.Pod {
		p := kittest.Pod("shop", "web-1", "web", "node1")
		p.UID, p.Status.PodIP = "1", "10.244.0.1"
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		for _, f := range change {
			f(p)
		}
		return p
	}
	unready := func(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }
	deleted := func(p *corev1.Pod) { p.DeletionTimestamp = new(metav1.Now()) }
	ended := func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }
	moved := func(p *corev1.Pod) { p.Labels = map[string]string{"app": "other"} }
	other := func(p *corev1.Pod) { p.UID = "2" }
	address := func(p *corev1.Pod) { p.Status.PodIP = "10.244.0.2" }
	for name, c := range map[string]struct {
		from, to *corev1.Pod // nil for none
		removal  bool
	}{
		"created":            {nil, pod(), false},
		"ready":              {pod(unready), pod(), false},
		"unready":            {pod(), pod(unready), true},
		"deleted":            {pod(), pod(deleted), true},
		"deleted, unready":   {pod(unready), pod(unready, deleted), false},
		"deleted by force":   {pod(), nil, true},
		"gone":               {pod(deleted), nil, false},
		"ended":              {pod(), pod(ended), true},
		"with another label": {pod(), pod(moved), true},
		"replaced":           {pod(), pod(other), true},
		"with another IP":    {pod(), pod(address), false},
	} {
		t.Run(name, func(t *testing.T) {
			x := selection.NewIndex()
			slices := &endpointSlices{index: x, loop: loop.New(slog.New(slog.DiscardHandler), "test", 1,
				func(context.Context, svc.Name) error { return nil })}
			defer slices.loop.Queue.ShutDown()
			x.Subscribe(slices.changed)
			s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: web.Namespace, Name: web.Name}}
			s.Spec.Selector = map[string]string{"app": "web"}
			x.SetService(s)
			if c.from != nil {
				x.SetPod(c.from)
			}
			if c.to != nil {
				x.SetPod(c.to)
			} else {
				x.DeletePod(c.from)
			}
			if _, removal := slices.pace.wait(web); removal != c.removal {
				t.Errorf("a removal: %v, want %v", removal, c.removal)
			}
		})
	}
}
