package apiserver_test

import (
	"fmt"
	"net/http"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// kubectl top shows what the agents measure. "nodes" and "pods" still mean the core group. Nodes whose agents do
// not answer are left out, and agents are not asked again for each request.
func TestKubectlTop(t *testing.T) {
	t.Parallel()
	program := kubectl(t)
	s := apiservertest.StartServer(t)
	c := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	a := startAgent(t, s, "n1")
	dead := startAgent(t, s, "dead")
	dead.Close()
	for _, n := range []*corev1.Node{a.node, dead.node} {
		n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2"), corev1.ResourceMemory: resource.MustParse("1Gi")}
		if _, err := c.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, node := range []string{"n1", "dead"} {
		p, err := c.CoreV1().Pods("default").Create(t.Context(), podNamed("on-"+node, onNode(node)), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		p.Status.Phase = corev1.PodRunning
		if p, err = c.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if node == "n1" {
			a.measured.Store(&p.UID)
		}
	}
	k := kubectlOf{t, program, s.Kubeconfig(), t.TempDir()}
	k.steps([]kubectlStep{
		{"top nodes", []string{"n1", "250m", "12%", "512Mi", "50%", "dead", "<unknown>"}},
		{"top node dead", []string{"!", "cannot ask the agent of node dead"}},
		{"top pods", []string{"on-n1", "100m", "64Mi"}},
		{"top pods --containers -l a=b", []string{"No resources found"}},
		{"top pod on-n1 --containers", []string{"c", "100m", "64Mi"}},
		{"top pod nobody", []string{"!", `"nobody" not found`}},
		{"get nodes n1 -o jsonpath={.apiVersion}", []string{"v1"}},
		{"get nodes.metrics.k8s.io", []string{"NAME", "CPU", "MEMORY", "WINDOW", "250m"}},
		{"explain nodes.usage --api-version=metrics.k8s.io/v1beta1", []string{"The memory usage is the memory working set"}},
	})
	if n := a.summaries.Load(); n > 3 {
		t.Errorf("the agent was asked %d times", n)
	}
}

// summary answers for the pod whose UID is in a.measured.
func (a *agent) summary(w http.ResponseWriter, _ *http.Request) {
	a.summaries.Add(1)
	const used = `"cpu":{"time":"2026-01-02T03:04:05Z","usageNanoCores":%d},"memory":{"workingSetBytes":%d}`
	uid := ""
	if p := a.measured.Load(); p != nil {
		uid = string(*p)
	}
	fmt.Fprintf(w, `{"node":{"nodeName":"n1",`+used+`},"pods":[{"podRef":{"name":"on-n1","namespace":"default","uid":%q},
		"containers":[{"name":"c",`+used+`},{"name":"unmeasured"}]}]}`, 250_000_000, 512<<20, uid, 100_000_000, 64<<20)
}
