package walk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"

	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/workloads"
)

const system = "kube-system"

// daemonSet has Pods with the label app of its name.
func daemonSet(name string, pods int32) *appsv1.DaemonSet {
	d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: system, UID: "uid-of-ds"}}
	d.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}
	d.Spec.Template.Spec.Containers = []corev1.Container{{Name: name, Image: name + ":1", Command: []string{name}}}
	d.Status.DesiredNumberScheduled, d.Status.CurrentNumberScheduled = pods, pods
	d.Status.UpdatedNumberScheduled, d.Status.NumberReady = pods, pods
	return d
}

func node(name string, ready bool, label string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if label != "" {
		n.Labels = map[string]string{migrate.Label: label}
	}
	if ready {
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	}
	return n
}

// podOf is a Pod of kube-proxy on a node, of a revision of its template.
func podOf(node, hash string, ready bool) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "kube-proxy-" + node, Namespace: system,
		Labels:          map[string]string{"app": kubeProxyName, appsv1.ControllerRevisionHashLabelKey: hash},
		OwnerReferences: []metav1.OwnerReference{{UID: "uid-of-ds", Controller: new(true)}}}}
	p.Spec.NodeName = node
	if ready {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	}
	return p
}

func revision(number int64) *appsv1.ControllerRevision {
	hash := fmt.Sprint("hash", number)
	return &appsv1.ControllerRevision{Revision: number, ObjectMeta: metav1.ObjectMeta{Name: hash, Namespace: system,
		Labels:          map[string]string{"app": kubeProxyName, appsv1.ControllerRevisionHashLabelKey: hash},
		OwnerReferences: []metav1.OwnerReference{{UID: "uid-of-ds", Controller: new(true)}}}}
}

func options(client *fake.Clientset, out *bytes.Buffer) Options {
	return Options{Client: client, Out: out, Timeout: 10 * time.Millisecond}
}

// wrote are the requests of a client that change something.
func wrote(client *fake.Clientset) (out []string) {
	for _, a := range client.Actions() {
		if v := a.GetVerb(); v != "get" && v != "list" {
			out = append(out, v+" "+a.GetResource().Resource)
		}
	}
	return out
}

// Where fairlead proxy was installed by hand, kube-proxy is kept off all nodes by other means: no command touches either.
func TestInstalledByHand(t *testing.T) {
	theirs := daemonSet(kubeProxyName, 0)
	theirs.Spec.Template.Spec.NodeSelector = map[string]string{"fairlead.dev/kube-proxy": "true"}
	client := fake.NewClientset(theirs, daemonSet(fairleadName, 1), node("a", true, ""))
	w, err := New(t.Context(), options(client, &bytes.Buffer{}))
	if err != nil {
		t.Fatal(err)
	}
	for name, do := range map[string]func(context.Context) error{"apply": w.Apply, "verify": w.Verify, "rollback": w.Rollback} {
		if err := do(t.Context()); err == nil || !strings.Contains(err.Error(), "was not installed by 'fairlead migrate'") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if w := wrote(client); len(w) > 0 {
		t.Errorf("requests %v", w)
	}
}

// A name that no Node has, and a label that no phase has, end every command.
func TestMistakes(t *testing.T) {
	for _, c := range []struct{ nodes, label, want string }{
		{"tpyo", "", "there is no Node tpyo"}, {"", "faihlead", "want none, or one of beside"},
	} {
		client := fake.NewClientset(daemonSet(kubeProxyName, 1), node("a", true, c.label), podOf("a", "hash1", true))
		o := options(client, &bytes.Buffer{})
		if c.nodes != "" {
			o.Nodes = []string{c.nodes}
		}
		if _, err := New(t.Context(), o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// Pods on nodes that are not ready are not waited for, and each Pod that is replaced begins the wait again.
func TestRollOut(t *testing.T) {
	for _, c := range []struct {
		name string
		pods []*corev1.Pod
		off  bool // node c is not ready
		want string
	}{
		{"all", []*corev1.Pod{podOf("a", "hash2", true), podOf("b", "hash2", true), podOf("c", "hash2", true)}, false, ""},
		{"all but one", []*corev1.Pod{podOf("a", "hash2", true), podOf("b", "hash2", true), podOf("c", "hash1", false)}, true, ""},
		{"an old one", []*corev1.Pod{podOf("a", "hash2", true), podOf("b", "hash1", true), podOf("c", "hash1", false)}, true,
			"has 1 of 2 Pods updated and ready; the nodes that are not ready (c) count for maxUnavailable"},
		{"one that does not start", []*corev1.Pod{podOf("a", "hash2", true), podOf("b", "hash2", false), podOf("c", "hash1", true)}, true,
			"has 1 of 2 Pods updated and ready"},
		{"an old one on a ready node", []*corev1.Pod{podOf("a", "hash2", true), podOf("b", "hash2", true), podOf("c", "hash1", true)}, false,
			"has 2 of 3 Pods updated and ready (waited"},
	} {
		d := daemonSet(kubeProxyName, 3)
		d.Status.UpdatedNumberScheduled, d.Status.NumberReady = 0, 0
		objects := []runtime.Object{d, node("a", true, ""), node("b", true, ""), node("c", !c.off, ""), revision(1), revision(2)}
		for _, p := range c.pods {
			objects = append(objects, p)
			if p.Labels[appsv1.ControllerRevisionHashLabelKey] == "hash2" {
				d.Status.UpdatedNumberScheduled++
			}
			if workloads.IsReady(p) {
				d.Status.NumberReady++
			}
		}
		w, err := New(t.Context(), options(fake.NewClientset(objects...), &bytes.Buffer{}))
		if err != nil {
			t.Fatal(err)
		}
		if err := w.exclude(t.Context()); (c.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// The wait goes on while Pods are replaced, however long all of them take.
func TestRollOutGrows(t *testing.T) {
	d := daemonSet(kubeProxyName, 5)
	client := fake.NewClientset(d, node("a", true, ""), podOf("a", "hash1", true))
	w, err := New(t.Context(), options(client, &bytes.Buffer{}))
	if err != nil {
		t.Fatal(err)
	}
	asked := int32(1)
	client.PrependReactor("get", "daemonsets", func(ktesting.Action) (bool, runtime.Object, error) {
		now := d.DeepCopy()
		now.Status.UpdatedNumberScheduled = min(asked, 5)
		asked++
		return true, now, nil
	})
	if err := w.rollOut(t.Context(), d); err != nil || asked != 6 {
		t.Errorf("asked %d times: %v", asked, err)
	}
}

// A step that fails names the two ways on; --image is among them where the image is at fault. Another migration's node keeps
// its own annotation.
func TestStopped(t *testing.T) {
	client := fake.NewClientset(daemonSet(kubeProxyName, 1), node("a", true, ""), podOf("a", "hash1", true))
	w, err := New(t.Context(), options(client, &bytes.Buffer{}))
	if err != nil {
		t.Fatal(err)
	}
	step := migrate.Step{Action: migrate.AwaitReady, Program: migrate.Fairlead}
	if err := w.stopped(t.Context(), "a", step, fmt.Errorf("phase: %w", errChanged)); !errors.Is(err, errChanged) || len(wrote(client)) > 0 {
		t.Errorf("another client changes the node: %v, requests %v", err, wrote(client))
	}
	for reason, want := range map[string]string{
		"Pending ErrImagePull no such host": "'fairlead migrate rollback --image IMAGE'", "Running it crashed": "'fairlead migrate rollback'",
	} {
		if err := w.stopped(t.Context(), "a", step, errors.New(reason)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", reason, err)
		}
	}
	if got := wrote(client); len(got) != 2 || got[0] != "patch nodes" {
		t.Errorf("requests %v", got)
	}
}

// Another image must run where fairlead proxy is before it comes to more nodes.
func TestSameImage(t *testing.T) {
	for _, c := range []struct {
		label, image string
		want         string
	}{{"", "fairlead-proxy:2", ""}, {"fairlead", "fairlead-proxy:1", ""}, {"fairlead", "fairlead-proxy:2", "apply --image IMAGE"}} {
		ours := migrate.Ours(daemonSet(fairleadName, 3), daemonSet(kubeProxyName, 1), &migrate.Settings{}, "")
		ours.Status.NumberReady = 2
		client := fake.NewClientset(daemonSet(kubeProxyName, 1), ours, node("a", true, c.label), node("b", true, ""), podOf("b", "hash1", true))
		o := options(client, &bytes.Buffer{})
		o.Image = c.image
		w, err := New(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.sameImage(t.Context()); (c.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// With one node of several, rollback leaves what the others need.
func TestRollbackOfOneNode(t *testing.T) {
	ours := migrate.Ours(daemonSet(fairleadName, 1), daemonSet(kubeProxyName, 2), &migrate.Settings{}, "")
	client := fake.NewClientset(daemonSet(kubeProxyName, 2), ours, node("a", true, ""), node("b", true, "beside"), podOf("a", "hash1", true),
		podOf("b", "hash1", true))
	var out bytes.Buffer
	o := options(client, &out)
	o.Nodes = []string{"a"}
	w, err := New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Rollback(t.Context()); err != nil || !strings.Contains(out.String(), "the DaemonSets stay: node b is in phase beside") {
		t.Errorf("%v\n%s", err, &out)
	}
	if w := wrote(client); len(w) > 0 {
		t.Errorf("requests %v", w)
	}
}

// Verify asks every node, also after one that fails, and its error names those.
func TestVerify(t *testing.T) {
	ours := migrate.Ours(daemonSet(fairleadName, 3), daemonSet(kubeProxyName, 3), &migrate.Settings{}, "")
	client := fake.NewClientset(daemonSet(kubeProxyName, 3), ours, node("a", true, "beside"), node("b", true, "fairlead"), node("c", true, ""),
		podOf("c", "hash1", true))
	client.PrependReactor("create", "pods", func(a ktesting.Action) (bool, runtime.Object, error) {
		p := a.(ktesting.CreateAction).GetObject().(*corev1.Pod)
		p.Status.Phase = corev1.PodSucceeded
		if p.Spec.NodeName == "b" {
			p.Status.Phase, p.Status.Message = corev1.PodFailed, "2 frontends are missing"
		}
		return false, nil, nil
	})
	var out bytes.Buffer
	o := options(client, &out)
	o.Timeout = testbed.Patience
	w, err := New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	want := "a: ok (beside)\nb: FAILED (fairlead): 2 frontends are missing\nc: ok (kube-proxy)\n"
	if err := w.Verify(t.Context()); err == nil || err.Error() != "1 nodes fail: b" || out.String() != want {
		t.Errorf("%v\n%s", err, &out)
	}
}

// A node keeps the rules of kube-proxy's mode ipvs while connections go through them, and the next one is changed. With EndConnections
// it does not.
func TestConnectionsOfIPVS(t *testing.T) {
	for _, c := range []struct {
		open, end bool
		want      string
	}{
		{true, false, "a: kube-proxy's last rules stay: 3 connections depend on kube-proxy's rules\nb: done: fairlead\n" +
			"new connections meet fairlead proxy on these nodes; nodes that keep kube-proxy's last rules for open connections: 1. " +
			"Run 'fairlead migrate apply' again when they have ended, or with --end-connections to end them\n"},
		{false, false, "a: waiting for the connections that go through kube-proxy\na: removing the rules of kube-proxy\n" +
			"a: checking the rules of fairlead proxy\na: done: fairlead\nb: done: fairlead\n"},
		{true, true, "a: ended with the rules: 3 connections depend on kube-proxy's rules\na: removing the rules of kube-proxy\n" +
			"a: checking the rules of fairlead proxy\na: done: fairlead\nb: done: fairlead\n"},
	} {
		theirs := migrate.Exclude(daemonSet(kubeProxyName, 0))
		theirs.Spec.Template.Spec.Containers[0].Args = []string{"--proxy-mode=ipvs"}
		s, err := migrate.ReadSettings(theirs, nil)
		if err != nil || !s.Drains() {
			t.Fatal(s, err)
		}
		ours := migrate.Ours(daemonSet(fairleadName, 2), theirs, s, "")
		pod := podOf("a", "hash1", true)
		pod.Labels, pod.Name = map[string]string{"app.kubernetes.io/name": fairleadName}, fairleadName+"-a"
		client := fake.NewClientset(theirs, ours, node("a", true, "switched"), node("b", true, "fairlead"), pod)
		client.PrependReactor("create", "pods", func(a ktesting.Action) (bool, runtime.Object, error) {
			p := a.(ktesting.CreateAction).GetObject().(*corev1.Pod)
			p.Status.Phase = corev1.PodSucceeded
			if p.Labels[migrate.PodLabel] == "drain" && c.open {
				p.Status.Phase = corev1.PodFailed
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
					ExitCode: migrate.StillOpen, Message: "3 connections depend on kube-proxy's rules",
				}}}}
			}
			return false, nil, nil
		})
		var out bytes.Buffer
		o := options(client, &out)
		o.Timeout, o.EndConnections = testbed.Patience, c.end
		w, err := New(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.each(t.Context(), func(n migrate.NodePlan) error { return w.change(t.Context(), n, false) }); err != nil {
			t.Error(err)
		}
		w.report()
		if got := out.String(); !strings.HasSuffix(got, c.want) {
			t.Errorf("%+v:\n%s", c, got)
		}
		now, err := client.CoreV1().Nodes().Get(t.Context(), "a", metav1.GetOptions{})
		if want := map[bool]string{true: "switched", false: "fairlead"}[c.open && !c.end]; err != nil || now.Labels[migrate.Label] != want {
			t.Errorf("%+v: the node has the phase %q, want %q, %v", c, now.Labels[migrate.Label], want, err)
		}
	}
}
