package agent

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/svc"
)

// told are the conditions whose changes are Events of the Node, with the condition's reason and message. Other packages send
// the Events of other conditions.
var told = []corev1.NodeConditionType{svc.UpstreamsAnswer, svc.PacketsForwarded} //nolint:gochecknoglobals // constant in all but name

// tell sends an Event for each told condition that a written status turned from or to False.
func tell(recorder *events.Recorder, node string, was, is []corev1.NodeCondition) {
	self := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: node, UID: types.UID(node)}
	for _, c := range is {
		if !slices.Contains(told, c.Type) {
			continue
		}
		failed := slices.ContainsFunc(was, func(old corev1.NodeCondition) bool {
			return old.Type == c.Type && old.Status == corev1.ConditionFalse
		})
		switch {
		case c.Status == corev1.ConditionFalse && !failed:
			recorder.Event(self, corev1.EventTypeWarning, c.Reason, c.Message)
		case c.Status == corev1.ConditionTrue && failed:
			recorder.Event(self, corev1.EventTypeNormal, c.Reason, c.Message)
		}
	}
}
