package runner_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/kernel/process"
	"github.com/fairlead/fairlead/internal/runner"
)

const staticManifest = `apiVersion: v1
kind: Pod
metadata:
  name: web
  labels: {app: web}
spec:
  terminationGracePeriodSeconds: 2
  containers:
  - name: main
    image: host
    command: [sh, -c, "echo %s; trap 'exit 0' TERM; while :; do sleep 0.02; done"]
`

// static is a cluster whose node has a directory of static Pods.
type static struct {
	*cluster
	dir string
}

func newStatic(t *testing.T) *static {
	t.Helper()
	s := &static{dir: filepath.Join(t.TempDir(), "pods.d")}
	s.cluster = newCluster(t, func(o *runner.Options) { o.StaticDir = s.dir })
	return s
}

func (s *static) write(name, text string) { s.writeAs(name, text, 0o644) }

func (s *static) writeAs(name, text string, mode os.FileMode) {
	s.t.Helper()
	// As editors and configuration management do it.
	temp := filepath.Join(s.dir, "."+name)
	if err := os.WriteFile(temp, []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Chmod(temp, mode); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Rename(temp, filepath.Join(s.dir, name)); err != nil {
		s.t.Fatal(err)
	}
}

// process returns the first process of the newest static Pod whose container has printed word.
func (s *static) process(word string) process.ID {
	s.t.Helper()
	var id process.ID
	await(s.t, "a process that prints "+word, func() bool {
		logs, _ := filepath.Glob(filepath.Join(s.state, "pods", "*", "containers", "main", "0.log"))
		for _, log := range logs {
			b, _ := os.ReadFile(log)
			if !strings.Contains(string(b), word+"\n") {
				continue
			}
			uid := filepath.Base(filepath.Dir(filepath.Dir(filepath.Dir(log))))
			st := s.record(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)}}, 0)
			id = st.Process
			return !st.Exited && id.Alive()
		}
		return false
	})
	return id
}

func (s *static) mirror(hash string) *corev1.Pod {
	s.t.Helper()
	var got *corev1.Pod
	await(s.t, "the mirror", func() bool {
		var err error
		got, err = s.client.CoreV1().Pods("default").Get(s.t.Context(), "web-"+nodeName, metav1.GetOptions{})
		return err == nil && got.DeletionTimestamp == nil && got.Annotations[corev1.MirrorPodAnnotationKey] != hash && isReady(got)
	})
	return got
}

func (s *static) event(parts ...string) {
	s.t.Helper()
	await(s.t, fmt.Sprintf("the Event with %q", parts), func() bool {
		for line := range strings.Lines(s.events(nodeName)) {
			ok := strings.HasPrefix(line, "Warning InvalidStaticPod: ")
			for _, p := range parts {
				ok = ok && strings.Contains(line, p)
			}
			if ok {
				return true
			}
		}
		return false
	})
}

// A file is a Pod that runs, and a mirror of it in the API: it changes and ends with the
// file, and with nothing else.
func TestStaticPods(t *testing.T) {
	s := newStatic(t) // the directory appears later
	if err := os.Mkdir(s.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s.write("web.yaml", fmt.Sprintf(staticManifest, "one"))
	s.stop() // it is read at the start, else after some seconds
	s.start()
	one := s.process("one")
	m := s.mirror("")
	owner := m.OwnerReferences
	if m.Status.Phase != corev1.PodRunning || m.Status.PodIP == "" || m.Labels["app"] != "web" ||
		m.Annotations["kubernetes.io/config.source"] != "file" || len(owner) != 1 || owner[0].Kind != "Node" || owner[0].Name != nodeName {
		t.Errorf("the mirror is %+v %+v", m.ObjectMeta, m.Status)
	}

	// Deleted mirrors, gracefully or not, come back; a forged one does not stay.
	if err := s.client.CoreV1().Pods("default").Delete(t.Context(), m.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, "another mirror", func() bool {
		p, err := s.client.CoreV1().Pods("default").Get(t.Context(), m.Name, metav1.GetOptions{})
		return err == nil && p.UID != m.UID && isReady(p)
	})
	forged := pod("forged", "echo forged; sleep 600")
	forged.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
	s.create(forged)
	s.untilGone("forged")
	if !one.Alive() {
		t.Fatal("the process ended with its mirror")
	}

	// What is wrong is told with file and field, and what runs stays.
	s.write("bad.yaml", strings.Replace(fmt.Sprintf(staticManifest, "bad"), "image:", "imge:", 1))
	s.event(filepath.Join(s.dir, "bad.yaml"), `unknown field "spec.containers[0].imge"`)
	s.write("web.yaml", "apiVersion: v1\nkind: Pod\n\tmetadata: x\n")
	s.event(filepath.Join(s.dir, "web.yaml"), "line 3")
	s.write("bad.yaml", strings.Replace(fmt.Sprintf(staticManifest, "bad"), "spec:", "spec:\n  serviceAccountName: x", 1))
	s.event("bad.yaml", "spec.serviceAccountName: a static Pod runs without the API server")
	s.write("bad.yaml", strings.Replace(fmt.Sprintf(staticManifest, "bad"), "name: main", "name: Main", 1))
	s.event("bad.yaml", "spec.containers[0].name: Invalid value")
	s.writeAs("bad.yaml", fmt.Sprintf(staticManifest, "same"), 0o666)
	s.write("web.yaml", fmt.Sprintf(staticManifest, "one"))
	s.event("bad.yaml", "group and others must not be able to write to it")
	if !one.Alive() {
		t.Fatal("the process ended with the faults of a file")
	}

	// An edit is another Pod, in its place.
	s.write("web.yaml", fmt.Sprintf(staticManifest, "two"))
	two := s.process("two")
	if one.Alive() {
		t.Error("the process of the file before still runs")
	}
	if now := s.mirror(m.Annotations[corev1.MirrorPodAnnotationKey]); now.UID == m.UID {
		t.Error("the mirror is the one of the file before")
	}
	if err := os.Remove(filepath.Join(s.dir, "web.yaml")); err != nil {
		t.Fatal(err)
	}
	await(t, "the end of the process", func() bool { return !two.Alive() })
	s.untilGone(m.Name)
	stored := func() []string {
		names, _ := filepath.Glob(filepath.Join(s.state, "pods", "*"))
		return names
	}
	await(t, "the removal of what the node stored of the Pod", func() bool { return len(stored()) == 0 })

	// Whoever may write to the directory would be root.
	if err := os.Chmod(s.dir, 0o777); err != nil {
		t.Fatal(err)
	}
	s.write("web.yaml", fmt.Sprintf(staticManifest, "three"))
	s.event(s.dir + ": its mode is 0777")
	if names := stored(); len(names) > 0 {
		t.Errorf("started from a directory that all may write to: %v", names)
	}
}

// A mirror has the labels of its Pod where the node may create Pods, and none elsewhere:
// the Pod runs and is shown either way.
func TestMirrorLabelsNeedARole(t *testing.T) {
	logs := &logWriter{}
	s := &static{cluster: &cluster{t: t}, dir: filepath.Join(t.TempDir(), "pods.d")}
	if err := os.Mkdir(s.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s.write("web.yaml", fmt.Sprintf(staticManifest, "web"))
	s.cluster = newCluster(t, func(o *runner.Options) {
		config := rest.CopyConfig(api.config)
		config.Impersonate = rest.ImpersonationConfig{
			UserName: "system:node:" + nodeName, Groups: []string{"system:nodes", "system:authenticated"},
		}
		o.StaticDir, o.Mirrors = s.dir, kubernetes.NewForConfigOrDie(config)
		o.Log = slog.New(slog.NewTextHandler(logs, nil))
	})
	m := s.mirror("")
	if len(m.Labels) != 0 {
		t.Errorf("without the role the mirror has the labels %v", m.Labels)
	}
	// The log has the reason, and the command that helps.
	await(t, "the reason in the log", func() bool { return strings.Contains(logs.text(), "shown in the API without its labels") })
	if text := logs.text(); strings.Count(text, "shown in the API without its labels") != 1 || !strings.Contains(text, "level=WARN") ||
		!strings.Contains(text, "pod=web-"+nodeName) || !strings.Contains(text, "--clusterrole system:node-registrar") {
		t.Errorf("the log: %s", text)
	}

	rbac, name := s.client.RbacV1().RoleBindings("default"), "nodes-register"
	if _, err := rbac.Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:node-registrar"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.GroupKind, APIGroup: rbacv1.GroupName, Name: "system:nodes"}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := rbac.Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	pods := s.client.CoreV1().Pods("default")
	await(t, "a mirror with labels", func() bool { // the authorizer sees the binding a moment later
		got, err := pods.Get(t.Context(), m.Name, metav1.GetOptions{})
		if err != nil {
			return false
		}
		if got.Labels["app"] == "web" {
			return isReady(got)
		}
		_ = pods.Delete(t.Context(), m.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &got.UID}})
		return false
	})
}

// Static Pods start without the API server, with addresses of the ranges that the node had
// last; they are shown once it is there.
func TestStaticPodsWithoutTheServer(t *testing.T) {
	s := newStatic(t)
	if err := os.Mkdir(s.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s.create(pod("first", "sleep 600")) // the node has its ranges
	s.ready("first")
	s.delete("first", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
	s.untilGone("first")
	s.stop()
	before := s.change
	s.change = func(o *runner.Options) {
		before(o)
		dead, err := kubernetes.NewForConfig(&rest.Config{Host: "127.0.0.1:1"})
		if err != nil {
			t.Fatal(err)
		}
		o.Client = dead
	}
	s.write("web.yaml", fmt.Sprintf(staticManifest, "alone"))
	s.launch()
	id := s.process("alone")
	if _, err := s.client.CoreV1().Pods("default").Get(t.Context(), "web-"+nodeName, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("it is in the API: %v", err)
	}
	s.stop()
	s.change = before
	s.start()
	if m := s.mirror(""); m.Status.PodIP == "" || m.Status.ContainerStatuses[0].RestartCount != 0 || !id.Alive() {
		t.Errorf("the mirror is %+v", m.Status)
	}
}
