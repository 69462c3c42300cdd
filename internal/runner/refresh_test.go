package runner_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A running Pod sees changes of its ConfigMaps, Secrets and labels, all files of a volume
// in one step; what is deleted stays; the agent that comes back goes on with it.
func TestVolumesFollowTheirObjects(t *testing.T) {
	c := newCluster(t, nil)
	maps := c.client.CoreV1().ConfigMaps("default")
	content := func(n int) map[string]string {
		return map[string]string{"one": fmt.Sprint("v", n), "two": fmt.Sprint("v", n)}
	}
	if _, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "config"}, Data: content(0)},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.client.CoreV1().Secrets("default").Delete(context.Background(), "later", metav1.DeleteOptions{})
	})
	p := pod("follower", `trap 'exit 0' TERM
		while :; do
			( cd -P /mnt/config/..data && a=$(cat one) && b=$(cat two) && test "$a" != "$b" && echo "torn $a $b" ) 2>/dev/null
			s="$(cat /mnt/config/one) $(cat /mnt/labels/labels | tr -d '\n') $(cat /mnt/secret/key 2>/dev/null)"
			test "$s" = "$last" || echo "sees $s."; last=$s; sleep 0.01
		done`)
	items := []corev1.DownwardAPIVolumeFile{{Path: "labels", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels"}}}
	p.Spec.Volumes = []corev1.Volume{
		{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: "config"}}}},
		{Name: "labels", VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: items}}},
		{Name: "secret", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "later", Optional: new(true)}}},
		{Name: "base"},
	}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "base", MountPath: "/mnt"}, {Name: "config", MountPath: "/mnt/config"},
		{Name: "labels", MountPath: "/mnt/labels"}, {Name: "secret", MountPath: "/mnt/secret"}}
	// Mount points below a volume must be there: an init container makes them.
	p.Spec.InitContainers = []corev1.Container{{Name: "init", Image: "host",
		Command: []string{"mkdir", "/mnt/config", "/mnt/labels", "/mnt/secret"}, VolumeMounts: p.Spec.Containers[0].VolumeMounts[:1]}}
	c.create(p)
	got := c.ready("follower")
	sees := func(what string) {
		t.Helper()
		await(t, what, func() bool { return strings.Contains(c.logOf(got, 0), "sees "+what+".") })
	}
	sees(`v0 app="follower" `)
	for n := 1; n <= 20; n++ {
		if _, err := maps.Update(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "config"}, Data: content(n)},
			metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	sees(`v20 app="follower" `)
	if _, err := c.client.CoreV1().Pods("default").Patch(t.Context(), "follower", types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"app":"new"}}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	sees(`v20 app="new" `)
	if _, err := c.client.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "later"},
		StringData: map[string]string{"key": "secret"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	sees(`v20 app="new" secret`)
	if err := maps.Delete(t.Context(), "config", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.stop()
	c.start()
	if _, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "config"}, Data: content(21)},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	sees(`v21 app="new" secret`)
	if log := c.logOf(got, 0); strings.Contains(log, "torn") || strings.Contains(log, "sees  ") {
		t.Errorf("the files did not change in one step, or were gone:\n%s", log)
	}
	if s := c.get("follower").Status.ContainerStatuses[0]; s.RestartCount != 0 {
		t.Errorf("%d restarts", s.RestartCount)
	}
}
