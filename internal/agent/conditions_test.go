package agent

import (
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Dead upstreams are an Event when they end to answer and one when they answer again, and none in between.
func TestConditionsAreEvents(t *testing.T) {
	var dead atomic.Bool
	opts := Options{}
	upstreams := func() corev1.NodeCondition {
		if dead.Load() {
			return corev1.NodeCondition{Type: svc.UpstreamsAnswer, Status: corev1.ConditionFalse, Reason: "AllDead", Message: "none answers"}
		}
		return corev1.NodeCondition{Type: svc.UpstreamsAnswer, Status: corev1.ConditionTrue, Reason: "Answering", Message: "all answer"}
	}
	inBubble(t, opts, func(w *world) {
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
		want("while all answer")
		dead.Store(true)
		w.settle(5 * time.Minute)
		want("after the last one is dead", "AllDead")
		dead.Store(false)
		w.settle(5 * time.Minute)
		want("after they answer again", "AllDead", "Answering")
	}, upstreams)
}
