package status

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/runner/shim"
	"github.com/fairlead/fairlead/internal/svc"
)

// view makes a Pod out of one letter per container: lower case init, upper
// case main. w waiting, r running, s succeeded, f failed for good, c crashed and
// to be started again.
func view(policy corev1.RestartPolicy, containers string, over bool) Pod {
	v := Pod{Pod: &corev1.Pod{Spec: corev1.PodSpec{RestartPolicy: policy}}, Over: over, Sandbox: true}
	for i, letter := range containers {
		c := &Container{Spec: &corev1.Container{Name: fmt.Sprint("c", i)}, Role: Init}
		if letter < 'a' {
			c.Role = Main
		}
		switch strings.ToLower(string(letter)) {
		case "r":
			c.Now, c.Started, c.Ready = &shim.State{}, true, true
		case "s":
			c.Now = &shim.State{Exited: true}
		case "f":
			c.Now = &shim.State{Exited: true, ExitCode: 1}
		case "c":
			c.Now, c.Waiting = &shim.State{Exited: true, ExitCode: 1}, &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}
		}
		v.Containers = append(v.Containers, c)
	}
	return v
}

func TestPhase(t *testing.T) {
	const always, never = corev1.RestartPolicyAlways, corev1.RestartPolicyNever
	for _, c := range []struct {
		policy     corev1.RestartPolicy
		containers string
		over       bool
		want       corev1.PodPhase
		ready      bool
	}{
		{always, "W", false, corev1.PodPending, false},
		{always, "R", false, corev1.PodRunning, true},
		{always, "RR", false, corev1.PodRunning, true},
		{always, "RW", false, corev1.PodPending, false},
		{always, "RC", false, corev1.PodRunning, false},
		{always, "C", false, corev1.PodRunning, false},
		{always, "rW", false, corev1.PodPending, false},
		{always, "sR", false, corev1.PodRunning, true},
		{always, "cW", false, corev1.PodPending, false},
		{never, "RS", false, corev1.PodRunning, false},
		{never, "RF", false, corev1.PodRunning, false},
		{never, "S", true, corev1.PodSucceeded, false},
		{never, "SF", true, corev1.PodFailed, false},
		{never, "fW", true, corev1.PodFailed, false},
		{never, "W", true, corev1.PodFailed, false},
	} {
		st := view(c.policy, c.containers, c.over).Status(time.Now())
		ready := st.Conditions[conditionIndex(st.Conditions, corev1.PodReady)].Status == corev1.ConditionTrue
		if st.Phase != c.want || ready != c.ready {
			t.Errorf("%s %s over=%v: %s, ready %v; want %s, %v", c.policy, c.containers, c.over, st.Phase, ready, c.want, c.ready)
		}
	}
}

// A transition time moves with the status and not with anything else.
func TestTransitionTimes(t *testing.T) {
	at := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	v := view(corev1.RestartPolicyAlways, "R", false)
	v.Pod.Status = v.Status(at)
	v.Pod.Status = v.Status(at.Add(time.Minute))
	when := func() time.Time {
		return v.Pod.Status.Conditions[conditionIndex(v.Pod.Status.Conditions, corev1.PodReady)].LastTransitionTime.Time
	}
	if !when().Equal(at) {
		t.Errorf("moved to %v without a change", when())
	}
	v.Containers[0].Ready = false
	v.Pod.Status = v.Status(at.Add(2 * time.Minute))
	if !when().Equal(at.Add(2 * time.Minute)) {
		t.Errorf("%v, want the time of the change", when())
	}
}

func TestStatusPatch(t *testing.T) {
	base := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "u1"}}
	base.Status.Conditions = []corev1.PodCondition{{Type: "example.com/theirs", Status: corev1.ConditionTrue},
		{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}}
	want := view(corev1.RestartPolicyAlways, "R", false).Status(time.Now())
	want.Conditions = append(want.Conditions, corev1.PodCondition{Type: "example.com/theirs", Status: corev1.ConditionFalse})
	patch, err := statusPatch(base, &want)
	if err != nil || !strings.Contains(string(patch), `"uid":"u1"`) ||
		strings.Contains(string(patch), `"example.com/theirs","status":"False"`) || strings.Contains(string(patch), "theirs\",\"lastP") {
		t.Errorf("patch %s, %v", patch, err)
	}
	same := base.DeepCopy()
	same.Status = want
	if patch, err := statusPatch(same, &want); patch != nil || err != nil {
		t.Errorf("a patch without a change: %s, %v", patch, err)
	}
}

func TestNewer(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{{"10", "9", true}, {"9", "10", false}, {"9", "9", false}, {"", "9", false}, {"9", "", true}, {"x", "y", false}} {
		if got := newer(c.a, c.b); got != c.want {
			t.Errorf("newer(%q, %q) = %v", c.a, c.b, got)
		}
	}
}

// During an outage a ready Pod is written as not ready, but for what the controllers wrote for the same reason; others do
// not change. The end of an outage is a transition, and this node's own findings go on.
func TestOutage(t *testing.T) {
	then, now := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC), time.Date(2026, 1, 2, 13, 0, 0, 0, time.UTC)
	const ready, unready = "R", "C"
	marked := corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: svc.ReasonNodeNotReady,
		Message: "by a controller"}
	for _, c := range []struct {
		name, containers, why string
		base                  []corev1.PodCondition
		status                corev1.ConditionStatus
		reason, message       string
		since                 time.Time
	}{
		{"none", ready, "", nil, corev1.ConditionTrue, "", "", then},
		{"begins", ready, "no device", nil, corev1.ConditionFalse, svc.ReasonNodeNotReady, "no device", now},
		{"marked", ready, "no device", []corev1.PodCondition{marked},
			corev1.ConditionFalse, svc.ReasonNodeNotReady, "by a controller", time.Time{}},
		{"ends", ready, "", []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: svc.ReasonNodeNotReady,
			LastTransitionTime: metav1.NewTime(then.Add(time.Minute))}}, corev1.ConditionTrue, "", "", now},
		{"unready", unready, "no device", nil, corev1.ConditionFalse, "ContainersNotReady", "containers with unready status: [c0]", then},
	} {
		want := view(corev1.RestartPolicyAlways, c.containers, false).Status(then)
		var o Outage
		o.Set(c.why)
		got := o.cover(&corev1.PodStatus{Conditions: c.base}, &want, now)
		r := got.Conditions[conditionIndex(got.Conditions, corev1.PodReady)]
		if r.Status != c.status || r.Reason != c.reason || r.Message != c.message || !r.LastTransitionTime.Time.Equal(c.since) {
			t.Errorf("%s: %+v", c.name, r)
		}
		if statusReady(&want) != (c.containers == ready) {
			t.Errorf("%s: what the node found has changed", c.name)
		}
	}
}
