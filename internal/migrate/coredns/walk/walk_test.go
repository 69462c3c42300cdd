package walk

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/fairlead/fairlead/internal/migrate/coredns"
)

const system = "kube-system"

func app() map[string]string { return map[string]string{"k8s-app": "kube-dns"} }

// cluster has CoreDNS in a phase, behind a Service with other objects.
func cluster(phase coredns.Phase, others ...runtime.Object) *fake.Clientset {
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "coredns", Namespace: system}}
	if phase != coredns.Before {
		d.Annotations = map[string]string{coredns.Annotation: string(phase), coredns.Replicas: "1"}
	}
	d.Spec.Replicas = new(int32(1))
	d.Spec.Selector = &metav1.LabelSelector{MatchLabels: app()}
	d.Spec.Template.Labels = app()
	d.Spec.Template.Spec.Volumes = []corev1.Volume{{Name: "config", VolumeSource: corev1.VolumeSource{
		ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "coredns"}},
	}}}
	d.Spec.Template.Spec.Containers = []corev1.Container{{
		Image: "coredns:1", Args: []string{"-conf", "/etc/coredns/Corefile"},
		VolumeMounts: []corev1.VolumeMount{{Name: "config", MountPath: "/etc/coredns"}},
	}}
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "kube-dns", Namespace: system}}
	s.Spec = corev1.ServiceSpec{ClusterIP: "10.96.0.10", Selector: app()}
	s.Spec.Ports = []corev1.ServicePort{{Port: 53, Protocol: corev1.ProtocolUDP}}
	config := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "coredns", Namespace: system}}
	config.Data = map[string]string{"Corefile": ".:53 {\n  kubernetes cluster.local\n}\n"}
	return fake.NewClientset(append([]runtime.Object{d, s, config}, others...)...)
}

func pod(name, ip string, labels ...map[string]string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: system, Labels: map[string]string{}}}
	for _, l := range labels {
		maps.Copy(p.Labels, l)
	}
	p.Status.PodIP = ip
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	return p
}

func behind(addresses ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "kube-dns-1", Namespace: system,
		Labels: map[string]string{discoveryv1.LabelServiceName: "kube-dns"}}}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

func newWalk(t *testing.T, client *fake.Clientset) *Walk {
	t.Helper()
	w, err := New(t.Context(), Options{Client: client, Out: &bytes.Buffer{}, Timeout: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func deployment(t *testing.T, client *fake.Clientset) *appsv1.Deployment {
	t.Helper()
	d, err := client.AppsV1().Deployments(system).Get(t.Context(), "coredns", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Where something is refused, or another server was installed by hand, no command writes.
func TestRefused(t *testing.T) {
	byHand := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: coredns.Name, Namespace: system}}
	byHand.Spec.Template.Spec.Containers = []corev1.Container{{Image: "x"}}
	client := cluster(coredns.Before, byHand)
	w := newWalk(t, client)
	for name, do := range map[string]func(context.Context) error{"apply": w.Apply, "verify": w.Verify, "rollback": w.Rollback} {
		if err := do(t.Context()); err == nil || !strings.Contains(err.Error(), "was not installed by 'fairlead migrate'") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, a := range client.Actions() {
		if v := a.GetVerb(); v != "get" && v != "list" {
			t.Errorf("a request to %s %s", v, a.GetResource().Resource)
		}
	}
}

// A phase that another client has changed is an error, unless it is the wanted one: then the answer to an earlier request was lost.
func TestEnter(t *testing.T) {
	client := cluster(coredns.Beside)
	w := newWalk(t, client)
	if err := w.enter(t.Context(), coredns.Both, coredns.Switched); !errors.Is(err, errChanged) {
		t.Errorf("another client's phase: %v", err)
	}
	if err := w.enter(t.Context(), coredns.Before, coredns.Beside); err != nil {
		t.Errorf("the wanted phase: %v", err)
	}
	if err := w.enter(t.Context(), coredns.Beside, coredns.After); err != nil || *deployment(t, client).Spec.Replicas != 0 {
		t.Errorf("the next phase: %v, %+v", err, deployment(t, client).Spec)
	}
}

// A failure is noted with the ways on; the next phase removes the note.
func TestStopped(t *testing.T) {
	client := cluster(coredns.Beside)
	w := newWalk(t, client)
	err := w.stopped(t.Context(), coredns.Beside, coredns.Step{Action: coredns.Compare}, errors.New("they differ"))
	if err == nil || !strings.Contains(err.Error(), "'fairlead migrate rollback --component dns'") {
		t.Errorf("the error is %v", err)
	}
	if got := newWalk(t, client).Plan().Failure; !strings.Contains(got, "they differ") {
		t.Errorf("noted is %q", got)
	}
	if err := w.enter(t.Context(), coredns.Beside, coredns.Both); err != nil || newWalk(t, client).Plan().Failure != "" {
		t.Errorf("noted in the next phase: %v, %q", err, newWalk(t, client).Plan().Failure)
	}
}

// The waits tell the programs apart although both have the labels that the Service selects.
func TestBehind(t *testing.T) {
	theirs, ours := pod("coredns-1", "10.0.0.1", app()), pod("fairlead-1", "10.0.0.2", app(), coredns.Selector())
	for _, c := range []struct {
		name           string
		slice          *discoveryv1.EndpointSlice
		narrow         bool
		coredns, ofOur string // a part of the errors
	}{
		{"both", behind("10.0.0.1", "10.0.0.2"), false, "", ""},
		{"only CoreDNS", behind("10.0.0.1"), false, "", "does not have the address 10.0.0.2 of fairlead dns"},
		{"only fairlead", behind("10.0.0.2"), false, "does not have the address 10.0.0.1 of CoreDNS", ""},
		{"both, but only fairlead is selected", behind("10.0.0.1", "10.0.0.2"), true, "", "still has the address 10.0.0.1"},
	} {
		w := newWalk(t, cluster(coredns.Both, theirs, ours, c.slice))
		if c.narrow {
			if err := w.selectOnlyOurs(t.Context(), true); err != nil {
				t.Fatal(err)
			}
		}
		for want, err := range map[*string]error{&c.coredns: w.behindCoreDNS(t.Context()), &c.ofOur: w.behindFairlead(t.Context())} {
			if (*want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), *want) {
				t.Errorf("%s: %v, want %q", c.name, err, *want)
			}
		}
	}
}

// The Service selects what it has selected before, and fairlead's Pods have the labels of their ReplicaSet only.
func TestWidenAndLeave(t *testing.T) {
	client := cluster(coredns.Switched, pod("fairlead-1", "10.0.0.2", app(), coredns.Selector(), map[string]string{"pod-template-hash": "x"}),
		behind("10.0.0.2"))
	w := newWalk(t, client)
	for _, only := range []bool{true, true, false} {
		if err := w.selectOnlyOurs(t.Context(), only); err != nil {
			t.Fatal(err)
		}
	}
	s, err := w.service(t.Context())
	if err != nil || !maps.Equal(s.Spec.Selector, app()) {
		t.Errorf("the Service selects %v, %v", s.Spec.Selector, err)
	}
	if err := w.leave(t.Context()); err == nil || !strings.Contains(err.Error(), "still has the address 10.0.0.2") {
		t.Errorf("while the Service has the address: %v", err)
	}
	p, err := client.CoreV1().Pods(system).Get(t.Context(), "fairlead-1", metav1.GetOptions{})
	if err != nil || p.Labels["k8s-app"] != "" || p.Labels["pod-template-hash"] != "x" || p.Labels[coredns.PodLabel] == "" {
		t.Errorf("the labels are %v, %v", p.Labels, err)
	}
}

// Answers are not compared without questions: that would find no difference.
func TestNoQuestions(t *testing.T) {
	client := cluster(coredns.Beside, pod("coredns-1", "10.0.0.1", app()), pod("fairlead-1", "10.0.0.2", coredns.Selector()))
	config, err := client.CoreV1().ConfigMaps(system).Get(t.Context(), "coredns", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config.Data["Corefile"] = "nosuch"
	if _, err := client.CoreV1().ConfigMaps(system).Update(t.Context(), config, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := newWalk(t, client).Verify(t.Context()); err == nil || !strings.Contains(err.Error(), "there are no questions") {
		t.Errorf("with a Corefile that cannot be read: %v", err)
	}
}
