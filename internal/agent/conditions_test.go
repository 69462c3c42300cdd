package agent

import (
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Each condition that is told is an Event when it turns False and one when it is True again, and none in between: upstreams when
// they stop answering, and packets when they are not forwarded.
func TestConditionsAreEvents(t *testing.T) {
	for _, kind := range told {
		t.Run(string(kind), func(t *testing.T) { conditionIsEvent(t, kind) })
	}
}

func conditionIsEvent(t *testing.T, kind corev1.NodeConditionType) {
	t.Helper()
	var failed atomic.Bool
	state := func() corev1.NodeCondition {
		if failed.Load() {
			return corev1.NodeCondition{Type: kind, Status: corev1.ConditionFalse, Reason: "Failed", Message: "it fails"}
		}
		return corev1.NodeCondition{Type: kind, Status: corev1.ConditionTrue, Reason: "Works", Message: "it works"}
	}
	inBubble(t, Options{}, func(w *world) {
		want := func(what string, reasons ...string) {
			t.Helper()
			list, err := w.client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
			if err != nil || len(list.Items) != len(reasons) {
				t.Fatalf("%s: %d Events (%v), want %v", what, len(list.Items), err, reasons)
			}
			for i, e := range list.Items {
				if e.Reason != reasons[i] || e.InvolvedObject.Name != "here" || e.Count > 1 {
					t.Errorf("%s: Event %+v, want %s", what, e, reasons[i])
				}
			}
		}
		w.settle(time.Minute)
		want("while it works")
		failed.Store(true)
		w.settle(5 * time.Minute)
		want("after it failed", "Failed")
		failed.Store(false)
		w.settle(5 * time.Minute)
		want("after it works again", "Failed", "Works")
	}, state)
}
