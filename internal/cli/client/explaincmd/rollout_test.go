package explaincmd

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/svc"
)

// Every change of a set by which Pods end is named, with how many end, and cuts their connections.
func TestRollouts(t *testing.T) {
	labels := map[string]string{"app": "web"}
	selector := &metav1.LabelSelector{MatchLabels: labels}
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}}
	meta := metav1.ObjectMeta{Namespace: "default", Name: "web"}
	deployment := func() *appsv1.Deployment {
		return &appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(3)), Selector: selector, Template: *template.DeepCopy()}}
	}
	daemons := func() *appsv1.DaemonSet {
		return &appsv1.DaemonSet{ObjectMeta: meta, Spec: appsv1.DaemonSetSpec{Selector: selector, Template: *template.DeepCopy()}}
	}
	restart := map[string]string{"kubectl.kubernetes.io/restartedAt": "2026-01-01T00:00:00Z"}
	for _, c := range []struct {
		name   string
		change func(*appsv1.Deployment, *appsv1.DaemonSet)
		want   string // the text, empty for no change
		cuts   bool
		left   int // Pods
	}{
		{"nothing", func(*appsv1.Deployment, *appsv1.DaemonSet) {}, "", false, 3},
		{"more replicas", func(d *appsv1.Deployment, _ *appsv1.DaemonSet) { d.Spec.Replicas = new(int32(4)) }, "", false, 3},
		{"fewer replicas", func(d *appsv1.Deployment, _ *appsv1.DaemonSet) { d.Spec.Replicas = new(int32(2)) },
			"Deployment default/web has 2 replicas in place of 3: 1 Pod ends", true, 3},
		{"no replicas", func(d *appsv1.Deployment, _ *appsv1.DaemonSet) { d.Spec.Replicas = new(int32(0)) },
			"Deployment default/web has 0 replicas in place of 3: 3 Pods end", true, 0},
		{"a restart", func(d *appsv1.Deployment, _ *appsv1.DaemonSet) { d.Spec.Template.Annotations = restart },
			"Deployment default/web has a new template: 3 Pods end and are replaced, one after the other", true, 3},
		{"a restart of a paused one", func(d *appsv1.Deployment, _ *appsv1.DaemonSet) {
			d.Spec.Template.Annotations, d.Spec.Paused = restart, true
		}, "which replaces no Pod yet: it is paused", false, 3},
		{"another label", func(d *appsv1.Deployment, _ *appsv1.DaemonSet) {
			d.Spec.Template.Labels = map[string]string{"app": "other"}
		},
			"the Service does not select the new ones", true, 3},
		{"a restart of a DaemonSet", func(_ *appsv1.Deployment, d *appsv1.DaemonSet) { d.Spec.Template.Annotations = restart },
			"DaemonSet default/web has a new template: 3 Pods end", true, 3},
		{"a restart of a DaemonSet by hand", func(_ *appsv1.Deployment, d *appsv1.DaemonSet) {
			d.Spec.Template.Annotations, d.Spec.UpdateStrategy.Type = restart, appsv1.OnDeleteDaemonSetStrategyType
		}, "its updateStrategy is OnDelete", false, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &explain.World{Services: []*corev1.Service{{ObjectMeta: meta, Spec: corev1.ServiceSpec{Selector: labels}},
				{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "other"},
					Spec: corev1.ServiceSpec{Selector: map[string]string{"app": "none"}}}}}
			for range 3 {
				w.Pods = append(w.Pods, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Labels: labels}})
			}
			d, s := deployment(), daemons()
			c.change(d, s)
			touched := map[svc.Name]bool{}
			got := (&done{before: deployment(), after: d}).into(w, touched)
			got = append(got, (&done{before: daemons(), after: s}).into(w, touched)...)
			cuts := slices.ContainsFunc(got, func(d explain.Change) bool { return d.Cuts != "" })
			if len(got) > 1 || (c.want == "") != (len(got) == 0) || len(got) == 1 && !strings.Contains(got[0].Text, c.want) || cuts != c.cuts {
				t.Errorf("%+v, want %q, cuts %t", got, c.want, c.cuts)
			}
			if len(w.Pods) != c.left || touched[svc.NameOf(w.Services[0])] != (c.left == 0) {
				t.Errorf("%d Pods are left, want %d; touched: %v", len(w.Pods), c.left, touched)
			}
		})
	}
}
