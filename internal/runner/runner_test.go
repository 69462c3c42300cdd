package runner_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/runner"
	_ "github.com/fairlead/fairlead/internal/runner/shim/early"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) {
	switch mode := os.Getenv("RUNNER_TEST_SERVE"); mode {
	case "":
		testbed.Main(m)
	case "attack":
		attackAsPod()
	case "swap":
		swapAsPod()
	case "agent":
		runAsAgent()
	case "forge":
		forgeAsPod()
	default:
		serveAsPod(mode)
	}
}

// cluster is a real API server with one node, whose runner the test starts.
type cluster struct {
	t      *testing.T
	config *rest.Config
	client kubernetes.Interface
	state  string
	change func(*runner.Options)
	stop   func()
	r      *runner.Runner
}

const nodeName = "node-a"

// api is the one API server of all tests here, for starting it takes longer
// than most of them. It ends with the process, and its data with the private
// /run that testbed.Main mounts.
var api struct {
	once   sync.Once
	config *rest.Config
}

func newCluster(t *testing.T, change func(*runner.Options)) *cluster {
	t.Helper()
	api.once.Do(func() {
		s, _ := apiservertest.StartStoppable(t, func(o *apiserver.Options) { o.DataDir = "/run/runner-test" })
		api.config = s.LoopbackConfig()
		if err := rest.LoadTLSFiles(api.config); err != nil {
			t.Error(err)
		}
	})
	config := rest.CopyConfig(api.config)
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, config: config, client: client, state: filepath.Join(t.TempDir(), "state"), change: change}
	c.node(nodeName, "127.0.0.1", "10.244.1.0/24", "fd00:10:244:1::/64")
	c.start()
	t.Cleanup(func() {
		c.stop()
		ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
		defer cancel()
		if err := runner.Cleanup(ctx, c.state, runner.RemoveNetwork); err != nil {
			t.Error(err)
		}
		c.empty(ctx)
	})
	return c
}

// empty removes what the test has left in the API.
func (c *cluster) empty(ctx context.Context) {
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}
	all := metav1.ListOptions{}
	core := c.client.CoreV1()
	if err := errors.Join(
		core.Pods("default").DeleteCollection(ctx, now, all), core.Nodes().DeleteCollection(ctx, now, all),
		core.Events("default").DeleteCollection(ctx, now, all), core.ConfigMaps("default").DeleteCollection(ctx, now, all),
	); err != nil {
		c.t.Error(err)
	}
}

func (c *cluster) node(name, ip string, cidrs ...string) {
	c.t.Helper()
	n, err := c.client.CoreV1().Nodes().Create(c.t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDR: cidrs[0], PodCIDRs: cidrs},
	}, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip}}
	if _, err := c.client.CoreV1().Nodes().UpdateStatus(c.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

// logWriter puts the runner's log into the test's.
type logWriter struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logWriter) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func options(client kubernetes.Interface, state string, logs io.Writer) runner.Options {
	return runner.Options{
		Client: client, NodeName: nodeName, StateDir: state,
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/56")},
		ClusterDNS:   []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		BackOff:      200 * time.Millisecond,
		Log:          slog.New(slog.NewTextHandler(logs, nil)),
	}
}

// launch runs the agent; c.stop ends it and waits.
func (c *cluster) launch() {
	c.t.Helper()
	logs := &logWriter{}
	o := options(c.client, c.state, logs)
	if c.change != nil {
		c.change(&o)
	}
	r, err := runner.New(o)
	if err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	once := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			c.t.Errorf("Run: %v", err)
		}
		if c.t.Failed() || os.Getenv("RUNNER_TEST_LOG") != "" {
			c.t.Logf("the runner's log:\n%s", logs.text())
		}
	})
	c.stop, c.r = once, r
}

// start runs the agent and waits until it can run Pods; c.stop ends it and waits.
func (c *cluster) start() {
	c.t.Helper()
	c.launch()
	ready, cancelReady := context.WithTimeout(c.t.Context(), testbed.Patience)
	defer cancelReady()
	if err := c.r.WaitReady(ready); err != nil {
		c.t.Fatal(err)
	}
}

// pod is a pod of one container that runs a shell script.
func pod(name, script string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{"app": name}},
		Spec: corev1.PodSpec{
			NodeName: nodeName, TerminationGracePeriodSeconds: new(int64(5)),
			Containers: []corev1.Container{{Name: "main", Image: "host", Command: []string{"sh", "-c", script}}},
		},
	}
}

// server is a pod that answers HTTP on port 8080 with what serveAsPod says.
func server(name string) *corev1.Pod {
	p := pod(name, "")
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	p.Spec.Containers[0].Command = []string{exe}
	p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "RUNNER_TEST_SERVE", Value: "http"}}
	p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt32(8080)}},
	}
	return p
}

func (c *cluster) create(p *corev1.Pod) *corev1.Pod {
	c.t.Helper()
	out, err := c.client.CoreV1().Pods(p.Namespace).Create(c.t.Context(), p, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

func (c *cluster) get(name string) *corev1.Pod {
	c.t.Helper()
	p, err := c.client.CoreV1().Pods("default").Get(c.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return p
}

// until waits for a pod to be as ok says.
func (c *cluster) until(name, what string, ok func(*corev1.Pod) bool) *corev1.Pod {
	c.t.Helper()
	var p *corev1.Pod
	deadline := time.Now().Add(testbed.Patience)
	for {
		p = c.get(name)
		if ok(p) {
			return p
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("pod %s is not %s: %+v", name, what, p.Status)
		}
		<-time.After(3 * time.Millisecond)
	}
}

func (c *cluster) ready(name string) *corev1.Pod {
	c.t.Helper()
	return c.until(name, "ready", isReady)
}

func isReady(p *corev1.Pod) bool {
	for _, cond := range p.Status.Conditions {
		if cond.Type == corev1.PodReady {
			return cond.Status == corev1.ConditionTrue
		}
	}
	return false
}

func (c *cluster) delete(name string, o metav1.DeleteOptions) {
	c.t.Helper()
	if err := c.client.CoreV1().Pods("default").Delete(c.t.Context(), name, o); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) untilGone(name string) {
	c.t.Helper()
	await(c.t, "the end of the object of "+name, func() bool {
		_, err := c.client.CoreV1().Pods("default").Get(c.t.Context(), name, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(testbed.Patience)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not come", what)
		}
		<-time.After(3 * time.Millisecond)
	}
}

// events are the reasons and messages of a pod's events.
func (c *cluster) events(name string) string {
	c.t.Helper()
	list, err := c.client.CoreV1().Events("default").List(c.t.Context(), metav1.ListOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	var b strings.Builder
	for _, e := range list.Items {
		if e.InvolvedObject.Name == name {
			fmt.Fprintf(&b, "%s %s: %s\n", e.Type, e.Reason, e.Message)
		}
	}
	return b.String()
}

// logOf is what a container wrote, from its file.
func (c *cluster) logOf(p *corev1.Pod, attempt int) string {
	c.t.Helper()
	b, err := os.ReadFile(filepath.Join(c.state, "pods", string(p.UID), "containers", "main", fmt.Sprintf("%d.log", attempt)))
	if err != nil {
		c.t.Fatal(err)
	}
	return string(b)
}

func TestPodLives(t *testing.T) {
	c := newCluster(t, nil)
	before := time.Now()
	p := pod("web", `echo "$GREETING from $POD_NAME $POD_IP"; hostname; cat /etc/hosts /etc/resolv.conf
		trap 'echo bye; exit 0' TERM; while :; do sleep 0.01; done`)
	p.Spec.Containers[0].Env = []corev1.EnvVar{
		{Name: "WORD", Value: "hello"}, {Name: "GREETING", Value: "$(WORD)!"},
		{Name: "POD_NAME", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
		{Name: "POD_IP", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}}},
	}
	c.create(p)
	got := c.ready("web")
	t.Logf("ready after %v", time.Since(before).Round(time.Millisecond))
	st := got.Status
	if st.Phase != corev1.PodRunning || st.PodIP != "10.244.1.2" || len(st.PodIPs) != 2 || st.PodIPs[1].IP != "fd00:10:244:1::2" ||
		st.HostIP != "127.0.0.1" {
		t.Errorf("status %+v", st)
	}
	cs := st.ContainerStatuses[0]
	if cs.State.Running == nil || !cs.Ready || cs.RestartCount != 0 || !strings.HasPrefix(cs.ContainerID, "fairlead://") {
		t.Errorf("container status %+v", cs)
	}
	var out string
	await(t, "the output", func() bool {
		out = c.logOf(got, 0)
		return strings.Contains(out, "ndots:5")
	})
	for _, want := range []string{
		"hello! from web 10.244.1.2\n", "F web\n", "10.244.1.2\tweb", "fd00:10:244:1::2\tweb",
		"nameserver 10.96.0.10", "search default.svc.cluster.local svc.cluster.local cluster.local",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("output lacks %q:\n%s", want, out)
		}
	}
	main := c.record(got, 0).Process
	before = time.Now()
	c.delete("web", metav1.DeleteOptions{})
	c.untilGone("web")
	t.Logf("gone after %v", time.Since(before).Round(time.Millisecond))
	if main.Alive() {
		t.Error("the process outlives the pod")
	}
	await(t, "the end of the state directory", func() bool {
		_, err := os.Stat(filepath.Join(c.state, "pods", string(got.UID)))
		return os.IsNotExist(err)
	})
	if d, err := link.Devices(); err != nil || len(d) != 0 {
		t.Errorf("devices left: %v, %v", d, err)
	}
}
