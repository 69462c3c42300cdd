package event

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"sigs.k8s.io/randfill"
)

// Nothing is lost between the two groups.
func TestConversionsKeepEverything(t *testing.T) {
	f := randfill.NewWithSeed(1).NilChance(0.3).NumElements(0, 2)
	for range 200 {
		var e, back eventsv1.Event
		f.Fill(&e)
		e.Kind, e.APIVersion = "", ""
		var core corev1.Event
		toCore(&e, &core)
		toEvents(&core, &back)
		if d := cmp.Diff(e, back); d != "" {
			t.Fatal(d)
		}
		// The other way.
		var c, again corev1.Event
		f.Fill(&c)
		c.Kind, c.APIVersion = "", ""
		toEvents(&c, &e)
		toCore(&e, &again)
		if d := cmp.Diff(c, again); d != "" {
			t.Fatal(d)
		}
	}
}
