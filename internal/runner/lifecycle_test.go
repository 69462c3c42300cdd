package runner_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/runner"
)

func status(p *corev1.Pod) corev1.ContainerStatus {
	if len(p.Status.ContainerStatuses) == 0 {
		return corev1.ContainerStatus{}
	}
	return p.Status.ContainerStatuses[0]
}

func restarted(n int32) func(*corev1.Pod) bool {
	return func(p *corev1.Pod) bool { return status(p).RestartCount >= n }
}

func phase(want corev1.PodPhase) func(*corev1.Pod) bool {
	return func(p *corev1.Pod) bool { return p.Status.Phase == want }
}

func condition(p *corev1.Pod, t corev1.PodConditionType) corev1.PodCondition {
	for _, c := range p.Status.Conditions {
		if c.Type == t {
			return c
		}
	}
	return corev1.PodCondition{}
}

func TestRestartPolicies(t *testing.T) {
	c := newCluster(t, nil)
	for _, k := range []struct {
		policy corev1.RestartPolicy
		script string
		want   corev1.PodPhase
		count  int32
	}{
		{corev1.RestartPolicyNever, "exit 0", corev1.PodSucceeded, 0},
		{corev1.RestartPolicyNever, "exit 3", corev1.PodFailed, 0},
		{corev1.RestartPolicyOnFailure, "exit 0", corev1.PodSucceeded, 0},
		{corev1.RestartPolicyOnFailure, "[ -e $DIR/ran ] || { touch $DIR/ran; exit 1; }", corev1.PodSucceeded, 1},
	} {
		name := strings.ToLower(fmt.Sprintf("%s-%s-%d", k.policy, k.want, k.count))
		p := pod(name, k.script)
		p.Spec.RestartPolicy = k.policy
		p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "DIR", Value: t.TempDir()}}
		c.create(p)
		got := c.until(name, "over", phase(k.want))
		if n := status(got).RestartCount; n != k.count {
			t.Errorf("%s: %d restarts, want %d", name, n, k.count)
		}
		if status(got).State.Terminated == nil || isReady(got) {
			t.Errorf("%s: %+v", name, got.Status)
		}
		if got.Status.PodIP == "" {
			t.Errorf("%s: a pod that is over keeps its address in the status", name)
		}
	}
	// The network of pods that are over is given back.
	await(t, "the end of all devices", func() bool { d, err := link.Devices(); return err == nil && len(d) == 0 })
}

func TestCrashLoop(t *testing.T) {
	c := newCluster(t, nil) // back-off 200 ms
	c.create(pod("crash", "echo no; exit 7"))
	got := c.until("crash", "in back-off", func(p *corev1.Pod) bool {
		w := status(p).State.Waiting
		return w != nil && w.Reason == "CrashLoopBackOff"
	})
	st := status(got)
	if st.LastTerminationState.Terminated == nil || st.LastTerminationState.Terminated.ExitCode != 7 || got.Status.Phase != corev1.PodRunning {
		t.Errorf("status %+v, phase %s", st, got.Status.Phase)
	}
	c.until("crash", "restarted three times", restarted(3))
	// The third restart came 200 + 400 ms after the first.
	a, b := c.record(got, 2), c.record(got, 3)
	if d := b.Started.Sub(a.Finished); d < 390*time.Millisecond {
		t.Errorf("the third restart came after %v, want 400 ms", d)
	}
	await(t, "the events", func() bool {
		e := c.events("crash")
		return strings.Contains(e, "Warning BackOff") && strings.Contains(e, "Normal Started")
	})
}

func TestInitContainersAndSidecars(t *testing.T) {
	c := newCluster(t, nil)
	dir := t.TempDir()
	p := pod("all", "echo main >> $DIR/order; until [ -e $DIR/side ]; do sleep 0.01; done; echo end >> $DIR/order")
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	always := corev1.ContainerRestartPolicyAlways
	sh := func(name, script string) corev1.Container {
		return corev1.Container{Name: name, Image: "host", Command: []string{"sh", "-c", script}}
	}
	p.Spec.InitContainers = []corev1.Container{
		sh("first", "sleep 0.1; echo first >> $DIR/order"),
		sh("side", "trap 'echo side >> $DIR/order; exit 0' TERM; touch $DIR/side; while :; do sleep 0.01; done"),
		sh("second", "echo second >> $DIR/order"),
	}
	p.Spec.InitContainers[1].RestartPolicy = &always
	for _, list := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range list {
			list[i].Env = []corev1.EnvVar{{Name: "DIR", Value: dir}}
		}
	}
	c.create(p)
	got := c.until("all", "over", phase(corev1.PodSucceeded))
	order, err := os.ReadFile(filepath.Join(dir, "order"))
	if err != nil || string(order) != "first\nsecond\nmain\nend\nside\n" {
		t.Errorf("order %q, %v", order, err)
	}
	if len(got.Status.InitContainerStatuses) != 3 || condition(got, corev1.PodInitialized).Status != corev1.ConditionTrue {
		t.Errorf("status %+v", got.Status)
	}

	bad := pod("bad", "exit 0")
	bad.Spec.RestartPolicy = corev1.RestartPolicyNever
	bad.Spec.InitContainers = []corev1.Container{sh("first", "exit 4")}
	c.create(bad)
	got = c.until("bad", "over", phase(corev1.PodFailed))
	if status(got).State.Waiting == nil {
		t.Errorf("the main container of a pod whose init failed: %+v", status(got))
	}
}

// A pod that ignores SIGTERM is killed when its time is over, and leaves the
// endpoints' sight as terminating before that.
func TestGracePeriod(t *testing.T) {
	c := newCluster(t, nil)
	p := pod("deaf", "trap '' TERM; echo up; while :; do sleep 0.05; done")
	p.Spec.TerminationGracePeriodSeconds = new(int64(1))
	p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"touch",
		filepath.Join(t.TempDir(), "asked")}}}}
	c.create(p)
	got := c.ready("deaf")
	await(t, "the trap", func() bool { return strings.Contains(c.logOf(got, 0), "up") })
	main := c.record(got, 0).Process
	start := time.Now()
	c.delete("deaf", metav1.DeleteOptions{})
	if seen := c.get("deaf"); seen.DeletionTimestamp == nil {
		t.Error("not terminating at once")
	}
	c.untilGone("deaf")
	if d := time.Since(start); d < 900*time.Millisecond || d > 10*time.Second {
		t.Errorf("gone after %v, want 1 s", d)
	}
	if main.Alive() {
		t.Error("it lives")
	}
	hook := p.Spec.Containers[0].Lifecycle.PreStop.Exec.Command[1]
	if _, err := os.Stat(hook); err != nil {
		t.Errorf("preStop did not run: %v", err)
	}
}

// A container is neither started nor ready before its postStart hook has ended.
func TestReadyAfterThePostStartHook(t *testing.T) {
	c := newCluster(t, nil)
	file := filepath.Join(t.TempDir(), "hook")
	p := pod("hooked", "exec sleep 600")
	p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{
		Command: []string{"sh", "-c", "sleep 0.5; touch " + file}}}}
	c.create(p)
	c.ready("hooked")
	if _, err := os.Stat(file); err != nil {
		t.Errorf("ready before the hook has ended: %v", err)
	}
}

func TestForceDelete(t *testing.T) {
	c := newCluster(t, nil)
	p := pod("deaf", "trap '' TERM; echo up; while :; do sleep 0.05; done")
	p.Spec.TerminationGracePeriodSeconds = new(int64(600))
	c.create(p)
	got := c.ready("deaf")
	main := c.record(got, 0).Process
	c.delete("deaf", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
	await(t, "the end of the process", func() bool { return !main.Alive() })
}

func TestHostNetwork(t *testing.T) {
	c := newCluster(t, nil)
	p := pod("host", "readlink /proc/self/ns/net; hostname; exec sleep 600")
	p.Spec.HostNetwork = true
	c.create(p)
	got := c.ready("host")
	if got.Status.PodIP != "127.0.0.1" || got.Status.HostIP != "127.0.0.1" {
		t.Errorf("addresses %s on %s, want the node's", got.Status.PodIP, got.Status.HostIP)
	}
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	await(t, "the machine's namespace", func() bool { return strings.Contains(c.logOf(got, 0), own) })
}

func TestWhatCannotRun(t *testing.T) {
	images, err := podspec.ParseImages([]string{"example.com/sleep=/bin/sleep"})
	if err != nil {
		t.Fatal(err)
	}
	c := newCluster(t, func(o *runner.Options) { o.Images = images })
	waiting := func(name, reason, message string) {
		t.Helper()
		got := c.until(name, "waiting for "+reason, func(p *corev1.Pod) bool {
			w := status(p).State.Waiting
			return w != nil && w.Reason == reason
		})
		if m := status(got).State.Waiting.Message; !strings.Contains(m, message) {
			t.Errorf("%s: message %q lacks %q", name, m, message)
		}
		if got.Status.Phase != corev1.PodPending {
			t.Errorf("%s: phase %s", name, got.Status.Phase)
		}
	}
	image := pod("image", "")
	image.Spec.Containers[0].Image = "nginx:1"
	c.create(image)
	waiting("image", "ImageNotSupported", "image: host")
	await(t, "the event", func() bool { return strings.Contains(c.events("image"), "ImageNotSupported") })

	// An image may be changed; then it runs.
	if _, err := c.client.CoreV1().Pods("default").Patch(t.Context(), "image", types.StrategicMergePatchType,
		[]byte(`{"spec":{"containers":[{"name":"main","image":"host"}]}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	c.until("image", "started", func(p *corev1.Pod) bool { return status(p).State.Waiting == nil || status(p).RestartCount > 0 })

	// The node has a program for some images, and not for images with similar names.
	for name, image := range map[string]string{"mapped": "example.com/sleep:v1", "similar": "example.com/sleeping:v1"} {
		mapped := pod(name, "")
		mapped.Spec.Containers[0].Image, mapped.Spec.Containers[0].Command, mapped.Spec.Containers[0].Args = image, nil, []string{"600"}
		c.create(mapped)
	}
	if got := c.ready("mapped"); status(got).Image != "example.com/sleep:v1" {
		t.Errorf("the status has image %s", status(got).Image)
	}
	waiting("similar", "ImageNotSupported", "--image-map")

	config := pod("config", "exec sleep 600")
	config.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{
		LocalObjectReference: corev1.LocalObjectReference{Name: "settings"},
	}}}
	c.create(config)
	waiting("config", "CreateContainerConfigError", `ConfigMap "settings" does not exist`)
	if _, err := c.client.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "settings"}, Data: map[string]string{"COLOR": "red"},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.ready("config") // without anybody touching the pod

	command := pod("command", "")
	command.Spec.RestartPolicy = corev1.RestartPolicyNever
	command.Spec.Containers[0].Command = []string{"no-such-command"}
	c.create(command)
	got := c.until("command", "failed", phase(corev1.PodFailed))
	if s := status(got).State.Terminated; s == nil || s.Reason != "StartError" || !strings.Contains(s.Message, "no-such-command") {
		t.Errorf("state %+v", s)
	}
}

func TestVolumes(t *testing.T) {
	c := newCluster(t, nil)
	host, at := t.TempDir(), t.TempDir()
	for _, d := range []string{"empty", "host", "config"} {
		if err := os.Mkdir(filepath.Join(at, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(host, "file"), []byte("from host\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := c.client.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "settings"}, Data: map[string]string{"color": "red\n"},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p := pod("vol", "cd "+at+"; cat host/file config/color; echo kept >> empty/file; touch host/no || echo read-only; exit 1")
	p.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
	p.Spec.Containers[0].Command[2] = "cd " + at + "; cat host/file config/color; echo kept >> empty/file; touch host/no || echo " +
		"read-only; [ $(wc -l < empty/file) = 2 ] && echo twice"
	p.Spec.Volumes = []corev1.Volume{
		{Name: "e", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "h", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: host}}},
		{Name: "c", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: "settings"},
		}}},
	}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{
		{Name: "e", MountPath: at + "/empty"}, {Name: "h", MountPath: at + "/host", ReadOnly: true}, {Name: "c", MountPath: at + "/config"},
	}
	c.create(p)
	got := c.until("vol", "over", phase(corev1.PodSucceeded))
	out := c.logOf(got, 1)
	for _, want := range []string{"from host", "red", "read-only", "twice"} {
		if !strings.Contains(out, want) {
			t.Errorf("output lacks %q:\n%s", want, out)
		}
	}
}

// What others write into the status is put right, what is theirs is kept.
func TestStatusOfOthers(t *testing.T) {
	c := newCluster(t, nil)
	p := pod("web", "exec sleep 600")
	p.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "example.com/gate"}}
	c.create(p)
	got := c.until("web", "waiting for its gate", func(p *corev1.Pod) bool {
		return condition(p, corev1.PodReady).Reason == "ReadinessGatesNotReady"
	})
	got.Status.Conditions = append(got.Status.Conditions, corev1.PodCondition{Type: "example.com/gate", Status: corev1.ConditionTrue})
	if _, err := c.client.CoreV1().Pods("default").UpdateStatus(t.Context(), got, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	got = c.ready("web")
	// A node controller that thought this node dead.
	for i := range got.Status.Conditions {
		if got.Status.Conditions[i].Type == corev1.PodReady {
			got.Status.Conditions[i].Status = corev1.ConditionFalse
		}
	}
	if _, err := c.client.CoreV1().Pods("default").UpdateStatus(t.Context(), got, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	got = c.ready("web")
	if condition(got, "example.com/gate").Status != corev1.ConditionTrue {
		t.Errorf("the gate is gone: %+v", got.Status.Conditions)
	}
}

// Every Service that existed before a container starts is in its environment,
// also when the agent has only just come back. behaviours 68, 71
func TestServiceVariables(t *testing.T) {
	c := newCluster(t, nil)
	services := c.client.CoreV1().Services("default")
	create := func(name string) *corev1.Service {
		t.Helper()
		s, err := services.Create(t.Context(), &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 6379}}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = services.Delete(context.Background(), name, metav1.DeleteOptions{}) })
		return s
	}
	says := func(p *corev1.Pod, attempt int, s *corev1.Service) {
		t.Helper()
		want := strings.ToUpper(strings.ReplaceAll(s.Name, "-", "_")) + "_SERVICE_HOST=" + s.Spec.ClusterIP
		await(t, want, func() bool { return strings.Contains(c.logOf(p, attempt), want) })
	}
	first := create("redis-master")
	c.create(pod("web", "env; exec sleep 600"))
	p := c.ready("web")
	says(p, 0, first)
	c.stop()
	second := create("redis-slave")
	if err := c.record(p, 0).Process.Signal(9); err != nil {
		t.Fatal(err)
	}
	await(t, "the end of the process", func() bool { return !c.record(p, 0).Process.Alive() })
	c.start()
	c.until("web", "restarted", restarted(1))
	says(p, 1, first)
	says(p, 1, second)
}
