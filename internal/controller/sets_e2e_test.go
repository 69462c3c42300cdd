package controller

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// untilPods waits until the Pods with a label app are as wanted: nodes and versions of those
// that are not being deleted, also of those that do not run.
func (r *setsRig) untilPods(app string, want ...string) []corev1.Pod {
	r.Helper()
	var live []corev1.Pod
	r.within(time.Minute, fmt.Sprintf("Pods %q", want), func() error {
		live = slices.DeleteFunc(r.pods(app), func(p corev1.Pod) bool { return p.DeletionTimestamp != nil })
		var got []string
		for i := range live {
			got = append(got, versionOf(&live[i]))
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			return fmt.Errorf("%q", got)
		}
		return nil
	})
	return live
}

// What upstream's e2e tests ask of a rollout that cannot go on: the next revision takes over,
// or the one before comes back without a restart of Pods that it still has
// (kubernetes test/e2e/apps, deployment.go: rollover, proportional scaling, scale subresource).
func TestRolloversOfDeployments(t *testing.T) {
	t.Parallel()
	r := newSetsRig(t)
	ctx, api := context.Background(), r.client.AppsV1().Deployments(r.ns)
	r.makeDeployment(4)
	r.wantPods("web", versionOf, "1", "1", "1", "1")
	before := r.pods("web")
	r.patchDeployment(versionPatch(stuck))
	r.untilPods("web", "1", "1", "1", stuck, stuck) // 25 % more and 25 % fewer
	scale, err := api.GetScale(ctx, "web", metav1.GetOptions{})
	r.must(err)
	if scale.Spec.Replicas != 4 || scale.Status.Selector != "app=web" {
		t.Errorf("scale %+v", scale)
	}
	more := []byte(`{"spec":{"replicas":8}}`)
	_, err = api.Patch(ctx, "web", types.MergePatchType, more, metav1.PatchOptions{}, "scale")
	r.must(err)
	// Five more (8 and 25 % at most), given in proportion to what each revision has: three and two.
	r.untilPods("web", "1", "1", "1", "1", "1", "1", stuck, stuck, stuck, stuck)
	r.patchDeployment(versionPatch("1"))
	r.wantPods("web", versionOf, "1", "1", "1", "1", "1", "1", "1", "1")
	kept := 0
	for _, p := range r.pods("web") {
		if slices.ContainsFunc(before, func(was corev1.Pod) bool { return was.UID == p.UID }) {
			kept++
		}
	}
	if kept != 3 {
		t.Errorf("%d of the 3 Pods that had stayed are still there", kept)
	}
	r.patchDeployment(versionPatch(stuck))
	r.untilPods("web", "1", "1", "1", "1", "1", "1", stuck, stuck, stuck, stuck)
	r.patchDeployment(versionPatch("3"))
	r.wantPods("web", versionOf, "3", "3", "3", "3", "3", "3", "3", "3")
	d, err := api.Get(ctx, "web", metav1.GetOptions{})
	r.must(err)
	// Revision 1 became 3, that which is stuck 4.
	if got := d.Annotations["deployment.kubernetes.io/revision"]; got != "5" {
		t.Errorf("revision %s, want 5", got)
	}
}

// The same of DaemonSets (daemon_set.go: rollback without unneeded restarts, surge, OnDelete).
func TestRolloversOfDaemonSets(t *testing.T) {
	t.Parallel()
	r := newSetsRig(t)
	ctx, api := context.Background(), r.daemonSet("agent")
	patch := func(patch []byte) {
		t.Helper()
		_, err := api.Patch(ctx, "agent", types.MergePatchType, patch, metav1.PatchOptions{})
		r.must(err)
	}
	r.wantPods("agent", versionOf, "1", "1")
	patch(versionPatch(stuck))
	live := r.untilPods("agent", "1", stuck)
	stays := live[slices.IndexFunc(live, func(p corev1.Pod) bool { return versionOf(&p) == "1" })]
	patch(versionPatch("1"))
	r.wantPods("agent", versionOf, "1", "1")
	if !slices.ContainsFunc(r.pods("agent"), func(p corev1.Pod) bool { return p.UID == stays.UID }) {
		t.Error("the Pod that the update had not reached was replaced")
	}

	patch([]byte(`{"spec":{"updateStrategy":{"rollingUpdate":{"maxSurge":1,"maxUnavailable":0}}}}`))
	patch(versionPatch(stuck))
	r.untilPods("agent", "1", "1", stuck) // one beside the old ones, which stay
	patch(versionPatch("2"))
	r.wantPods("agent", versionOf, "2", "2")

	patch([]byte(`{"spec":{"updateStrategy":{"type":"OnDelete","rollingUpdate":null}}}`))
	patch(versionPatch("3"))
	r.must(r.client.CoreV1().Pods(r.ns).Delete(ctx, r.pods("agent")[0].Name, metav1.DeleteOptions{}))
	r.wantPods("agent", versionOf, "2", "3")
}
