package explaincmd

import (
	"fmt"
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

// A StatefulSet, where the API server has the kind, replaces Pods above its partition, and its deletion ends all of them.
func TestStatefulSets(t *testing.T) {
	labels := map[string]string{"app": "db"}
	meta := metav1.ObjectMeta{Namespace: "default", Name: "db"}
	set := func() *appsv1.StatefulSet {
		return &appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{Replicas: new(int32(3)),
			Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}}}}
	}
	renew := func(s *appsv1.StatefulSet) { s.Spec.Template.Spec.HostNetwork = true }
	partition := func(n int32) appsv1.StatefulSetUpdateStrategy {
		return appsv1.StatefulSetUpdateStrategy{RollingUpdate: &appsv1.RollingUpdateStatefulSetStrategy{Partition: &n}}
	}
	for name, c := range map[string]struct {
		change func(*appsv1.StatefulSet) // nil for a deletion
		want   string
		cuts   bool
		left   int
	}{
		"a new template": {renew,
			"StatefulSet default/db has a new template: 3 Pods end and are replaced, one after the other, the last one first",
			true, 3},
		"a partition": {func(s *appsv1.StatefulSet) { renew(s); s.Spec.UpdateStrategy = partition(2) },
			": 1 Pod ends and is replaced, one", true, 3},
		"a partition above all": {func(s *appsv1.StatefulSet) { renew(s); s.Spec.UpdateStrategy = partition(9) }, ": 0 Pods end", false, 3},
		"by hand": {func(s *appsv1.StatefulSet) {
			renew(s)
			s.Spec.UpdateStrategy.Type = appsv1.OnDeleteStatefulSetStrategyType
		}, "which replaces no Pod yet: its updateStrategy is OnDelete", false, 3},
		"fewer":    {func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32(1)) }, "has 1 replica in place of 3: 2 Pods end", true, 3},
		"deletion": {nil, "StatefulSet default/db is deleted: 3 Pods end", true, 0},
	} {
		w := &explain.World{Services: []*corev1.Service{{ObjectMeta: meta, Spec: corev1.ServiceSpec{Selector: labels}}}}
		for i := range 3 {
			w.Pods = append(w.Pods, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("db-", i), Labels: labels}})
		}
		d := &done{before: set()}
		if c.change != nil {
			after := set()
			c.change(after)
			d.after = after
		}
		got := d.into(w, map[svc.Name]bool{})
		if len(got) != 1 || !strings.Contains(got[0].Text, c.want) || (got[0].Cuts != "") != c.cuts || len(w.Pods) != c.left {
			t.Errorf("%s: %+v with %d Pods left; want %q, cuts %t, %d left", name, got, len(w.Pods), c.want, c.cuts, c.left)
		}
	}
}

// A Service for one Pod of a StatefulSet counts only that Pod, by its ordinal, with the right to read Pods and without it.
func TestPodOfStatefulSet(t *testing.T) {
	labels := map[string]string{"app": "db"}
	meta := metav1.ObjectMeta{Namespace: "default", Name: "db"}
	for name, c := range map[string]struct {
		pod    string // what the Service selects
		change func(*appsv1.StatefulSet)
		want   string // empty for no change
	}{
		"replaced": {"db-12", func(s *appsv1.StatefulSet) {
			s.Spec.Template.Spec.HostNetwork = true
			s.Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateStatefulSetStrategy{Partition: new(int32(2))}
		}, "StatefulSet default/db has a new template: 1 Pod ends and is replaced, one after the other, the last one first"},
		"below the partition": {"db-11", func(s *appsv1.StatefulSet) {
			s.Spec.Template.Spec.HostNetwork = true
			s.Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateStatefulSetStrategy{Partition: new(int32(2))}
		}, "StatefulSet default/db has a new template: 0 Pods end and are replaced, one after the other, the last one first"},
		"ended": {"db-12", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32(2)) },
			"StatefulSet default/db has 2 replicas in place of 3: 1 Pod ends"},
		"stays": {"db-11", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32(2)) }, ""},
		"moved": {"db-10", func(s *appsv1.StatefulSet) { s.Spec.Ordinals.Start = 11 },
			"StatefulSet default/db has 3 replicas from ordinal 11 on, in place of 3 from 10 on: 1 Pod ends"},
	} {
		for _, reads := range []bool{true, false} {
			before := &appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{Replicas: new(int32(3)),
				Ordinals: &appsv1.StatefulSetOrdinals{Start: 10}, Selector: &metav1.LabelSelector{MatchLabels: labels},
				Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}}}}
			after := before.DeepCopy()
			c.change(after)
			w := &explain.World{Services: []*corev1.Service{{ObjectMeta: meta,
				Spec: corev1.ServiceSpec{Selector: map[string]string{appsv1.StatefulSetPodNameLabel: c.pod}}}}}
			for i := 10; reads && i < 13; i++ {
				pod := fmt.Sprint("db-", i)
				w.Pods = append(w.Pods, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: pod,
					Labels: map[string]string{"app": "db", appsv1.StatefulSetPodNameLabel: pod}}})
			}
			got := ""
			for _, d := range (&done{before: before, after: after}).into(w, map[svc.Name]bool{}) {
				got += d.Text
			}
			if got != c.want {
				t.Errorf("%s, may read Pods: %t: %q, want %q", name, reads, got, c.want)
			}
		}
	}
}
