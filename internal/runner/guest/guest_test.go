package guest_test

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/runner"
	_ "github.com/fairlead/fairlead/internal/runner/shim/early"
	"github.com/fairlead/fairlead/internal/testbed/uml"
)

func TestMain(m *testing.M) {
	if os.Getenv(serverEnv) != "" {
		answer()
	}
	uml.Main(m, linkServer)
}

const (
	nodeName  = "node-a"
	groups    = "/sys/fs/cgroup"
	namespace = "tenant" // whose Pods are not allowed to be privileged
	patience  = 240 * time.Second
	pause     = 250 * time.Millisecond // between two looks: the guest's one processor is for what is waited for
	maxPIDs   = 64                     // of each Pod there
)

// machine is a node with its API server.
type machine struct {
	t      *testing.T
	client kubernetes.Interface
	runner *runner.Runner
	state  string // on its own small disk
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	if err := unix.Mount("none", groups, "cgroup2", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
		t.Fatal(err)
	}
	config := apiservertest.Start(t)
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t, client: client}
	core := client.CoreV1()
	node, err := core.Nodes().Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName}, Spec: corev1.NodeSpec{PodCIDR: "10.244.1.0/24", PodCIDRs: []string{"10.244.1.0/24"}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}}
	if _, err := core.Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := core.Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: namespace, Labels: map[string]string{"pod-security.kubernetes.io/enforce": "baseline"},
	}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	disk := t.TempDir()
	if err := unix.Mount("none", disk, "tmpfs", 0, "size=64m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(disk, 0); err != nil {
			t.Error(err)
		}
	})
	state := filepath.Join(disk, "state")
	m.state = state
	m.runner, err = runner.New(runner.Options{
		Client: client, NodeName: nodeName, StateDir: state, StopPods: true, PodPIDs: maxPIDs, Protect: true,
		Log:          slog.New(slog.NewTextHandler(os.Stderr, nil)),
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, ClusterDNS: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.runner.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := runner.Cleanup(ctx, state, runner.RemoveNetwork); err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob(groups + "/fairlead*"); len(left) != 0 {
			t.Errorf("control groups are left: %v", left)
		}
	})
	ready, cancelReady := context.WithTimeout(t.Context(), patience)
	defer cancelReady()
	if err := m.runner.WaitReady(ready); err != nil {
		t.Fatal(err)
	}
	return m
}

// pod creates a pod of one container that runs a script.
func (m *machine) pod(namespace, name, script string, limits corev1.ResourceList, change ...func(*corev1.PodSpec)) {
	m.t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeName: nodeName, RestartPolicy: corev1.RestartPolicyNever, TerminationGracePeriodSeconds: new(int64(0)),
			AutomountServiceAccountToken: new(false),
			Containers: []corev1.Container{{
				Name: "main", Image: "host", Command: []string{"sh", "-c", script}, Resources: corev1.ResourceRequirements{Limits: limits},
			}},
		},
	}
	for _, f := range change {
		f(&p.Spec)
	}
	if _, err := m.client.CoreV1().Pods(namespace).Create(m.t.Context(), p, metav1.CreateOptions{}); err != nil {
		m.t.Fatal(err)
	}
}

// until waits for a pod to be as ok says.
func (m *machine) until(namespace, name, what string, ok func(*corev1.Pod) bool) *corev1.Pod {
	m.t.Helper()
	for deadline := time.Now().Add(patience); ; <-time.After(pause) {
		p, err := m.client.CoreV1().Pods(namespace).Get(m.t.Context(), name, metav1.GetOptions{})
		if err == nil && ok(p) {
			return p
		}
		if time.Now().After(deadline) {
			m.t.Fatalf("pod %s is not %s: %v %+v", name, what, err, p.Status)
		}
	}
}

// weighs compares the share of the processors of the one group of a name below the tree.
func (m *machine) weighs(name string, want int) {
	m.t.Helper()
	found, _ := filepath.Glob(filepath.Join(groups, name, "cpu.weight"))
	if len(found) != 1 {
		m.t.Errorf("groups %s: %v", name, found)
		return
	}
	if text, err := os.ReadFile(found[0]); err != nil || strings.TrimSpace(string(text)) != strconv.Itoa(want) {
		m.t.Errorf("%s is %q, %v; want %d", found[0], text, err, want)
	}
}

// delete ends a pod and waits until it is gone.
func (m *machine) delete(namespace, name string) {
	m.t.Helper()
	pods := m.client.CoreV1().Pods(namespace)
	if err := pods.Delete(m.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		m.t.Fatal(err)
	}
	for deadline := time.Now().Add(patience); ; <-time.After(pause) {
		_, err := pods.Get(m.t.Context(), name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return
		}
		if time.Now().After(deadline) {
			m.t.Fatalf("pod %s does not end: %v", name, err)
		}
	}
}

func running(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning }

// A container that asks for 300 MB under a limit of 32 MiB is killed for that, and a
// Pod beside it is not. Its groups go with it.
func TestLimits(t *testing.T) {
	m := newMachine(t)
	if c := m.runner.Limits(); c.Status != corev1.ConditionTrue || c.Message != "each Pod has a control group" {
		t.Fatalf("the condition is %+v", c)
	}
	if score, err := os.ReadFile("/proc/self/oom_score_adj"); err != nil || strings.TrimSpace(string(score)) != "-999" {
		t.Errorf("the agent's oom_score_adj is %q, %v; want a kubelet's", score, err)
	}
	m.pod("default", "beside", "sleep 600", nil)
	p := m.until("default", "beside", "running", running)
	m.weighs("fairlead-unrequested", 50)
	m.weighs("fairlead-unrequested/*"+string(p.UID), 1)
	m.pod("default", "hog", "head -c 300000000 /dev/zero | tail & wait; echo outlived",
		corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("32Mi"), corev1.ResourceCPU: resource.MustParse("500m")})
	p = m.until("default", "hog", "ended", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed })
	if st := p.Status.ContainerStatuses[0].State.Terminated; st == nil || st.Reason != "OOMKilled" {
		t.Errorf("the hog ended as %+v, want OOMKilled", st)
	}
	// What is written to a volume in memory counts as the container's.
	m.pod(namespace, "tmpfs", "head -c 60000000 /dev/zero > /mnt/file; echo outlived",
		corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("32Mi")}, func(s *corev1.PodSpec) {
			s.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
				EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: new(resource.MustParse("1Gi"))},
			}}}
			s.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/mnt"}}
		})
	p = m.until(namespace, "tmpfs", "ended", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodFailed })
	if st := p.Status.ContainerStatuses[0].State.Terminated; st == nil || st.Reason != "OOMKilled" {
		t.Errorf("the writer to memory ended as %+v, want OOMKilled", st)
	}
	beside := m.until("default", "beside", "running", running)
	if n := beside.Status.ContainerStatuses[0].RestartCount; n != 0 {
		t.Errorf("the other Pod was started again %d times", n)
	}
	if n := testutil.CollectAndCount(m.runner, "pod_memory_working_set_bytes"); n != 1 {
		t.Errorf("%d series of memory, want that of the Pod that runs", n)
	}
	sum, err := m.runner.Summary(t.Context())
	if err != nil || sum.Node.CPU == nil || sum.Node.Memory.WorkingSetBytes == 0 || len(sum.Pods) != 1 {
		t.Fatalf("the summary is %+v, %v", sum, err)
	}
	if u := sum.Pods[0]; u.PodRef.Name != "beside" || u.Memory.WorkingSetBytes == 0 || u.Processes.ProcessCount == 0 ||
		len(u.Containers) != 1 || u.Containers[0].Name != "main" || u.Containers[0].Memory.WorkingSetBytes == 0 {
		t.Errorf("the usage of the Pod that runs is %+v", u)
	}
	m.neighbours()
	m.pressure()
	for name, ns := range map[string]string{
		"hog": "default", "beside": "default", "tmpfs": namespace, "server": "default", "after": "default",
	} {
		if err := m.client.CoreV1().Pods(ns).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(patience); ; <-time.After(pause) {
		_, err := m.client.CoreV1().Pods("default").Get(t.Context(), "beside", metav1.GetOptions{})
		left, _ := filepath.Glob(groups + "/fairlead*/*-*") // the name of a Pod's has hyphens
		if apierrors.IsNotFound(err) && len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("groups are left: %v, %v", left, err)
		}
	}
}
