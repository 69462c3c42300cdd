package pod

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/runner/status"
)

// Of several causes to end a Pod the last one counts, and decides what becomes of its object and its records.
func TestCauses(t *testing.T) {
	for _, c := range []struct {
		name             string
		asked            cause
		deleting, failed bool
		want             cause
		then             outcome
	}{
		{"none", causeNone, false, false, causeNone, keepRecords},
		{"evicted", causeNone, false, true, causeFailed, keepRecords},
		{"deleted", causeNone, true, false, causeDeleting, deleteObject},
		{"evicted, then deleted", causeNone, true, true, causeDeleting, deleteObject},
		{"with the agent", causeStopping, true, true, causeStopping, leaveRecords},
		{"gone from the API", causeRemoved, true, true, causeRemoved, removeAll},
	} {
		w, pod := &worker{}, &corev1.Pod{}
		if c.deleting {
			pod.DeletionTimestamp = &metav1.Time{}
		}
		if c.failed {
			w.rec.Failure = &status.Failure{Reason: "Evicted"}
		}
		got := w.causeOf(pod, c.asked)
		if got != c.want || endings[got].then != c.then {
			t.Errorf("%s: cause %d and then %d, want %d and %d", c.name, got, endings[got].then, c.want, c.then)
		}
		if endings[got].drains != (c.want == causeDeleting) {
			t.Errorf("%s: waits for the nodes: %v", c.name, endings[got].drains)
		}
	}
	// A worker that was asked to stop does not forget that its object is gone.
	w := &worker{wake: loop.NewSignal()}
	w.remove(nil)
	w.stop()
	if w.asked != causeRemoved {
		t.Errorf("asked %d, want %d", w.asked, causeRemoved)
	}
}
