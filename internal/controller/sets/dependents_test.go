package sets

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/controller/kit"
	"github.com/fairlead/fairlead/internal/controller/kittest"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/workloads"
)

// A bare Pod concerns owners when it comes and when its labels change, not at each of its
// updates.
func TestOrphansConcernOwnersOnce(t *testing.T) {
	o := &dependents[*corev1.Pod]{
		kind: workloads.ReplicaSetKind, orphans: map[string]map[string]*corev1.Pod{}, gone: map[types.UID]bool{},
	}
	o.AssumeCache = kit.NewAssumeCache(o.ownerOf, func(svc.Name) bool { return true })
	pod := kittest.Pod("shop", "bare", "web", "n0")
	if !o.keep(pod) {
		t.Error("a new one concerns none")
	}
	status := pod.DeepCopy()
	status.ResourceVersion, status.Status.Phase = "2", corev1.PodRunning
	if o.keep(status) {
		t.Error("a status concerns owners")
	}
	owner := kittest.Pod("shop", "owner", "web", "")
	if got := o.candidates(owner); len(got) != 1 || got[0] != status {
		t.Errorf("the candidates are %v", got)
	}
	relabeled := status.DeepCopy()
	relabeled.Labels = map[string]string{"app": "db"}
	if !o.keep(relabeled) {
		t.Error("other labels concern none")
	}
	if o.forget(relabeled); !o.keep(relabeled) {
		t.Error("one that came again concerns none")
	}
}
