package cli

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/cli/client/status"
)

// 'fairlead status' shows whether nodes have programmed the Services that ask for that, and names
// those that wait for long; where none asks there is no such column.
func TestStatusShowsWhatIsProgrammed(t *testing.T) {
	server := apiservertest.StartServer(t)
	services := kubernetes.NewForConfigOrDie(server.LoopbackConfig()).CoreV1().Services("default")
	ask := func(args ...string) string {
		t.Helper()
		code, out, stderr := call(t, append([]string{"status", "--kubeconfig", server.Kubeconfig()}, args...)...)
		if code != exitDone {
			t.Fatalf("exit %d: %s%s", code, out, stderr)
		}
		return out
	}
	add := func(name string, conditions ...metav1.Condition) {
		t.Helper()
		s := corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: corev1.ServiceSpec{
				Selector: map[string]string{"app": name}, Type: corev1.ServiceTypeClusterIP,
				Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(80)}},
			},
		}
		made, err := services.Create(t.Context(), &s, metav1.CreateOptions{})
		if err == nil {
			made.Status.Conditions = conditions
			_, err = services.UpdateStatus(t.Context(), made, metav1.UpdateOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	is := func(status metav1.ConditionStatus, generation int64, age time.Duration, message string) metav1.Condition {
		return metav1.Condition{Type: barrier.Programmed, Status: status, ObservedGeneration: generation, Reason: "Pending",
			LastTransitionTime: metav1.NewTime(time.Now().Add(-age)), Message: message}
	}
	add("silent")
	serviceLine := func(out, name string) string {
		for l := range strings.Lines(out) {
			if f := strings.Fields(l); len(f) > 1 && f[0] == "default" && f[1] == name {
				return strings.TrimSuffix(l, "\n")
			}
		}
		t.Fatalf("no line of %s:\n%s", name, out)
		return ""
	}
	if out := ask(); !strings.HasSuffix(serviceLine(out, "silent"), " 0/0") || strings.Contains(out, "PORTS   READY   PROGRAMMED") {
		t.Errorf("with no Service that asks:\n%s", out)
	}
	add("done", is(metav1.ConditionTrue, 1, time.Hour, "2 of 2 nodes have programmed it"))
	add("fresh", is(metav1.ConditionFalse, 1, 0, "waiting for n1"))
	add("stuck", is(metav1.ConditionFalse, 1, time.Hour, "waiting for n2\n! a line"))
	add("older", is(metav1.ConditionTrue, 0, time.Hour, "as it was"))
	out := ask()
	for name, end := range map[string]string{
		"silent": " 0/0     -", "done": " 0/0     yes", "fresh": " no: waiting for n1", "stuck": " no: waiting for n2; ! a line",
		"older": " unknown: the condition is of an earlier spec",
	} {
		if line := serviceLine(out, name); !strings.HasSuffix(line, end) {
			t.Errorf("%q does not end with %q", line, end)
		}
	}
	var r status.Report
	if err := json.Unmarshal([]byte(ask("-o", "json")), &r); err != nil {
		t.Fatal(err)
	}
	var wrong []string
	for _, p := range r.Problems {
		if strings.Contains(p, "is not programmed") {
			wrong = append(wrong, p)
		}
	}
	want := []string{"service default/stuck is not programmed on every node: waiting for n2; ! a line"}
	if !slices.Equal(wrong, want) {
		t.Errorf("the problems are %q, want %q", wrong, want)
	}
	i := slices.IndexFunc(r.Services, func(s status.ServiceReport) bool { return s.Name == "done" })
	if c := r.Services[i].Programmed; c == nil || c.Status != metav1.ConditionTrue || c.Message == "" {
		t.Errorf("the condition in JSON is %+v", c)
	}
}
